"""What a checkpoint's own files say about how it must be served. Reads config.json and the manifest, no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.runtime_patch.entries import BLOCK_FP8, Entries
from shardmill.runtime_patch.errors import PatchError

MANIFEST = "shardmill.manifest.json"
# Format -> the key of a conversion that names its numerics.
MANIFEST_FORMATS = {"shardmill/manifest/1": "recipe", "shardmill/manifest/2": "numerics"}
UE8M0 = "ue8m0/1"


@dataclass(frozen=True, slots=True)
class Served:
    """A checkpoint as the runtime will see it. `entries` is None where it is none of ours."""

    model_type: str
    entries: Entries | None
    conversions: dict[str, dict[str, Any]]

    @property
    def rounded_at_load(self) -> tuple[str, ...]:
        """[128,128] weights whose f32 scales are no powers of two, as the manifest tells."""
        return tuple(
            name
            for name, fields in self.conversions.items()
            if fields.get("block") == [128, 128] and fields.get("numerics") != UE8M0
        )


def read(folder: Path) -> Served:
    """Raises PatchError with file and reason where the files cannot be served as they are."""
    config = _json(folder / "config.json")
    quantization = config.get("quantization_config") or {}
    mixed = quantization.get("quant_algo") == "MIXED_PRECISION"
    layers = quantization.get("quantized_layers") or {}
    ours = mixed and any(str(fields.get("quant_algo")).upper() == BLOCK_FP8 for fields in layers.values())
    if not ours:
        return Served(config.get("model_type", "unknown"), None, {})
    if not str(quantization.get("quant_method", "")).startswith("modelopt"):
        raise PatchError(
            f"{folder}/config.json: quant_method is {quantization.get('quant_method')!r}, expected modelopt"
        )
    entries = Entries.read(layers)
    if problems := entries.problems():
        raise PatchError("\n".join(f"{folder}/config.json: {problem}" for problem in problems))
    return Served(config.get("model_type", "unknown"), entries, _conversions(folder, entries))


def _conversions(folder: Path, entries: Entries) -> dict[str, dict[str, Any]]:
    """The manifest's conversions, each with the entry that the config must have for it; {} without a manifest."""
    path = folder / MANIFEST
    if not path.exists():
        return {}
    manifest = _json(path)
    numerics = MANIFEST_FORMATS.get(str(manifest.get("format")))
    if numerics is None:
        known = " or ".join(MANIFEST_FORMATS)
        raise PatchError(f"{path}: format {manifest.get('format')!r}, expected {known}")
    conversions: dict[str, dict[str, Any]] = {
        weight: {**fields, "numerics": fields.get(numerics)}
        for weight, fields in manifest.get("conversions", {}).items()
    }
    for weight, fields in conversions.items():
        entry = entries.find(weight.removesuffix(".weight"))
        if entry is None or fields.get("block") != [entry.block, entry.block]:
            raise PatchError(
                f"{path}: {weight} was converted with block {fields.get('block')}, but config.json says "
                f"{'nothing' if entry is None else entry.block} of it"
            )
    return conversions


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PatchError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise PatchError(f"{path}: expected a JSON object")
    return value
