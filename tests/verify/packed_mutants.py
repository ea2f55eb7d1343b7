"""Changes of GPTQ's, AWQ's and bitsandbytes' codes and scales at true places: rows, inputs, blocks, single scales.

Each is a fault that only the parent's values show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from shardmill.verify.formats.linear import FLAT, Linear, bits_of
from tests.verify.zoo.model import Blob, Model

LAYER = "model.layers.1."
MODULES = (f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.down_proj")
Change = Callable[[Model], bool]  # whether it could be made
Codes = np.ndarray  # [stored rows, stored columns] of codes, whatever the words


def packed_changes(linears: dict[str, Linear]) -> Iterator[tuple[str, str, Change]]:
    for module in MODULES:
        linear = linears.get(module)
        if linear is not None and linear.kind in ("gptq", "awq"):
            yield from _of_words(linear)
        elif linear is not None and linear.kind in FLAT:
            yield from _of_bytes(linear)


def _of_words(linear: Linear) -> Iterator[tuple[str, str, Change]]:
    assert linear.weight is not None
    name, bits, along_rows = linear.weight.name, bits_of(linear), linear.kind == "gptq"
    groups = linear.scales["scales"].shape[0]

    def edited(change: Callable[[Codes], None]) -> Change:
        def changed(model: Model) -> bool:
            codes = _unpacked(model[name], bits, along_rows)
            before = codes.copy()
            change(codes)
            model[name].data = _packed(codes, bits, along_rows)
            return bool((codes != before).any())

        return changed

    def loud(codes: Codes) -> int:
        """An input whose codes are not all rounding: AWQ makes some inputs' weights smaller than a step."""
        return int(np.argmax(np.square(codes - half).sum(1)))

    half, most = 1 << (bits - 1), 1 << bits
    high = linear.shape[0] // groups
    for operator, change in (
        ("two rows exchanged", lambda c: _swap(c, (slice(None), 3), (slice(None), 40))),
        ("two inputs exchanged", lambda c: _swap(c, (5,), (90,))),
        ("an input's signs flipped", lambda c: _set(c, (loud(c),), (most - c[loud(c)]) % most)),
        ("a row's signs flipped", lambda c: _set(c, (slice(None), 9), (most - c[:, 9]) % most)),
        ("a row of zeros", lambda c: _set(c, (slice(None), 11), half)),
        ("an input of zeros", lambda c: _set(c, (13,), half)),
        ("a block of another row", lambda c: _set(c, (slice(0, high), 17), c[:high, 30])),
        ("a block of another input group", lambda c: _set(c, (slice(0, high), 19), c[-high:, 19])),
        ("a quarter of a row reversed", lambda c: _set(c, (slice(0, high), 21), c[:high, 21][::-1])),
        ("all rows shifted by one", lambda c: _set(c, (...,), np.roll(c, 1, axis=1))),
        ("all inputs shifted by one", lambda c: _set(c, (...,), np.roll(c, 1, axis=0))),
    ):
        yield "with parent", operator, edited(change)
    scales = linear.scales["scales"].name
    for factor in (2.0, 0.5, -1.0):
        yield "with parent", f"one scale times {factor:g}", _scaled(scales, (0, 23), factor)
        yield "with parent", f"a row's scales times {factor:g}", _scaled(scales, (slice(None), 23), factor)
    yield "with parent", "two rows' scales exchanged", _scales_exchanged(scales)
    yield "with parent", "zeros one higher", _zeros_moved(linear.extras["qzeros"].name)


def _swap(codes: Codes, a: tuple[object, ...], b: tuple[object, ...]) -> None:
    codes[a], codes[b] = codes[b].copy(), codes[a].copy()  # type: ignore[index]


def _set(codes: Codes, place: tuple[object, ...], value: object) -> None:
    codes[place] = value.copy() if isinstance(value, np.ndarray) else value  # type: ignore[index]


