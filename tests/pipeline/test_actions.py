"""The actions: one class holds all of an action, and a shard's key digests all of the class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.pipeline import stages
from shardmill.pipeline.actions import (
    ACTIONS,
    Action,
    Conversion,
    Copy,
    Dequantize,
    Outputs,
    QuantizeBlock,
    Reblock,
    Rename,
    Tensors,
)
from shardmill.pipeline.container.header import lay_out
from shardmill.pipeline.manifest.digest import TensorHash
from shardmill.pipeline.plan.keys import shard_key
from shardmill.pipeline.plan.types import Assignment, Piece
from shardmill.pipeline.recipe.tables import STANDARD_STAGES
from shardmill.pipeline.stages.dag import Stage
from shardmill.pipeline.stages.job import Decoded, ShardJob
from shardmill.pipeline.types import BlockShape, Header, TensorRef
from tests.pipeline.parents import RECIPE, build, prepare, published, why

# A value for each field that an action may have, and another one.
SAMPLES: Mapping[str, tuple[Any, Any]] = {
    "block": (BlockShape(4, 4), BlockShape(4, 2)),
    "source_block": (BlockShape(8, 8), BlockShape(4, 8)),
    "numerics": ("some/1", "some/2"),
    "scale_suffix": ("_scale_inv", "_scale"),
    "to": ("b.weight", "c.weight"),
    "scale_axes": (2, 4),
    "profile": ("fp8", "modelopt"),
    "source": ("mxfp4", "nvfp4"),
    "group": (32, 128),
    "lossless": (False, True),
    "scale_dtype": ("F32", "F8_E8M0"),
    "transposed": (False, True),
    "unstack": (False, True),
}
FIELDS = [(action, field.name) for action in ACTIONS.values() for field in fields(action)]
SOURCE = lay_out([("a.weight", "BF16", (8, 8))], "one.safetensors", {})


def sample(action: type[Action]) -> Action:
    return action(**{field.name: SAMPLES[field.name][0] for field in fields(action)})


def key_of(action: Action, **reads: Any) -> str:
    """The key of a shard of one tensor; its output's header stays the same, so the action alone decides."""
    return shard_key(SOURCE, SOURCE, [Assignment(SOURCE.tensors[0], "family", action, **reads)])


@pytest.mark.parametrize(("action", "field"), FIELDS, ids=lambda each: getattr(each, "__name__", each))
def test_a_changed_field_of_an_action_changes_the_shard_key(action: type[Action], field: str) -> None:
    """Whatever the class and whatever the field."""
    before = sample(action)
    assert key_of(before) == key_of(sample(action))
    assert key_of(before) != key_of(replace(before, **{field: SAMPLES[field][1]}))


@given(st.tuples(*[st.sampled_from([1, 2, 4])] * 4), st.tuples(*[st.sampled_from([1, 2, 4])] * 4))
def test_two_reblocks_share_a_key_only_where_they_are_equal(
    one: tuple[int, ...], other: tuple[int, ...]
) -> None:
    def made(rows: int, cols: int, down: int, across: int) -> Reblock:
        return Reblock(block=BlockShape(rows, cols), source_block=BlockShape(rows * down, cols * across))

    assert (key_of(made(*one)) == key_of(made(*other))) == (made(*one) == made(*other))


def test_actions_of_different_names_never_share_a_key() -> None:
    keys = [key_of(sample(action)) for action in ACTIONS.values()]
    assert len(set(keys)) == len(keys)


def test_the_key_names_the_tensors_that_an_action_reads_beside_its_own() -> None:
    """A scale under another name may hold other numbers."""
    other = lay_out([("a.weight_scale", "F32", (2, 2)), ("a.weight_scale_inv", "F32", (2, 2))], "two", {})
    action = Dequantize(block=BlockShape(4, 4))
    keys = {key_of(action, scales=ref) for ref in other.tensors} | {key_of(action)}
    assert len(keys) == 3


