"""Every number format that the judge knows: the folder `verify.formats.forms` is the table, a file a format.

A module there that has FORMS adds them; nothing else has to know. Their order is that of the modules' names.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from shardmill.verify.formats import forms
from shardmill.verify.formats.linear import Form


def _found() -> dict[str, Form]:
    names = sorted(each.name for each in pkgutil.iter_modules(forms.__path__))
    modules = [importlib.import_module(f"{forms.__name__}.{name}") for name in names]
    return {form.kind: form for module in modules for form in getattr(module, "FORMS", ())}


FORMS: Mapping[str, Form] = _found()
