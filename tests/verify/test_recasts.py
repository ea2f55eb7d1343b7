"""Children whose codes were made of codes: clean where the manifest is true; a false claim of exactness is found."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.roundtrip import Limits, roundtrip
from shardmill.verify.reading.manifest import MANIFEST, canonical
from shardmill.verify.reading.source import Folder
from tests.kernels.conftest import bell
from tests.pipeline.convert.test_convert import MODULE, arrays_of, parent_of, recipe
from tests.pipeline.parents import build

BOTH = ["**.*_proj.weight", "**.*_proj.weight_*"]


def made(folder: Path, source: str, profile: str, to: str, there: str) -> tuple[Path, Path]:
    """A parent in one format, and its child in another."""
    floats = parent_of(folder / "floats", {f"{MODULE}.weight": ("BF16", bell(9, 256, 256))})
    build(floats, folder / "parent", recipe(folder, source, profile))
    globs = BOTH if f"{MODULE}.weight" in arrays_of(folder / "parent") else BOTH[1:]
    path = recipe(folder, to, there, globs, keys=f'source = "{source}"\n')
    build(folder / "parent", folder / "out", path)
    return folder / "out", folder / "parent"


@pytest.mark.parametrize(
    ("source", "profile", "to", "there"),
    [
        ("mxfp4", "compressed-tensors", "mxfp8", "compressed-tensors"),
        ("mxfp8", "modelopt", "fp8-block", "fp8"),
        ("fp8-channel", "compressed-tensors", "fp8-block", "fp8"),
        ("mxfp4", "compressed-tensors", "nvfp4", "modelopt"),
        ("mxfp8", "modelopt", "mxfp8", "compressed-tensors"),
    ],
)
def test_a_recast_is_clean(tmp_path: Path, source: str, profile: str, to: str, there: str) -> None:
    """Codes or scales that keep name, dtype and shape but are written anew are no carried tensors."""
    out, parent = made(tmp_path, source, profile, to, there)
    assert integrity(Folder(out), Folder(parent)).findings == []
    assert roundtrip(Folder(out), Folder(parent), Limits()).findings == []


def test_a_false_claim_of_exactness_is_found(tmp_path: Path) -> None:
    """A last bit that was altered in a weight whose blocks are all called exact, digests made again."""
    out, parent = made(tmp_path, "mxfp8", "modelopt", "fp8-block", "fp8")
    path = out / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[f"{MODULE}.weight"]["data_offsets"]
    codes = np.frombuffer(data, np.uint8)[8 + length + begin : 8 + length + end]
    place = 8 + length + begin + int(np.flatnonzero((codes & 0x7F) == 0x40)[0])
    data[place] ^= 1
    path.write_bytes(bytes(data))
    body = json.loads((out / MANIFEST).read_bytes())
    body["files"]["model.safetensors"]["sha256"] = hashlib.sha256(bytes(data)).hexdigest()
    del body["self"]
    body["self"] = hashlib.sha256(canonical(body)).hexdigest()
    (out / MANIFEST).write_bytes(canonical(body))
    found = {finding.slug for finding in roundtrip(Folder(out), Folder(parent), Limits()).findings}
    assert "claim-false" in found
