"""Every number format that the judge knows: one literal table, made of one file a format in `verify.formats.forms`."""

from __future__ import annotations

from collections.abc import Mapping

from shardmill.verify.formats.forms import block_fp8, gptq, integers, mxfp4, mxfp8, nvfp4, whole_fp8
from shardmill.verify.formats.linear import Form

FORMS: Mapping[str, Form] = {
    form.kind: form
    for form in (
        *block_fp8.FORMS,
        *whole_fp8.FORMS,
        *mxfp8.FORMS,
        *mxfp4.FORMS,
        *nvfp4.FORMS,
        *integers.FORMS,
        *gptq.FORMS,
    )
}
