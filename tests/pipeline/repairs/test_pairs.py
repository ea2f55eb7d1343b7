"""Codes mean nothing without their scales: what takes one half of a pair and not the other is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.pipeline.errors import PlanError
from tests.pipeline.parents import prepare, write_parent
from tests.pipeline.profiles.models import FILES, native_parent
from tests.pipeline.repairs.test_repairs import HEAD, KEEP, RECONCILE, expert
from tests.pipeline.repairs.test_repairs import write_shard as write_expert

SCALES = ("weight_scale", "weight_scale_2")
ALL_SCALES = {f"{half}_proj.{scale}" for half in ("gate", "up") for scale in SCALES}
NATIVE = """format = 1
name = "torn"
[[family]]
name = "moved"
match = "{match}"
{action}
[[family]]
name = "rest"
match = {rest}
action = "keep"
reason = "as it is"
"""


def two_experts(folder: Path) -> Path:
    parent = write_parent(folder, {FILES[0]: {}}, config={})
    (parent / "model.safetensors.index.json").unlink()
    (parent / FILES[0]).unlink()
    write_expert(parent / "model.safetensors", {**expert(0, 0.5, 0.25), **expert(1, 0.5, 0.25)})
    return parent


@pytest.mark.parametrize(
    "halves",
    [
        {"gate_proj.weight_scale_2", "up_proj.weight_scale_2"},
        {"gate_proj.weight_scale", "up_proj.weight_scale"},
        {"gate_proj.weight_scale", "gate_proj.weight_scale_2"},
        {"up_proj.weight_scale", "up_proj.weight_scale_2"},
        ALL_SCALES - {"gate_proj.weight_scale"},
        ALL_SCALES - {"up_proj.weight_scale_2"},
    ],
    ids=lambda halves: "+".join(sorted(halves)),
)
def test_a_pair_is_reconciled_with_all_four_scales_or_not_at_all(halves: set[str], tmp_path: Path) -> None:
    """The globals alone would make one half wrong by their ratio, the block scales alone by its inverse."""
    globs = [f'"experts.*.{half}"' for half in sorted(halves)]
    rest = [f'"experts.*.{half}"' for half in sorted(ALL_SCALES - halves)]
    family = RECONCILE.replace(
        '"experts.*.{gate,up}_proj.{weight_scale,weight_scale_2}"', f"[{', '.join(globs)}]"
    )
    others = KEEP.format(globs=f'["experts.*.{{gate,up}}_proj.{{weight,input_scale}}", {", ".join(rest)}]')
    with pytest.raises(PlanError, match=r"is reconciled without experts.*give all four this family, or none"):
        prepare(two_experts(tmp_path / "parent"), HEAD + family.replace("8", str(2 * len(halves))) + others)


@pytest.mark.parametrize(
    "action", ['action = "drop"', 'action = "rename"\nto = "other.{}.{}"'], ids=["drop", "rename"]
)
@pytest.mark.parametrize("half", ["weight", "weight_scale_inv"])
def test_a_weight_and_its_scales_go_the_same_way(half: str, action: str, tmp_path: Path) -> None:
    """A weight that is dropped or renamed takes its scales along, and they it."""
    other = {"weight": "weight_scale_inv", "weight_scale_inv": "weight"}[half]
    match = f"model.layers.*.mlp.*.{half}"
    rest = f'["model.layers.*.mlp.*.{other}", "model.layers.*.self_attn.**", "model.norm.weight", '
    rest += '"model.embed_tokens.weight", "lm_head.weight"]'
    renamed = action.replace("other.{}.{}", f"other.*.*.{half}") + '\nexpect = 2\nreason = "not wanted"'
    with pytest.raises(PlanError, match="codes mean nothing without their scales, so treat both alike"):
        prepare(native_parent(tmp_path / "parent"), NATIVE.format(match=match, action=renamed, rest=rest))
