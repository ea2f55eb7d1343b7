"""The real vLLM loads children of small models, in a process of its own: what it holds, against what the files hold.

    python -m tests.pipeline.profiles.vllm_probe report.json CHILD...

Compared before any post-load step, which re-lays weights for a kernel. The report maps each child to what is
missing, what is wrong, how many parameters hold FP8, or the error that vLLM raised.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.runtime_patch.vllm.probe import build, engine_config, same_bytes, start_world

# vLLM's fused module -> the published ones, in its order
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvgfab": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"),
    "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
}
EXPERTS = {"w13": (("gate_proj", "up_proj"), ("w1", "w3")), "w2": (("down_proj",), ("w2",))}


def expected(name: str, files: dict[str, Any]) -> Any:
    """The tensor that vLLM's parameter `name` must hold, put together from the files; None where they have no word."""
    if name in files:
        return files[name]
    home, _, own = name.rpartition(".")
    module = home.rpartition(".")[2]
    if module in FUSED:
        parts = [f"{home.removesuffix(module)}{part}.{own}" for part in FUSED[module]]
        return torch.cat([files[part] for part in parts]) if set(parts) <= set(files) else None
    if ".experts." in name:
        return _experts(name, files)
    return None


def _experts(name: str, files: dict[str, Any]) -> Any:
    bank = name.partition(".experts.")[0] + ".experts"
    stack, _, own = name.rpartition(".")[2].partition("_")
    for members in EXPERTS[stack]:
        if f"{bank}.0.{members[0]}.{own}" in files:
            count = 1 + max(
                int(key[len(bank) + 1 :].split(".")[0]) for key in files if key.startswith(bank + ".")
            )
            rows = [
                torch.cat([files[f"{bank}.{e}.{member}.{own}"] for member in members]) for e in range(count)
            ]
            return torch.stack(rows)
    return None


def look(folder: Path) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config

    config = engine_config(
        {"checkpoint": str(folder), "engine": {"max_model_len": 1024, "kv_cache_dtype": "auto"}}
    )
    files = load_file(folder / "model.safetensors")
    with set_current_vllm_config(config):
        model = build(config)
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            if parameter.data.dim():
                parameter.data.view(torch.uint8).fill_(0xA5)
        loaded = model.load_weights(iter(files.items()))
    return _compare(parameters, loaded, files)


def _compare(parameters: dict[str, Any], loaded: set[str], files: dict[str, Any]) -> dict[str, Any]:
    # The KV cache's scales are no part of a weight file: vLLM starts them at 1.
    parameters = {name: parameter for name, parameter in parameters.items() if ".attn." not in name}
    wrong, unmatched = {}, []
    for name, parameter in parameters.items():
        want = expected(name.replace(".mlp.experts.routed_experts.", ".mlp.experts."), files)
        if want is None:
            unmatched.append(name)
            continue
        # Rows behind those of the files are padding of vLLM's own.
        got = parameter.data[: len(want)] if "in_proj" in name else parameter.data
        if want.numel() != got.numel() or not same_bytes(got, want.to(got.dtype).reshape(got.shape)):
            wrong[name] = (
                f"{tuple(parameter.shape)} {parameter.dtype}, the files {tuple(want.shape)} {want.dtype}"
            )
    return {
        "missing": sorted(set(parameters) - loaded),
        "wrong": wrong,
        "unmatched": sorted(unmatched),
        "parameters": len(parameters),
        "fp8": sum(parameter.dtype == torch.float8_e4m3fn for parameter in parameters.values()),
    }


class NoStream:
    """Stands for Kimi's second CUDA stream, which a CPU has not."""


def guarded(ask: Callable[[Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
    try:
        return ask(folder)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    out, *folders = map(Path, sys.argv[1:])
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.config import VllmConfig, set_current_vllm_config

    torch.cuda.Stream = NoStream
    with set_current_vllm_config(VllmConfig()):
        start_world({"meeting": f"{out}.meeting"})
    out.write_text(json.dumps({folder.name: guarded(look, folder) for folder in folders}))


if __name__ == "__main__":
    main()
