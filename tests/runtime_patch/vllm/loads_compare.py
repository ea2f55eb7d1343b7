"""`verify loads` beside what the real vLLM did with a checkpoint: the same modules FP8, the same refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.verify.questions import loads_vllm
from shardmill.verify.questions.loads import loads
from shardmill.verify.reading.checkpoint import open_checkpoint
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report, Severity

# Architectures of both tables, those with experts first: vLLM makes its expert groups with the first model.
KINDS = (
    *(
        "mixtral",
        "qwen3_moe",
        "qwen2_moe",
        "qwen3_next",
        "deepseek_v3",
        "deepseek_v2",
        "glm4_moe",
        "minimax_m2",
    ),
    *(
        "granitemoe",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "gemma2",
        "gemma3_text",
        "cohere2",
        "granite",
    ),
    *("olmo2", "smollm3", "seed_oss", "glm4", "gemma3", "qwen2_5_vl", "qwen3_vl"),
    *("mistral3", "gpt_oss"),
)
CODES = ("float8_e4m3fn", "uint8")
COMPUTED = re.compile(r"\.attn\.\w+$")  # scales of the KV cache, which have a default
_EXPERT = re.compile(r"\.experts\.\d+\.")
_ROUTED = re.compile(r"\.experts\.(routed_experts\.)?(?=w13$|w2$)")


def predicted(folder: Path) -> dict[str, str]:
    """Module of vLLM -> "fp8" or "float", a bank's experts as one."""
    words = {}
    checkpoint = open_checkpoint(Folder(folder), Report("loads"))
    for module, verdict in loads_vllm.modules(checkpoint).items():
        words[_EXPERT.sub(".experts.", module)] = "float" if verdict == "float" else "fp8"
    return words


def differences(folder: Path, real: Mapping[str, Any]) -> list[str]:
    found = loads(Folder(folder), loader="vllm")
    errors = [f"{f.slug}: {f.tensor}: {f.got}" for f in found.findings if f.severity is Severity.ERROR]
    empty = [name for name in real.get("empty", ()) if not COMPUTED.search(name)]
    bad = real.get("error") or (f"not filled: {empty[:3]}" if empty else "")
    if bad or errors:
        return (
            []
            if bool(bad) == bool(errors)
            else [f"vLLM: {bad or 'loads'}; predicted {errors[:2] or 'loads'}"]
        )
    words = {
        _ROUTED.sub(".experts.", module): "fp8" if dtype in CODES else "float"
        for module, dtype in real["weights"].items()
    }
    mine = predicted(folder)
    return [
        f"{m}: vLLM {words[m]}, predicted {mine[m]}"
        for m in sorted(words.keys() & mine.keys())
        if words[m] != mine[m]
    ]
