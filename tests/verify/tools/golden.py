"""What each tool's own exporter wrote, a module or two of it: default tests ask `verify origin` of true bytes.

The files lie in `golden/`, named as in EXPECTED; `made by` is the tool's version, kept in each file's metadata.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from tests.verify.tools.seeded import CONFIG

GOLDEN = Path(__file__).with_name("golden")
_LOW = "FP8, amax / 448 in the weight's dtype, divided in it"
_TORCH = "FP8, multiplied by 448 times 1 / amax, its reciprocal stored"
_F32 = "FP8, amax / 448 in f32, divided"
_MX4 = "MXFP4, power of two below amax and a quarter, less 2"
_CT4 = "NVFP4, global * (amax / 6 in the weight's dtype)"
_INT = "integers, amax / (levels / 2) in the weight's dtype"


@dataclass(frozen=True, slots=True)
class Expected:
    """The formula that a checkpoint was made by ("": none is known), and the modules that a golden file keeps."""

    formula: str
    keep: tuple[str, ...] = ("self_attn.k_proj",)
    dtype: str = "BF16"  # of the parent
    true: tuple[str, ...] = ()  # rules that are right to find something


EXPECTED: dict[str, Expected] = {
    # Rows that are no tile stay BF16, and a scale of what memory was is written beside them.
    "transformers block fp8": Expected(_TORCH, (), true=("SM085", "SM108", "SM143", "SM204", "SM205")),
    "transformers block fp8 32": Expected(_TORCH),
    "llmcompressor fp8 block": Expected(_LOW, ("mlp.down_proj",)),
    "llmcompressor fp8 channel": Expected(_LOW),
    "llmcompressor fp8 channel f32": Expected(_F32, dtype="F32"),
    "llmcompressor nvfp4": Expected(_CT4),
    "llmcompressor mxfp4": Expected(_MX4),
    "llmcompressor mxfp8": Expected("FP8, power of two below amax and a quarter, less 8"),
    "llmcompressor int8": Expected(_INT),
    "llmcompressor int4": Expected(_INT),
    "llmcompressor int4 zero points": Expected(
        "integers with zero points, (max - min) / levels in the weight's dtype"
    ),
    "nvidia-modelopt fp8 tensor": Expected("FP8, amax / 448 in f32, quotients rounded to the weight's dtype"),
    "nvidia-modelopt fp8 channel": Expected(_F32),
    # A grid of one block loses its axes, of which vLLM wants four.
    "nvidia-modelopt fp8 block": Expected(_F32, (), true=("SM301",)),
    "nvidia-modelopt nvfp4": Expected("NVFP4, amax / (6 * global) in f32"),
    "nvidia-modelopt mxfp8": Expected("FP8, power of two above amax / 448 (ue8m0)"),
    "auto-round mxfp4": Expected("MXFP4, power of two below amax less 2 (OCP MX)"),
    "auto-round nvfp4": Expected("NVFP4, global * (amax times f32(1 / 6)), codes by reciprocals"),
    "auto-round mxfp8": Expected("FP8, power of two below amax less 8 (OCP MX)", ()),
    "auto-round fp8 block": Expected(_F32, ()),
    "amd-quark fp8 tensor": Expected(_LOW),
    "amd-quark fp8 channel": Expected(_LOW, ()),
    "amd-quark mxfp4": Expected(f"{_MX4}, zeros unsigned"),
    "convert-to-quant fp8 tensor": Expected(_TORCH, ()),
    "convert-to-quant fp8 channel": Expected(_TORCH),
}


def write(made: Path) -> None:
    """Golden files from a folder that `make` filled; checkpoints that are not there keep theirs."""
    GOLDEN.mkdir(exist_ok=True)
    for name, expected in EXPECTED.items():
        if expected.keep and (made / name / "tool.txt").exists():
            (GOLDEN / f"{name.replace(' ', '-')}.safetensors").write_bytes(_cut(made / name, expected.keep))


def _cut(folder: Path, keep: tuple[str, ...]) -> bytes:
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text()) if config_file.exists() else {}
    metadata = {
        "format": "pt",
        "made by": (folder / "tool.txt").read_text().strip(),
        "quantization_config": json.dumps(config.get("quantization_config"), sort_keys=True),
    }
    header: dict[str, object] = {"__metadata__": metadata}
    data = b""
    for file in sorted(folder.glob("*.safetensors")):
        raw = file.read_bytes()
        length = struct.unpack_from("<Q", raw)[0]
        for name, entry in sorted(json.loads(raw[8 : 8 + length]).items()):
            if name != "__metadata__" and any(f".{module}." in name for module in keep):
                begin, end = (8 + length + place for place in entry["data_offsets"])
                header[name] = {**entry, "data_offsets": [len(data), len(data) + end - begin]}
                data += raw[begin:end]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def unpack(name: str, folder: Path) -> str:
    """Writes a golden file as a checkpoint's folder; answers which tool made it, in which version."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = (GOLDEN / f"{name.replace(' ', '-')}.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw)
    metadata = json.loads(raw[8 : 8 + struct.unpack_from("<Q", raw)[0]])["__metadata__"]
    quantization = json.loads(metadata["quantization_config"])
    config = {**CONFIG, "quantization_config": quantization} if quantization else CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    return str(metadata["made by"])
