"""Which weights a question looked at: each is judged, judged in part, or not judged, counted by its form.

A verdict covers what was judged and nothing else, so that these counts stand above it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

FORMS_SHOWN = 6


@dataclass(slots=True)
class Coverage:
    """Weights by form; a form is words such as "FP8 in blocks" or "GPTQ codes"."""

    judged: Counter[str] = field(default_factory=Counter)
    in_part: Counter[str] = field(default_factory=Counter)  # the form, and in its words what was judged of it
    not_judged: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.judged.total() + self.in_part.total() + self.not_judged.total()

    @property
    def whole(self) -> bool:
        """Whether every weight was judged."""
        return not self.in_part and not self.not_judged

    def as_json(self) -> dict[str, object]:
        return {
            "weights": self.total,
            "judged": dict(sorted(self.judged.items())),
            "judged_in_part": dict(sorted(self.in_part.items())),
            "not_judged": dict(sorted(self.not_judged.items())),
        }

    def lines(self) -> Iterator[str]:
        """`not judged: 96 of 210 weights (gpt-oss blocks)`"""
        for title, forms in (("not judged", self.not_judged), ("judged in part", self.in_part)):
            if forms:
                yield f"{title}: {forms.total():,} of {self.total:,} weights ({_named(forms)})"


def _named(forms: Counter[str]) -> str:
    if len(forms) == 1:
        return next(iter(forms))
    shown = [f"{count:,} {form}" for form, count in forms.most_common(FORMS_SHOWN)]
    rest = len(forms) - len(shown)
    return ", ".join(shown) + (f", {rest} more forms" if rest else "")
