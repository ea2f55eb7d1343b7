"""What nobody looks at: NaN, Inf and zeros among values that are passed on as they are, counted as they stream by.

Two reductions a chunk tell whether any number has an exponent of ones or any bit but the sign; only where one does are
they counted. Numbers are little-endian: of 16 or 32 bits, as BF16, F16, F32; of FP8 codes only zeros are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from shardmill.pipeline.types import TensorRef

# dtype -> (numpy's integer of that width, bits of an exponent of ones)
_FLOATS: Final = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}
_CODES: Final = ("F8_E4M3", "F8_E5M2")


@dataclass(slots=True)
class _Count:
    """What is known of one tensor so far."""

    nan: int = 0
    inf: int = 0
    is_zero: bool = True


class Census:
    """Counts over adjacent tensors from the stream of their data, as TensorSplitter digests them."""

    def __init__(self, tensors: Sequence[TensorRef]) -> None:
        self._tensors = tensors
        self._counts = {ref.name: _Count() for ref in tensors}
        self._at, self._rest = 0, b""
        self._left = tensors[0].bytes if tensors else 0

    def update(self, chunk: memoryview) -> None:
        while len(chunk):
            while not self._left:
                self._at += 1
                self._left = self._tensors[self._at].bytes
            part = chunk[: self._left]
            self._look(self._tensors[self._at], part)
            self._left -= len(part)
            chunk = chunk[len(part) :]

    def found(self) -> dict[str, dict[str, int]]:
        """Tensor -> what is odd about it, for those of which anything is."""
        return {ref.name: odd for ref in self._tensors if (odd := _odd(ref, self._counts[ref.name]))}

    def _look(self, ref: TensorRef, part: memoryview) -> None:
        """Adds a part of a tensor. An element that two chunks share is put together."""
        count = self._counts[ref.name]
        if ref.dtype in _CODES:
            count.is_zero = count.is_zero and not (np.frombuffer(part, np.uint8) & 0x7F).any()
        if ref.dtype not in _FLOATS:
            return
        kind, ones = _FLOATS[ref.dtype]
        item = np.dtype(kind).itemsize
        if self._rest:
            taken = part[: item - len(self._rest)]
            self._rest, part = self._rest + bytes(taken), part[len(taken) :]
            if len(self._rest) < item:
                return
            _count(np.frombuffer(self._rest, kind), ones, count)
        whole = len(part) // item * item
        self._rest = bytes(part[whole:])
        if whole:
            _count(np.frombuffer(part[:whole], kind), ones, count)


def _count(bits: Any, ones: int, count: _Count) -> None:
    """bits: unsigned [n]. The largest as signed numbers is a positive one, the largest unsigned a negative one."""
    sign = 1 << (8 * bits.itemsize - 1)
    most, most_positive = int(bits.max()), int(bits.view(bits.dtype.str.replace("u", "i")).max())
    if most_positive >= ones or most >= sign + ones:
        magnitudes = bits & (sign - 1)
        count.nan += int((magnitudes > ones).sum())
        count.inf += int((magnitudes == ones).sum())
    if most not in (0, sign) or most_positive > 0:
        count.is_zero = False


def _odd(ref: TensorRef, count: _Count) -> dict[str, int]:
    odd = {name: number for name, number in (("nan", count.nan), ("inf", count.inf)) if number}
    if not ref.bytes:
        return {"empty": 1}
    if len(ref.shape) > 1 and count.is_zero and (ref.dtype in _FLOATS or ref.dtype in _CODES):
        odd["zero"] = 1
    return odd


def words(tensor: str, odd: dict[str, int]) -> str:
    """The sentence about one tensor."""
    kinds = {"nan": "NaN", "inf": "Inf"}
    told = [f"{number} values that are {kinds[name]}" for name, number in odd.items() if name in kinds]
    told += [
        text for name, text in (("zero", "nothing but zeros"), ("empty", "no value at all")) if name in odd
    ]
    return f"{tensor}: holds {' and '.join(told)}"
