"""Scales without sense: each line of the field's reports, and more of the same kind."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from tests.verify.zoo.case import Case, changed
from tests.verify.zoo.clean import LM
from tests.verify.zoo.model import Blob, Model, bits, f32, patch

EXPERTS = f"{LM}layers.1.mlp.experts."
UP = f"{EXPERTS}0.up_proj"


def _leaf(leaf: str, value: float) -> Callable[[Model], None]:
    """Sets every tensor of this leaf to one value."""

    def change(model: Model) -> None:
        for shard in model.shards.values():
            for name, blob in shard.items():
                if name.endswith(f".{leaf}"):
                    blob.data = struct.pack("<f", value) * (len(blob.data) // 4)

    return change


def _one(name: str, value: float) -> Callable[[Model], None]:
    return lambda model: patch(model[name], 0, struct.pack("<f", value))


def _times(leaf: str, factor: float) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for shard in model.shards.values():
            for name, blob in shard.items():
                if name.endswith(f".{leaf}"):
                    values = struct.unpack(f"<{len(blob.data) // 4}f", blob.data)
                    blob.data = struct.pack(f"<{len(values)}f", *(value * factor for value in values))

    return change


def _invert(leaf: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for shard in model.shards.values():
            for name, blob in shard.items():
                if name.endswith(f".{leaf}"):
                    (value,) = struct.unpack("<f", blob.data)
                    blob.data = struct.pack("<f", 1 / value)

    return change


def _zeros(model: Model) -> None:
    """A tenth of the block scales underflowed."""
    blob = model[f"{EXPERTS}2.down_proj.weight_scale"]
    raw = bytearray(blob.data)
    raw[::10] = b"\0" * len(raw[::10])
    blob.data = bytes(raw)


def _drop_inputs(model: Model) -> None:
    for shard in model.shards.values():
        for name in [name for name in shard if name.endswith("input_scale")]:
            del shard[name]
    model.shards = {file: shard for file, shard in model.shards.items() if shard}


def _weight_only(model: Model) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}, "input_activations": None}
    model.quantization["config_groups"] = {"group_0": group}


def _split_w13(model: Model) -> None:
    """gate and up calibrated apart, by up to 10x, in most experts."""
    for expert in range(3):
        factor = 2.0 + bits(f"{expert}", 1)[0] / 32
        blob = model[f"{EXPERTS}{expert}.up_proj.weight_scale_2"]
        blob.data = struct.pack("<f", struct.unpack("<f", blob.data)[0] * factor)


def _ue8m0(model: Model) -> None:
    model.quantization["scale_fmt"] = "ue8m0"


def _rename(old: str, new: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for name in model.names:
            if name.endswith(f".{old}"):
                model.rename(name, f"{name.removesuffix(old)}{new}")

    return change


def _no_scale(model: Model) -> None:
    model.drop(f"{EXPERTS}1.gate_proj.input_scale")


def rows() -> Iterator[Case]:
    yield from changed(
        "lint",
        ("input scales all 1.0", "nvfp4_parent", "placeholder-input-scale", _leaf("input_scale", 1.0)),
        ("input scales all alike", "nvfp4_parent", "placeholder-input-scale", _leaf("input_scale", 0.0037)),
        ("divisor input scales all 1.0", "compressed_nvfp4", "placeholder-input-scale",
         _leaf("input_global_scale", 1.0)),
        ("an expert that calibration missed", "nvfp4_parent", "missing-input-scale", _no_scale),
        ("no input scale on the W4A4 path", "nvfp4_parent", "input-scale-needed", _drop_inputs),
        ("no input scale of a listed NVFP4", "mixed_child", "input-scale-needed", _drop_inputs),
        ("no input scale of static FP8", "modelopt_fp8", "input-scale-needed", _drop_inputs),
        ("input scale of 0", "nvfp4_parent", "scale-not-positive", _one(f"{UP}.input_scale", 0.0)),
        ("input scale of -1", "nvfp4_parent", "scale-not-positive", _one(f"{UP}.input_scale", -1.0)),
        ("input scale of NaN", "nvfp4_parent", "scale-not-finite", _one(f"{UP}.input_scale", float("nan"))),
        ("input scale of inf", "nvfp4_parent", "scale-not-finite", _one(f"{UP}.input_scale", float("inf"))),
        ("input scale far above its kind", "nvfp4_parent", "scale-outlier", _one(f"{UP}.input_scale", 3.0)),
        ("input scale far below its kind", "nvfp4_parent", "scale-outlier", _one(f"{UP}.input_scale", 1e-7)),
        ("global scale far above its kind", "nvfp4_parent", "scale-outlier", _one(f"{UP}.weight_scale_2", 0.01)),
        ("gate and up with own global scales", "nvfp4_parent", "fused-global-scale", _split_w13),
        ("gate and up one bit apart", "nvfp4_parent", "fused-global-scale", lambda m: patch(
            m[f"{UP}.weight_scale_2"], 0, bytes([m[f"{UP}.weight_scale_2"].data[0] ^ 1]))),
        ("q and k with own divisors", "compressed_nvfp4", "fused-global-scale",
         _one("model.layers.1.self_attn.k_proj.weight_global_scale", 900.0)),
        ("weight-only declared as NVFP4", "nvfp4_parent", "weight-only-path", _weight_only),
        ("block scale above 448 cast to NaN", "nvfp4_parent", "block-scale-nan",
         lambda m: patch(m[f"{UP}.weight_scale"], 77, b"\x7f")),
        ("block scales underflowed", "nvfp4_parent", "zero-block-scales", _zeros),
        ("global scales all 1", "nvfp4_parent", "global-scale-one", _leaf("weight_scale_2", 1.0)),
        ("divisor global scales all 1", "compressed_nvfp4", "global-scale-one", _leaf("weight_global_scale", 1.0)),
        ("block FP8 scales all 1", "deepseek", "placeholder-weight-scale", _leaf("weight_scale_inv", 1.0)),
        ("scale_inv truly inverse", "deepseek", "scale-convention", _times("weight_scale_inv", 1e8)),
        ("divisor for weight_scale_2", "nvfp4_parent", "scale-convention", _invert("weight_scale_2")),
        ("multiplier for weight_global_scale", "compressed_nvfp4", "scale-convention", _invert("weight_global_scale")),
        ("inverse per-tensor scale", "modelopt_fp8", "scale-convention", _invert("weight_scale")),
        ("inverse ComfyUI scale", "comfy", "scale-convention", _invert("scale_weight")),
        ("unrounded scales under ue8m0", "deepseek", "scale-not-ue8m0", _ue8m0),
        ("weight_scale for weight_scale_inv", "deepseek", "scale-name", _rename("weight_scale_inv", "weight_scale")),
        ("weight_scale for weight_scale_inv, listed", "mixed_child", "scale-name",
         _rename("weight_scale_inv", "weight_scale")),
        ("weight_scale_inv for weight_scale", "compressed_block", "scale-name",
         _rename("weight_scale", "weight_scale_inv")),
        ("4-D scale renamed", "modelopt_pbwo", "scale-name", _rename("weight_scale", "weight_scale_inv")),
    )  # fmt: skip
    yield from changed(
        "lint",
        ("one block scale of float32 in FP8", "compressed_channel", "scale-grid", lambda m: m.find(
            "model.layers.0.self_attn.q_proj.weight").update(
            {"model.layers.0.self_attn.q_proj.weight_scale": f32(1e-4, 77, 1)})),
        ("E8M0 scale of NaN", "deepseek", "scale-not-finite", lambda m: m.find(
            "model.layers.0.self_attn.q_proj.weight").update(
            {"model.layers.0.self_attn.q_proj.weight_scale_inv": Blob("F8_E8M0", (1, 1), b"\xff")})),
    )  # fmt: skip


CASES: tuple[Case, ...] = tuple(rows())
