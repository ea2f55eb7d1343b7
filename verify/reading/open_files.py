"""Files of a checkpoint that are read at many places: each is opened once."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from shardmill.verify.reading.header import DTYPE_BITS, Tensor
from shardmill.verify.reading.source import Reader, Source


class OpenFiles:
    """A source with its files held open, so that many small reads are cheap. For one thread."""

    def __init__(self, source: Source) -> None:
        self._source, self._readers, self._stack = source, dict[str, Reader](), ExitStack()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def bytes(self, tensor: Tensor, begin: int, end: int) -> NDArray[np.uint8]:
        """Bytes [begin, end) of a tensor's data."""
        if tensor.file not in self._readers:
            self._readers[tensor.file] = self._stack.enter_context(self._source.open(tensor.file))
        buffer = np.empty(end - begin, np.uint8)
        self._readers[tensor.file].read_into(tensor.begin + begin, buffer.data)
        return buffer

    def rows(self, tensor: Tensor, first: int, last: int) -> NDArray[np.uint8]:
        """Rows [first, last) of a tensor taken as a matrix: u8 [rows, bytes of a row]."""
        row_bytes = DTYPE_BITS[tensor.dtype] * (tensor.shape[-1] if tensor.shape else 1) // 8
        return self.bytes(tensor, first * row_bytes, last * row_bytes).reshape(last - first, row_bytes)
