"""What the real transformers holds of a checkpoint, parameter by parameter, as on a card that multiplies FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save(config: dict[str, Any], folder: Path, seed: int) -> Path:
    """A model of the config with random weights, by save_pretrained."""
    import torch
    import transformers

    made = transformers.CONFIG_MAPPING[config["model_type"]](
        **{k: v for k, v in config.items() if k != "model_type"}
    )
    made.dtype = torch.bfloat16
    torch.manual_seed(seed)
    auto = (
        transformers.AutoModelForImageTextToText
        if "vision_config" in config
        else transformers.AutoModelForCausalLM
    )
    model = auto.from_config(made, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 16)
    model.save_pretrained(folder)
    return folder


def held(folder: Path) -> dict[str, Any]:
    """{"held": {parameter: dtype}, "missing": [...], "unexpected": [...], "mismatched": [...]} or {"error": ...}."""
    import json

    import transformers

    config = json.loads((folder / "config.json").read_text())
    auto = (
        transformers.AutoModelForImageTextToText
        if "vision_config" in config
        else transformers.AutoModelForCausalLM
    )
    try:
        model, info = auto.from_pretrained(folder, dtype="bfloat16", output_loading_info=True)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {
        "held": {name: str(p.dtype).removeprefix("torch.") for name, p in model.state_dict().items()},
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(str(k) for k in info["mismatched_keys"]),
        "linears": sorted(n for n, m in model.named_modules() if "Linear" in type(m).__name__),
        "error_msgs": str(info.get("error_msgs") or info.get("conversion_errors") or ""),
    }