def test_an_action_can_not_leave_the_key_out() -> None:
    """A field added by a subclass is in its key without a line of code."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Shifted(Rename):
        by: int

    assert key_of(Shifted(to="b", by=1)) != key_of(Shifted(to="b", by=2))


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_every_action_says_what_it_needs_and_what_it_does(action: type[Action]) -> None:
    """Its words are not empty, its stage is known, and the fields that it has no default for are keys of its family."""
    made = sample(action)
    assert made.words()
    assert action.stage is None or action.stage in stages.STAGES
    assert isinstance(made, Conversion) == (action.kind == "convert")
    assert not {"expect", "reason"}.isdisjoint(action.needs)


def test_only_what_a_runtime_can_tell_must_be_shared_by_fused_members() -> None:
    """A renamed tensor is still a copy; another block or another formula is not the same action."""
    assert Rename(to="b").as_fused() == Rename(to="c").as_fused() == Copy().as_fused()
    quantize = QuantizeBlock(block=BlockShape(4, 4))
    assert quantize.as_fused() != replace(quantize, block=BlockShape(4, 2)).as_fused()
    assert quantize.as_fused() != replace(quantize, numerics="mse/1").as_fused()


# ---- adding an action: the worked example of CONTRIBUTING -------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Action):
    """A BF16 vector is multiplied by a whole number, rounded once to F32."""

    name = "scale"
    kind = "repair"
    needs = ("factor", "expect")
    stage = "scale"

    factor: int

    def outputs(self, ref: TensorRef) -> Outputs:
        return ((ref.name, "F32", ref.shape, "values"),)

    def why_unfit(self, ref: TensorRef, tensors: Tensors) -> str | None:
        return None if ref.dtype == "BF16" else f"is {ref.dtype}; only BF16 can be scaled, keep it"

    def words(self) -> str:
        return f"scaled by {self.factor}"


def scale(job: ShardJob, pieces: tuple[Piece, ...]) -> dict[str, Decoded]:
    """Output tensor -> Decoded, for each tensor of a family that is scaled."""
    return {piece.ref.name: scaled(job, piece) for piece in pieces if isinstance(piece.action, Scale)}


def scaled(job: ShardJob, piece: Piece) -> Decoded:
    assert isinstance(piece.action, Scale)
    data = job.read(piece.source)
    values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4") * np.float32(piece.action.factor)
    job.sink.write(memoryview(values.tobytes()), job.plan.header.data_begin + piece.ref.begin)
    return Decoded(
        TensorHash(values.tobytes()).hexdigest(), {piece.source.name: TensorHash(data).hexdigest()}
    )


SCALE = """
[[family]]
name = "scaled"
match = "model.layers.*.norm.weight"
action = "scale"
factor = 3
expect = 2
"""
SCALING = (
    RECIPE.replace('["model.layers.*.norm.weight", "model.embed.weight"]', '"model.embed.weight"') + SCALE
)


@pytest.fixture
def with_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two rows that adding an action takes: one in ACTIONS, one in STAGES, with its product in rewrite's."""
    monkeypatch.setitem(ACTIONS, "scale", Scale)
    rewrite = stages.STAGES["rewrite"]
    row = Stage(scale, consumes=("pieces",), produces="scaled", scope="shard")
    monkeypatch.setitem(stages.STAGES, "scale", row)  # type: ignore[arg-type]
    monkeypatch.setitem(stages.STAGES, "rewrite", replace(rewrite, accepts=(*rewrite.accepts, "scaled")))  # type: ignore[arg-type]


@pytest.mark.usefixtures("with_scale")
def test_an_action_is_added_by_its_class_its_stage_and_two_rows(parent: Any, tmp_path: Any) -> None:
    """Its keys are read, its stage joins the standard six, its layout is planned, its values are built."""
    recipe = SCALING
    prepared = prepare(parent, recipe)
    assert prepared.dag.needs["rewrite"] == (*STANDARD_STAGES["rewrite"], "scale")
    build(parent, tmp_path / "out", recipe)
    before, after = tensors(parent), tensors(tmp_path / "out")
    for name in ("model.layers.0.norm.weight", "model.layers.1.norm.weight"):
        bits = np.frombuffer(before[name][1], "<u2").astype("<u4") << 16
        assert after[name] == ("F32", (bits.view("<f4") * np.float32(3)).tobytes())
    assert published(tmp_path / "out")


@pytest.mark.usefixtures("with_scale")
def test_a_new_actions_changed_key_makes_its_shards_stale(parent: Any, tmp_path: Any) -> None:
    build(parent, tmp_path / "out", SCALING)
    assert why(parent, tmp_path / "out", SCALING) == {}
    reasons = why(parent, tmp_path / "out", SCALING.replace("factor = 3", "factor = 4"))
    assert len(reasons) == 2


def tensors(folder: Any) -> dict[str, tuple[str, bytes]]:
    """Tensor -> dtype and bytes, of every shard of a checkpoint."""
    from shardmill.pipeline.container.header import read_header

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        header: Header = read_header(path, path.name)
        data = path.read_bytes()[header.data_begin :]
        found |= {ref.name: (ref.dtype, data[ref.begin : ref.end]) for ref in header.tensors}
    return found
