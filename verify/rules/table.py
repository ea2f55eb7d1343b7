"""Every rule that a question may report: one literal table from which `--list-rules` and the catalogue are made.

A rule is born here and nowhere else: id, slug, severity, the sentence that says what is wrong, what to do.
Ids never change their meaning: 0xx files, 1xx values of scales, 2xx names and groups, 3xx loading,
4xx differences, 5xx decoded values, 6xx recomputed bits, 7xx signatures, 8xx remote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardmill.verify.rules.files import FILES
from shardmill.verify.rules.meaning import MEANING
from shardmill.verify.rules.pairs import PAIRS


class Rule(NamedTuple):
    """One kind of fault."""

    id: str
    slug: str
    severity: str  # "error", "warning" or "info"
    sentence: str
    advice: str


RULES: Mapping[str, Rule] = {row[1]: Rule(*row) for row in (*FILES, *MEANING, *PAIRS)}
BY_ID: Mapping[str, Rule] = {rule.id: rule for rule in RULES.values()}


def rule_named(text: str) -> Rule | None:
    """The rule with this id (any case) or slug; slugs of 0.1 were spelled with an s ("nothing-quantised")."""
    return BY_ID.get(text.upper()) or RULES.get(text.replace("quantis", "quantiz"))
