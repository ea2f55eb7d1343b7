"""All cases, and how a question is asked of a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import lint
from shardmill.verify.questions.loads import loads
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report
from tests.verify.zoo import files, forms, headers, loading, names, scales, whole
from tests.verify.zoo.case import Case

CASES: tuple[Case, ...] = (
    *headers.CASES,
    *files.CASES,
    *scales.CASES,
    *forms.CASES,
    *names.CASES,
    *loading.CASES,
    *whole.CASES,
)

QUESTIONS: Mapping[str, Callable[[Path], Report]] = {
    "integrity": lambda folder: integrity(Folder(folder)),
    "lint": lambda folder: lint(Folder(folder)),
    "loads": lambda folder: loads(Folder(folder)),
}


def ask(question: str, folder: Path) -> Report:
    return QUESTIONS[question](folder)
