"""Stage `scan`: the parent's headers, index, config and other files, and whether they agree.

Only headers and small JSON files are read. Every contradiction is refused here, by name, so that what follows
may trust a Parent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.beside import side_files
from shardmill.pipeline.container.card import front_matter
from shardmill.pipeline.container.header import file_stat
from shardmill.pipeline.container.regular import read_regular
from shardmill.pipeline.container.weight_files import json_object, weight_files
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.stages.job import Checkpoint
from shardmill.pipeline.types import CONFIG_FILE, README_FILE, Parent

_CARD_BYTES_MAX = 1 << 18  # a model card's front matter is at its start

_HF_QUANT = "hf_quant_config.json"


def scan(checkpoint: Checkpoint) -> Parent:
    """Reads the Parent. Raises CheckpointError where its files are missing or contradict each other.

    The index decides which files hold weights, or the single model.safetensors where there is no index. The recipe's
    `[parent] also` names further files, which some parents publish beside an older index.
    """
    folder = checkpoint.folder
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is not a folder; give the parent checkpoint's folder with --parent")
    headers, stats, single = weight_files(folder, checkpoint.recipe.parent.also)
    carried, left = side_files(folder, list(stats), checkpoint.recipe.output.carry)
    stats |= {name: file_stat(folder / name) for name in carried}
    card = front_matter(_text(folder / README_FILE))
    return Parent(folder, headers, stats, _config(folder), carried, left, single=single, card=card)


def _text(path: Path) -> str:
    """The start of a text file that may be missing, unreadable or no text."""
    try:
        return read_regular(path, _CARD_BYTES_MAX).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG_FILE).exists():
        raise CheckpointError(f"{folder}: {CONFIG_FILE} is missing; loaders require it, fetch it")
    config = json_object(folder / CONFIG_FILE)
    if "quantization_config" not in config and (folder / _HF_QUANT).exists():
        return {**config, "quantization_config": _as_modelopt(json_object(folder / _HF_QUANT))}
    return config


def _as_modelopt(stated: Mapping[str, Any]) -> dict[str, Any]:
    """What hf_quant_config.json says, as ModelOpt puts it into config.json today: older checkpoints have it alone."""
    listed = stated.get("quantization")
    said = dict(listed) if isinstance(listed, dict) else {}
    ignored = said.pop("exclude_modules", None)
    return {"quant_method": "modelopt", **said, "ignore": ignored if isinstance(ignored, list) else []}
