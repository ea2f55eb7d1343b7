"""Children whose codes were made of codes: clean where the manifest is true; a false claim of exactness is found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.reproduce import reproduce
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
    assert reproduce(Folder(out), Folder(parent), None).findings == []


def altered(out: Path) -> None:
    """The last bit of one code is another, and every digest is made again."""
    path = out / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[f"{MODULE}.weight"]["data_offsets"]
    codes = np.frombuffer(data, np.uint8)[8 + length + begin : 8 + length + end]
    place = 8 + length + begin + int(np.flatnonzero((codes & 0x7F) == 0x40)[0])
    data[place] ^= 1
    path.write_bytes(bytes(data))
    digest = hashlib.sha256(bytes(data)).hexdigest()
    resealed(out, lambda body: body["files"]["model.safetensors"].update(sha256=digest))


def resealed(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads((out / MANIFEST).read_bytes())
    change(body)
    del body["self"]
    body["self"] = hashlib.sha256(canonical(body)).hexdigest()
    (out / MANIFEST).write_bytes(canonical(body))


def test_a_block_that_could_not_be_kept_is_made_again(tmp_path: Path) -> None:
    """Scales by row become scales by block: no block keeps its codes, and one altered code among 65,536 is found."""
    out, parent = made(tmp_path, "fp8-channel", "compressed-tensors", "fp8-block", "fp8")
    report = reproduce(Folder(out), Folder(parent), None)
    assert str(report.facts["blocks"]).startswith("4 of 4 compared, 0 differ")
    altered(out)
    found = {finding.slug for finding in reproduce(Folder(out), Folder(parent), None).findings}
    assert "block-differs" in found


def test_codes_are_not_kept_of_a_parent_that_has_none(tmp_path: Path) -> None:
    """Who says `recast/1` of a weight that was floats names numerics that can't have made it."""
    floats = parent_of(tmp_path / "floats", {f"{MODULE}.weight": ("BF16", bell(9, 256, 256))})
    build(floats, tmp_path / "out", recipe(tmp_path, "fp8-block", "fp8"))
    resealed(tmp_path / "out", lambda body: says_recast(body))
    found = {finding.slug for finding in reproduce(Folder(tmp_path / "out"), Folder(floats), None).findings}
    assert "recipe-unknown" in found


def says_recast(body: dict[str, Any]) -> None:
    body["conversions"][f"{MODULE}.weight"]["numerics"] = "recast/1"
    body["numerics"] = ["recast/1"]


def test_a_false_claim_of_exactness_is_found(tmp_path: Path) -> None:
    """A last bit that was altered in a weight whose blocks are all called exact, digests made again."""
    out, parent = made(tmp_path, "mxfp8", "modelopt", "fp8-block", "fp8")
    altered(out)
    found = {finding.slug for finding in roundtrip(Folder(out), Folder(parent), Limits()).findings}
    assert "claim-false" in found
