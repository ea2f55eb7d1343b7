"""What vLLM's loaders refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.verify.zoo.case import Case, changed
from tests.verify.zoo.clean import LM, encoded
from tests.verify.zoo.model import Model, bf16, f32, scales

KDA = f"{LM}layers.0.self_attn."


def _six(model: Model) -> None:
    """Layer 0 becomes a whole KDA layer, all six quantized with [32,32]."""
    for name, rows in (("b_proj", 64), ("f_a_proj", 32), ("g_a_proj", 32)):
        weight = bf16(name, rows, 128)
        shard = model.find(f"{KDA}q_proj.weight")
        shard[f"{KDA}{name}.weight"], shard[f"{KDA}{name}.weight_scale_inv"] = encoded(weight, 32)
        model.quantization["quantized_layers"][f"{KDA}{name}"] = {"quant_algo": "FP8_BLOCK", "group_size": 32}


def _keep_b(model: Model) -> None:
    _six(model)
    shard = model.find(f"{KDA}b_proj.weight")
    shard[f"{KDA}b_proj.weight"] = bf16("b", 64, 128)
    del shard[f"{KDA}b_proj.weight_scale_inv"]
    del model.quantization["quantized_layers"][f"{KDA}b_proj"]


def _no_alias(model: Model) -> None:
    entries = model.quantization["quantized_layers"]
    for name in [name for name in entries if name.startswith("model.layers.")]:
        del entries[name]


def _stock_only_draft(model: Model) -> None:
    """NVFP4 alone, MIXED_PRECISION without the draft's aliases, as vLLM ships."""
    _no_alias(model)
    entries = model.quantization["quantized_layers"]
    for name in [name for name in entries if entries[name]["quant_algo"] == "FP8_BLOCK"]:
        del entries[name]
        shard = model.find(f"{name}.weight")
        shard[f"{name}.weight"] = bf16(name, 128, 128)
        del shard[f"{name}.weight_scale_inv"]


def _glm(edit: Callable[[Model], object]) -> Callable[[Model], None]:
    return lambda model: edit(model) and None


def _two_groups(model: Model) -> None:
    entries = model.quantization["quantized_layers"]
    for side, module in ((32, f"{KDA}q_proj"), (128, f"{KDA}o_proj")):
        entries[module] = {"quant_algo": "FP8_PB_WO", "group_size": side}


def rows() -> Iterator[Case]:
    yield from changed(
        "loads",
        ("b kept in BF16", "mixed_child", "loader-refuses", _keep_b),
        ("draft experts without alias, as vLLM ships", "mixed_child", "loader-refuses", _stock_only_draft),
        ("two group sizes under FP8_PB_WO", "mixed_child", "loader-refuses", _two_groups),
        ("shared experts claimed and BF16", "nvfp4_parent", "loader-refuses",
         lambda m: m.quantization["ignore"].remove("*.mlp.shared_experts.*")),
        ("half of gate_up excluded", "nvfp4_parent", "loader-refuses", lambda m: (
            m.quantization["ignore"].remove("*.mlp.shared_experts.*"),
            m.quantization["ignore"].append("*.mlp.shared_experts.up_proj"))[0]),
        ("expert without its block scale", "nvfp4_parent", "loader-refuses",
         lambda m: m.drop(f"{LM}layers.1.mlp.experts.0.up_proj.weight_scale") and None),
        ("a layer of another model", "nvfp4_parent", "no-home",
         lambda m: m.find("lm_head.weight").update({f"{LM}layers.0.self_attn.qk_proj.weight": bf16("x", 8, 8)})),
        ("a tensor of an optimiser", "nvfp4_parent", "no-home",
         lambda m: m.find("lm_head.weight").update({"optimizer.step": f32(1.0)})),
        ("vision block quantized, unlisted", "nvfp4_parent", "loader-refuses", lambda m: m.find(
            "model.visual.blocks.0.attn.qkv.weight").update(
            {"model.visual.blocks.0.attn.qkv.weight_scale_inv": scales("v", 3, 1)})),
    )  # fmt: skip


CASES: tuple[Case, ...] = tuple(rows())
