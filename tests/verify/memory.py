"""A checkpoint that lies in memory, for tests that ask thousands of questions."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from shardmill.verify.rules.findings import Finding, UnreadableError


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_into(self, begin: int, buffer: memoryview) -> None:
        piece = self._data[begin : begin + len(buffer)]
        if len(piece) < len(buffer):
            raise UnreadableError(Finding("truncated-file", "memory"))
        buffer[:] = piece

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Memory:
    """A source of a few files."""

    remote, listed, where, transferred = False, True, "memory", 0

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = dict(files)
        self.digests: Mapping[str, str] = {}

    def files(self) -> dict[str, int]:
        return {name: len(data) for name, data in self._files.items()}

    def findings(self) -> list[Finding]:
        return []

    def open(self, file: str) -> _Reader:
        return _Reader(self._files[file])
