"""What an case is: a clean checkpoint, what was done to it, and the rule that must say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.verify.zoo.clean import CLEAN
from tests.verify.zoo.model import Model
from tests.verify.zoo.published import PUBLISHED

BASES: Mapping[str, Callable[[], Model]] = {**CLEAN, **{one.name: one.model for one in PUBLISHED}}


@dataclass(frozen=True)
class Case:
    """`change` works on the model before it is written, `damage` on the folder after."""

    name: str
    base: str
    rule: str  # slug
    question: str = "integrity"
    change: Callable[[Model], None] | None = None
    damage: Callable[[Path], None] | None = None
    tensor: str = ""  # the finding must name it

    def write(self, folder: Path) -> None:
        model = BASES[self.base]()
        if self.change is not None:
            self.change(model)
        model.write(folder)
        if self.damage is not None:
            self.damage(folder)


Row = tuple[str, str, str, Callable[..., None]]


def changed(question: str, *rows: Row) -> Iterator[Case]:
    """(name, base, rule, change of the model)"""
    for name, base, rule, change in rows:
        yield Case(name, base, rule, question, change=change)


def damaged(question: str, *rows: Row) -> Iterator[Case]:
    """(name, base, rule, damage of the folder)"""
    for name, base, rule, damage in rows:
        yield Case(name, base, rule, question, damage=damage)
