"""All animals, and how a question is asked of a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.zoo import files, headers, loading, names, scales
from tests.zoo.case import Animal
from verify.findings import Report
from verify.integrity import integrity
from verify.lint import lint
from verify.loads import loads
from verify.source import Folder

ANIMALS: tuple[Animal, ...] = (
    *headers.ANIMALS,
    *files.ANIMALS,
    *scales.ANIMALS,
    *names.ANIMALS,
    *loading.ANIMALS,
)

QUESTIONS: Mapping[str, Callable[[Path], Report]] = {
    "integrity": lambda folder: integrity(Folder(folder)),
    "lint": lambda folder: lint(Folder(folder)),
    "loads": lambda folder: loads(Folder(folder)),
}


def ask(question: str, folder: Path) -> Report:
    return QUESTIONS[question](folder)
