"""What the loaders of a profile can't read, though the profile can say it: refused, unless the recipe names others.

Known of transformers 5.24 with compressed-tensors 0.20.1, read in their code and run: each format's file says it of its
own spelling. A loader that stops is refused here as one that loads wrong numbers is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from shardmill.pipeline.actions import Convert
from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import Spelling
from shardmill.pipeline.plan.alike import alike
from shardmill.pipeline.plan.profiles.child import Child, blocks, is_quantizing, module_of

TRANSFORMERS = "transformers"
_EXPERT = re.compile(r"\.experts\.\d+\.")


class UnreadError(PlanError):
    """A loader that should read the result can't, for `reason`. The recipe may name the loaders that must."""

    def __init__(self, reason: str, problems: Sequence[str]) -> None:
        super().__init__(problems)
        self.reason = reason


def refuse_unread(child: Child, profile: str, loaders: Sequence[str]) -> None:
    """loaders: who reads the profile's results. Raises UnreadError, or PlanError where the recipe names another."""
    wanted = child.recipe.output.loaders or tuple(loaders)
    if strange := [each for each in wanted if each not in loaders]:
        known = ", ".join(loaders)
        raise PlanError(
            [f"output.loaders: no {strange[0]!r} reads the profile {profile!r}; choose from {known}"]
        )
    if TRANSFORMERS not in wanted:
        return
    others = ", ".join(f'"{each}"' for each in loaders if each != TRANSFORMERS)
    way_out = f"write `loaders = [{others}]` under [output] if transformers need not read it, or choose another format"
    if found := list(unread(child, profile)):
        raise UnreadError(": ".join(found[0]), alike((weight, f"{why}; {way_out}") for weight, why in found))


def unread(child: Child, profile: str) -> Iterator[tuple[str, str]]:
    """(weight, why transformers can't read it) of every quantized weight of the child."""
    for weight, spelling in _spelled(child, profile):
        if spelling.unread:
            yield weight, spelling.unread
        elif spelling.unread_expert and _EXPERT.search(module_of(weight) + "."):
            yield weight, spelling.unread_expert


def _spelled(child: Child, profile: str) -> Iterator[tuple[str, Spelling]]:
    made = {
        name: act.to
        for name, act in child.conversions.items()
        if isinstance(act, Convert) and is_quantizing(act)
    }
    if child.conversions:
        made |= dict.fromkeys(blocks(child), "fp8-block")
    for weight, form in made.items():
        if spelling := formats()[form].spelling(profile):
            yield weight, spelling