def _unpacked(blob: Blob, bits: int, along_rows: bool) -> Codes:
    words = np.frombuffer(blob.data, "<u4").reshape(blob.shape)
    lanes = [words >> np.uint32(bits * place) & np.uint32((1 << bits) - 1) for place in range(32 // bits)]
    stacked = np.stack(lanes, axis=1 if along_rows else 2).astype(np.int64)
    rows, columns = blob.shape
    return stacked.reshape(-1, columns) if along_rows else stacked.reshape(rows, -1)


def _packed(codes: Codes, bits: int, along_rows: bool) -> bytes:
    lanes = 32 // bits
    shape = (-1, lanes, codes.shape[1]) if along_rows else (codes.shape[0], -1, lanes)
    stacked = codes.reshape(shape).astype(np.uint32)
    shifts = (np.arange(lanes, dtype=np.uint32) * np.uint32(bits)).reshape(
        (1, -1, 1) if along_rows else (1, 1, -1)
    )
    return (stacked << shifts).sum(axis=1 if along_rows else 2, dtype=np.uint32).astype("<u4").tobytes()


def _scaled(name: str, place: tuple[object, ...], factor: float) -> Change:
    def changed(model: Model) -> bool:
        scales = np.frombuffer(model[name].data, "<f2").reshape(model[name].shape).copy()
        scales[place] = scales[place] * np.float16(factor)  # type: ignore[index]
        model[name].data = scales.astype("<f2").tobytes()
        return True

    return changed


def _scales_exchanged(name: str) -> Change:
    """Of the two rows whose scales differ most."""

    def changed(model: Model) -> bool:
        scales = np.frombuffer(model[name].data, "<f2").reshape(model[name].shape).copy()
        order = np.argsort(np.abs(scales[0].astype(np.float32)))
        scales[:, order[[0, -1]]] = scales[:, order[[-1, 0]]]
        model[name].data = scales.tobytes()
        return True

    return changed


def _zeros_moved(name: str) -> Change:
    """Every zero is one more, as of the other layout of GPTQ."""

    def changed(model: Model) -> bool:
        words = np.frombuffer(model[name].data, "<u4")
        step = 0x11111111 if int(words[0]) & 0xFF in (0x77, 0x88) else 0x01010101
        model[name].data = (words + np.uint32(step)).astype("<u4").tobytes()
        return True

    return changed


def _of_bytes(linear: Linear) -> Iterator[tuple[str, str, Change]]:
    """Of bitsandbytes: rows lie one after another, two codes a byte, the first in the high nibble."""
    assert linear.weight is not None
    name = linear.weight.name
    rows = 128  # of both MODULES

    def edited(change: Callable[[Codes], None]) -> Change:
        def changed(model: Model) -> bool:
            data = np.frombuffer(model[name].data, "u1").reshape(rows, -1).copy()
            before = data.copy()
            change(data)
            model[name].data = data.tobytes()
            return bool((data != before).any())

        return changed

    def mirrored(codes: Codes) -> Codes:
        return np.asarray(codes ^ 0x88 if linear.kind == "bnb-fp4" else 255 - codes)

    for operator, change in (
        ("two rows exchanged", lambda c: _swap(c, (3,), (40,))),
        ("two columns of bytes exchanged", lambda c: _swap(c, (slice(None), 3), (slice(None), 20))),
        ("nibbles exchanged", lambda c: _set(c, (...,), c >> 4 | c << 4)),
        ("a column's codes mirrored", lambda c: _set(c, (slice(None), 5), mirrored(c[:, 5]))),
        ("a row's codes mirrored", lambda c: _set(c, (9,), mirrored(c[9]))),
        ("a row of zeros", lambda c: _set(c, (11,), 0 if linear.kind == "bnb-fp4" else 0x77)),
        ("a block of another row", lambda c: _set(c, (17, slice(0, 32)), c[30, :32])),
        ("all rows shifted by one", lambda c: _set(c, (...,), np.roll(c, 1, axis=0))),
    ):  # fmt: skip
        yield "with parent", operator, edited(change)
    yield "with parent", "one absmax of another block", _absmax_moved(linear.scales["absmax"].name)
    if "nested_absmax" in linear.scales:
        yield "with parent", "nested absmax times 4", _floats_scaled(linear.scales["nested_absmax"].name, 4.0)
        yield "with parent", "nested table reversed", _reversed(linear.extras["nested_quant_map"].name)
    yield "alone", "another table", _floats_scaled(linear.extras["quant_map"].name, 1.5)
    yield "alone", "the table reversed", _reversed(linear.extras["quant_map"].name)
    state = next(extra.name for leaf, extra in linear.extras.items() if leaf.startswith("quant_state"))
    for operator, old, new in (
        ("state of another block size", b'"blocksize": 64', b'"blocksize": 32'),
        ("state of another shape", b'"shape": [128,', b'"shape": [129,'),
        ("state that is no JSON", b"{", b"["),
    ):
        yield "alone", operator, _said(state, old, new)


def _absmax_moved(name: str) -> Change:
    """The block with the largest absmax gets a third of it, or the least code."""

    def changed(model: Model) -> bool:
        blob = model[name]
        values = np.frombuffer(blob.data, "u1" if blob.dtype == "U8" else "<f4").copy()
        place = int(np.argmax(values))
        values[place] = values.min() if blob.dtype == "U8" else values[place] / 3
        blob.data = values.tobytes()
        return True

    return changed


def _floats_scaled(name: str, factor: float) -> Change:
    def changed(model: Model) -> bool:
        values = np.frombuffer(model[name].data, "<f4")
        model[name].data = (values * np.float32(factor)).astype("<f4").tobytes()
        return True

    return changed


def _reversed(name: str) -> Change:
    def changed(model: Model) -> bool:
        model[name].data = np.frombuffer(model[name].data, "<f4")[::-1].tobytes()
        return True

    return changed


def _said(name: str, old: bytes, new: bytes) -> Change:
    def changed(model: Model) -> bool:
        blob = model[name]
        assert old in blob.data
        blob.data = blob.data.replace(old, new, 1)
        return True

    return changed
