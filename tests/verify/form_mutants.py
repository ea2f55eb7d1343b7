"""Clean checkpoints of every form, harmed as publishers harm them: one weight's scales, codes or parts.

`alone`: integrity or lint must find it. `with parent`: roundtrip or reproduce must, from the floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from shardmill.verify.formats.linear import Linear
from shardmill.verify.formats.schemes import quantized
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import lint
from shardmill.verify.questions.reproduce import reproduce
from shardmill.verify.questions.roundtrip import Limits, roundtrip
from shardmill.verify.reading.checkpoint import open_checkpoint
from shardmill.verify.rules.findings import Report
from tests.verify.memory import Memory
from tests.verify.mutants import Files, files_of
from tests.verify.zoo import encoders as e
from tests.verify.zoo.model import Blob, Model
from tests.verify.zoo.published import PUBLISHED, Published, parent

LAYER = "model.layers.1.mlp."
FLOATS = {"F32": "<f4", "F16": "<f2"}
NAN = {
    "F32": b"\0\0\xc0\x7f",
    "BF16": b"\xc0\x7f",
    "F16": b"\0\x7e",
    "F8_E8M0": b"\xff",
    "U8": b"\xff",
    "F8_E4M3": b"\x7f",
}


@dataclass(frozen=True)
class FormMutant:
    form: str
    how: str  # "alone" or "with parent"
    operator: str
    what: str
    model: Model
    moe: bool

    def killed(self) -> bool:
        source = Memory(files_of(self.model))
        if self.how == "alone":
            return integrity(source).exit_code == 1 or lint(source).exit_code == 1
        floats = Memory(_parent(self.moe))
        return (
            roundtrip(source, floats, Limits()).exit_code == 1
            or reproduce(source, floats, blocks=None, seed=1).exit_code == 1
        )


_PARENTS: dict[bool, Files] = {}


def _parent(moe: bool) -> Files:
    if moe not in _PARENTS:
        _PARENTS[moe] = files_of(parent(moe))
    return _PARENTS[moe]


def asked(words: tuple[str, ...]) -> Iterator[Published]:
    """The forms whose names begin with one of these words; all where there is none."""
    yield from (one for one in PUBLISHED if not words or one.name.startswith(words))


def mutants(words: tuple[str, ...] = ()) -> Iterator[FormMutant]:
    for published in asked(words):
        clean = published.model()
        found = open_checkpoint(Memory(files_of(clean)), Report("integrity"))
        linear = next(
            (one for name, one in quantized(found.tensors).items() if name.startswith(LAYER) and one.weight),
            None,
        )
        if linear is not None and linear.kind != "other":
            yield from _of(published, clean, linear)
        if linear is None:
            yield from _of_floats(published, clean)


def _of(published: Published, clean: Model, linear: Linear) -> Iterator[FormMutant]:
    assert linear.weight is not None
    assert linear.grid is not None
    nested = linear.scales.get(
        "nested_absmax"
    )  # the bytes of absmax are codes of it, of which none is wrong by itself
    weight, grid = linear.weight.name, (nested or linear.grid).name

    def mutant(
        operator: str, name: str, change: Callable[[Blob], None] | None, how: str = "alone"
    ) -> FormMutant:
        model = clean.copy()
        if change is None:
            model.drop(name)
        else:
            change(model[name])
        return FormMutant(published.name, how, operator, name, model, published.moe)

    yield mutant("scale dropped", grid, None)
    yield mutant("codes dropped", weight, None)
    yield mutant("scale NaN", grid, lambda b: _write(b, 0, NAN[b.dtype]))
    yield mutant("scale of another shape", grid, _shape)
    yield mutant("codes all zero", weight, lambda b: _write(b, 0, bytes(len(b.data))))
    yield mutant(
        "half of the codes a hole", weight, lambda b: _write(b, len(b.data) // 3, bytes(len(b.data) // 2))
    )
    if linear.kind not in ("nvfp4", "ct-nvfp4"):
        yield mutant("scales times 1000", grid, lambda b: _times(b, 1000.0))
        # Without its nested scales every absmax is their mean: as sane alone as any weight of even blocks.
        yield mutant(
            "scales over 1000", grid, lambda b: _times(b, 1e-3), "with parent" if nested else "alone"
        )
    for leaf in ("weight_scale_2", "weight_global_scale"):
        if leaf in linear.scales:
            yield mutant("global scale inverted", linear.scales[leaf].name, _invert)
            yield mutant("global scale dropped", linear.scales[leaf].name, None)
    if linear.kind == "gpt-oss":  # the parent's experts lie one by one
        return
    yield mutant("scales times 2", grid, lambda b: _times(b, 2.0), "with parent")
    yield mutant("rows of codes reversed", weight, _reversed, "with parent")
    yield mutant("a fifth of the codes another weight's", weight, _foreign, "with parent")


def _of_floats(published: Published, clean: Model) -> Iterator[FormMutant]:
    """What no quantizer touched."""
    for name in (f"{LAYER}down_proj.weight", "model.norm.weight", "lm_head.weight"):
        if name not in clean.names or clean[name].dtype not in ("F32", "BF16", "F16"):
            continue
        for operator, change in (
            ("NaN in floats", _nan),
            ("infinity in floats", _infinite),
            ("weight of zeros", _zeros),
        ):
            if operator == "weight of zeros" and "norm" in name:
                continue
            model = clean.copy()
            change(model[name])
            yield FormMutant(published.name, "alone", operator, name, model, published.moe)


def _write(blob: Blob, at: int, data: bytes) -> None:
    blob.data = blob.data[:at] + data + blob.data[at + len(data) :]


def _nan(blob: Blob) -> None:
    _write(blob, len(blob.data) // 2 // 4 * 4, NAN[blob.dtype])


def _infinite(blob: Blob) -> None:
    _write(blob, 0, {"F32": b"\0\0\x80\x7f", "BF16": b"\x80\xff", "F16": b"\0\x7c"}[blob.dtype])


def _zeros(blob: Blob) -> None:
    blob.data = bytes(len(blob.data))


def _shape(blob: Blob) -> None:
    """A scale too many in every axis, or an axis too many."""
    shape = tuple(dim + 13 for dim in blob.shape) or (13,)
    width = len(blob.data) // max(int(np.prod(blob.shape)), 1)
    blob.data = (blob.data * (int(np.prod(shape)) + 1))[: int(np.prod(shape)) * width]
    blob.shape = shape


def _values(blob: Blob) -> np.ndarray:  # type: ignore[type-arg]
    if blob.dtype == "BF16":
        return (np.frombuffer(blob.data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(blob.data, FLOATS[blob.dtype]).astype("<f4")


def _times(blob: Blob, factor: float) -> None:
    if blob.dtype in ("F8_E8M0", "U8"):
        steps = np.frombuffer(blob.data, "u1").astype(int) + round(np.log2(factor))
        blob.data = np.clip(steps, 0, 254).astype("u1").tobytes()
    elif blob.dtype == "F8_E4M3":
        blob.data = np.clip(np.frombuffer(blob.data, "u1").astype(int) + 8, 0, 0x7E).astype("u1").tobytes()
    else:
        with np.errstate(all="ignore"):
            blob.data = e.blob(blob.dtype, _values(blob) * np.float32(factor)).data


def _invert(blob: Blob) -> None:
    blob.data = e.blob(blob.dtype, 1 / _values(blob)).data


def _reversed(blob: Blob) -> None:
    rows = np.frombuffer(blob.data, "u1").reshape(blob.shape[0], -1)
    blob.data = rows[::-1].tobytes()


def _foreign(blob: Blob) -> None:
    count = len(blob.data) // 5
    _write(blob, 0, blob.data[-count:])


def verdicts(stride: int = 1) -> Iterator[tuple[FormMutant, bool]]:
    for number, mutant in enumerate(mutants()):
        if number % stride == 0:
            yield mutant, mutant.killed()
