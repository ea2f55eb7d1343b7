"""Names, exclusion lists and fused groups gone wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.verify.zoo.case import Case, changed
from tests.verify.zoo.clean import LM
from tests.verify.zoo.model import Model, bf16, codes, scales

ATTENTION = f"{LM}layers.0.self_attn."
Q = "model.layers.0.self_attn.q_proj"


def _drop(*fronts: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for name in model.names:
            if name.startswith(fronts):
                model.drop(name)

    return change


def _ignore(edit: Callable[[list[str]], object]) -> Callable[[Model], None]:
    return lambda model: edit(model.quantization["ignore"]) and None


def _runtime_names(model: Model) -> None:
    """Written for a runtime's module names that no mapping leads to."""
    model.quantization["ignore"] = [f"transformer.h.{i}.attn" for i in range(50)]


def _quantize(module: str, side: int = 32) -> Callable[[Model], None]:
    """Replaces a BF16 weight by codes and block scales, undeclared."""

    def change(model: Model) -> None:
        name = f"{module}.weight"
        shard = model.find(name)
        R, C = shard[name].shape
        shard[name] = codes(name, R, C)
        shard[f"{name}_scale_inv"] = scales(name, -(-R // side), -(-C // side))

    return change


def _quantized_router(model: Model) -> None:
    _quantize(f"{LM}layers.1.mlp.gate")(model)
    entry = {"quant_algo": "FP8_BLOCK", "group_size": 32}
    model.quantization["quantized_layers"][f"{LM}layers.1.mlp.gate"] = entry


def _plain(module: str) -> Callable[[Model], None]:
    """Replaces codes by BF16 and drops their scale."""

    def change(model: Model) -> None:
        name = f"{module}.weight"
        shard = model.find(name)
        shard[name] = bf16(name, *shard[name].shape)
        for scale in [n for n in shard if n.startswith(f"{module}.") and n != name]:
            del shard[scale]

    return change


def _reblock(module: str, side: int) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        R, C = model[f"{module}.weight"].shape
        model.find(f"{module}.weight")[f"{module}.weight_scale_inv"] = scales(
            "x", -(-R // side), -(-C // side)
        )
        model.quantization["quantized_layers"][module]["group_size"] = side

    return change


def rows() -> Iterator[Case]:
    yield from changed(
        "lint",
        ("an exclusion with a typo", "nvfp4_parent", "exclude-idle", _ignore(lambda i: i.append("*.mlp.gaet"))),
        ("typo leaves attention claimed", "nvfp4_parent", "claimed-not-quantized", _ignore(
            lambda i: i.remove("*.self_attn.*") or i.append("*.self_atn.*"))),
        ("no exclusion matches", "nvfp4_parent", "excludes-all-idle", _runtime_names),
        ("router excluded and quantized", "mixed_child", "entry-excluded", _quantized_router),
        ("one Linear of fp8 left in BF16", "deepseek", "claimed-not-quantized",
         _plain("model.layers.1.self_attn.o_proj")),
        ("one Linear of llm-compressor left in BF16", "compressed_channel", "claimed-not-quantized",
         _plain("model.layers.1.mlp.down_proj")),
        ("k left out of a fused group", "deepseek", "fused-group-mixed", _plain("model.layers.1.self_attn.k_proj")),
        ("gate quantized, up not", "mixed_child", "fused-group-mixed",
         _quantize(f"{LM}layers.0.mlp.gate_proj")),
        ("one member with another block", "mixed_child", "fused-group-mixed", _reblock(f"{ATTENTION}v_proj", 64)),
        ("a fused member missing", "deepseek", "fused-member-missing", _drop("model.layers.1.self_attn.k_proj.")),
        ("a trunk layer missing", "deepseek", "layer-missing", _drop("model.layers.0.")),
        ("fewer layers than the config says", "plain", "layer-missing", lambda m: m.config.update(num_hidden_layers=3)),
        ("MTP layer never exported", "nvfp4_parent", "mtp-missing", _drop(f"{LM}layers.2.")),
        ("an expert missing", "nvfp4_parent", "expert-missing", _drop(f"{LM}layers.1.mlp.experts.2.")),
        ("the last expert missing in all banks", "nvfp4_parent", "expert-missing", _drop(
            f"{LM}layers.1.mlp.experts.3.", f"{LM}layers.2.mlp.experts.3.")),
        ("an expert without its down projection", "nvfp4_parent", "expert-incomplete",
         _drop(f"{LM}layers.1.mlp.experts.1.down_proj.")),
        ("exclusion of exponential cost", "compressed_channel", "exclude-pattern",
         _ignore(lambda i: i.append("re:(a+)+$"))),
        ("exclusion that is no expression", "compressed_channel", "exclude-pattern",
         _ignore(lambda i: i.append("re:["))),
        ("exclusions not a list", "compressed_channel", "config-json",
         lambda m: m.quantization.update(ignore="lm_head")),
    )  # fmt: skip


CASES: tuple[Case, ...] = tuple(rows())
