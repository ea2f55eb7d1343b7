"""Golden files of packed forms by their own tools: `python -m tests.verify.tools.packed TOOL FOLDER OUT [SOURCE]`

Each holds the tensors of one module as the tool exports it, and in its metadata the sha256 of the module's weight, F32
[R, C] little-endian with zeros unsigned, as the tool itself decodes it. Runs under the tool's Python, on a CPU. TOOL is
`bitsandbytes` (bitsandbytes==0.50.2, by quantize_4bit and dequantize_4bit), or `auto-round` (auto-round==0.16.1,
formats auto_gptq and auto_awq, rounding to the nearest), whose AWQ is decoded by SOURCE, packing_utils.py of
autoawq==0.2.9, and whose GPTQ by its own QuantLinear.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.verify.tools import seeded

MODULE = "model.layers.0.self_attn.k_proj"


def bitsandbytes(out: Path) -> None:
    import bitsandbytes.functional as bnb
    import torch
    from safetensors.torch import save_file

    weight = torch.tensor(seeded.weights()[f"{MODULE}.weight"]).to(torch.bfloat16)
    for kind in ("nf4", "fp4"):
        for nested in (True, False):
            codes, state = bnb.quantize_4bit(
                weight, blocksize=64, quant_type=kind, compress_statistics=nested
            )
            state.dtype = torch.float32  # so that `decoded` is not rounded
            decoded = bnb.dequantize_4bit(codes, state)
            state.dtype = torch.bfloat16
            parts = {f"{MODULE}.weight.{leaf}": part for leaf, part in state.as_dict(packed=True).items()}
            name = f"bitsandbytes-{kind}{'-nested' if nested else ''}.safetensors"
            said = _metadata("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}, decoded)
            save_file({f"{MODULE}.weight": codes, **parts}, out / name, said)


def auto_round(folder: Path, out: Path, source: Path) -> None:
    from safetensors.torch import load_file, save_file

    from tests.verify.tools.make import auto_round as maker

    parent = folder / "parent BF16"
    seeded.write(parent, "BF16")
    for scheme, form in (("W4A16", "auto_gptq"), ("W8A16", "auto_gptq"), ("W4A16", "auto_awq")):
        target = folder / f"{form} {scheme}"
        if not target.exists():
            maker(scheme, form)(parent, target)
        every: dict[str, Any] = {}
        for file in target.glob("*.safetensors"):
            every |= load_file(file)
        parts = {name: part for name, part in every.items() if name.startswith(f"{MODULE}.")}
        config = json.loads((target / "config.json").read_text())["quantization_config"]
        decode = _awq if form == "auto_awq" else _gptq
        decoded = decode({name.rpartition(".")[2]: part for name, part in parts.items()}, config, source)
        name = f"auto-round-{form.removeprefix('auto_')}-{config['bits']}.safetensors"
        save_file(parts, out / name, _metadata("auto-round", config, decoded))


def _gptq(parts: dict[str, Any], config: dict[str, Any], source: Path) -> Any:
    import torch
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    inputs = parts["qweight"].shape[0] * 32 // config["bits"]
    layer = QuantLinear(config["bits"], config["group_size"], inputs, parts["qweight"].shape[1], bias=False)
    for leaf, part in parts.items():
        setattr(layer, leaf, part)
    layer.post_init()
    return layer.to(torch.float32)(torch.eye(inputs)).T


def _awq(parts: dict[str, Any], config: dict[str, Any], source: Path) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("packing_utils", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    four = (parts["qweight"], parts["qzeros"], parts["scales"].float(), config["bits"], config["group_size"])
    return module.dequantize_gemm(*four).T


def _metadata(tool: str, config: dict[str, Any], decoded: Any) -> dict[str, str]:
    values = (decoded.detach().float() + 0.0).contiguous().numpy().astype("<f4").tobytes()
    return {
        "format": "pt",
        "made by": f"{tool} {version(tool)}",
        "quantization_config": json.dumps(config),
        "decoded": hashlib.sha256(values).hexdigest(),
    }


if __name__ == "__main__":
    tool, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    if tool == "bitsandbytes":
        bitsandbytes(out)
    else:
        auto_round(folder, out, Path(sys.argv[4]))
