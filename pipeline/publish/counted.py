"""A file's way to the hub, counted as the library reads it. Xet reads by itself, so there it is counted at its end."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


class Count:
    """Hears of bytes that go, of `total`, and passes on no more than that: a part may go twice."""

    def __init__(self, total: int, advance: Callable[[int], None]) -> None:
        self._left, self._advance = total, advance

    def add(self, count: int) -> None:
        passed = min(count, self._left)
        self._left -= passed
        if passed:
            self._advance(passed)

    def end(self) -> None:
        """All has arrived, counted or not."""
        self.add(self._left)


class _Read(io.BufferedReader):
    """An open file that tells how much is read of it."""

    def __init__(self, path: str, advance: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path))
        self._advance = advance

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self._advance(len(data))
        return data


def counted_addition(name: str, path: Path, advance: Callable[[int], None]) -> Any:
    """The library's operation that adds the file at `path` as `name`, whose file is counted as it is read."""
    from huggingface_hub import CommitOperationAdd

    class Addition(CommitOperationAdd):  # type: ignore[misc]  # the library is not typed here
        @contextmanager
        def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
            with _Read(str(path), advance) as file:
                yield file

    return Addition(name, path)
