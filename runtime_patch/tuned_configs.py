"""Tuned configurations of the block-FP8 GEMM from outside vLLM's own folder.

Folders are searched in order: VLLM_TUNED_CONFIG_FOLDER, which vLLM honours for other kernels alone, and the
folder of this distribution (kernels/configs). A configuration keeps BLOCK_SIZE_K, hence the sums and their bits.
Both hold for our checkpoints alone: a folder that a user keeps for other kernels changes no other model's GEMM.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Configs = dict[int, dict[str, Any]]

_ours: list[bool] = []  # not empty in a process that serves one of our checkpoints


def serve_ours() -> None:
    """Says that this process serves one of our checkpoints, so that the folders hold from now on."""
    _ours.append(True)


def file_name(rows: int, columns: int, device: str, block: int) -> str:
    """vLLM's file name for a weight of `rows` x `columns` per rank; `device` as vLLM spells it in file names."""
    return f"N={rows},K={columns},device_name={device},dtype=fp8_w8a8,block_shape=[{block},{block}].json"


def folders() -> tuple[Path, ...]:
    import shardmill.kernels

    own = Path(shardmill.kernels.__file__).parent / "configs"
    chosen = os.environ.get("VLLM_TUNED_CONFIG_FOLDER")
    return (Path(chosen), own) if chosen else (own,)


def find(name: str) -> Path | None:
    return next((folder / name for folder in folders() if (folder / name).is_file()), None)


def read(path: Path) -> Configs:
    """{batch size: launch parameters}; the keys are integers in quotes, as vLLM writes them.

    Other keys, such as the `triton_version` that vLLM's MoE files may hold, are passed over.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    return {int(batch): config for batch, config in entries.items() if batch.isdecimal()}


def wrap(module: Any) -> None:
    """Puts our folders in front of `module.get_w8a8_block_fp8_configs`, which its callers look up at each call."""
    original: Callable[[int, int, int, int], Configs | None] = module.get_w8a8_block_fp8_configs

    @functools.lru_cache
    def ours(N: int, K: int, block: int) -> Configs | None:
        path = find(file_name(N, K, module.get_device_name_as_file_name(), block))
        return None if path is None else read(path)

    @functools.wraps(original)
    def configs(N: int, K: int, block_n: int, block_k: int) -> Configs | None:
        found = ours(N, K, block_n) if _ours and block_n == block_k else None
        return original(N, K, block_n, block_k) if found is None else found

    module.get_w8a8_block_fp8_configs = configs
