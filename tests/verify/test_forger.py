"""A forger who has read the judge's code: each field of the manifest lies coherently, and each lie is a finding."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.verify.test_lies import (
    EMBEDDING,
    HEAD,
    NORM,
    SCALE,
    _all,
    _foreign,
    _other,
    _two,
)
from tests.verify.test_pairs import Q, Two
from tests.verify.zoo.clean import LM, encoded
from tests.verify.zoo.model import MANIFEST, Blob, bf16, canonical

K = f"{LM}layers.0.self_attn.k_proj.weight"
DOWN = f"{LM}layers.1.mlp.experts.0.down_proj"
Value = dict[str, Any]


def _bump(blob: Blob, every: int = 97) -> None:
    """The last bit of a few codes, far below what any bound on a weight's error shows."""
    codes = np.frombuffer(blob.data, "u1").copy()
    codes[3::every] ^= 1
    blob.data = np.where((codes & 0x7F) == 0x7F, codes ^ 1, codes).astype("u1").tobytes()


def _numerics(two: Two, manifest: Value, numerics: str) -> None:
    _bump(two.child[Q])
    manifest["conversions"][Q]["numerics"] = numerics


def _repaired(two: Two, manifest: Value) -> None:
    """A down projection has no other half, so that no repair can have changed its scales."""
    _bump(two.child[f"{DOWN}.weight_scale"], 17)
    manifest["repairs"] = [{"repair": "reconcile/1", "tensor": f"{DOWN}.weight_scale"}]


def _repaired_total(two: Two, manifest: Value) -> None:
    total = two.child[f"{DOWN}.weight_scale_2"]
    total.data = (np.frombuffer(total.data, "<f4") * np.float32(1.015)).astype("<f4").tobytes()
    manifest["repairs"] = [{"repair": "reconcile/1", "tensor": f"{DOWN}.weight_scale_2"}]


def _of_a_source(two: Two, manifest: Value) -> None:
    """The head is another checkpoint's, it says, which nobody has."""
    _other(two, HEAD)
    two.after = lambda value: value.update(  # type: ignore[attr-defined]
        sources={"x": {"repository": None, "revision": None, "tensors": {HEAD: HEAD}}}
    )


def _shorter(two: Two, manifest: Value) -> None:
    """Half of a weight's rows: nothing to compare it with, by its shape."""
    shard = two.child.find(Q)
    shard[Q], shard[SCALE] = encoded(bf16("other", 64, 128), 32)


def _turned(two: Two, manifest: Value) -> None:
    """As many numbers in another shape."""
    shard = two.child.find(Q)
    shard[Q], shard[SCALE] = encoded(bf16("other", 64, 256), 32)


def _more_blocks(two: Two, manifest: Value) -> None:
    manifest["conversions"][Q] |= {"blocks": 999, "exact_blocks": 999}


def _two_in_one(two: Two, manifest: Value) -> None:
    """Two norms have one new name, so that one of them is nowhere."""
    first, second = (f"{LM}layers.2.{norm}.weight" for norm in ("enorm", "hnorm"))
    new = f"{LM}layers.2.norm_of_both.weight"
    two.child.drop(first)
    two.child.rename(second, new)
    manifest["renamed"] = {first: new, second: new}


def _renamed_away(two: Two, manifest: Value) -> None:
    """The true weight lies under a name that nobody loads, a forged one under its own."""
    shard = two.child.find(K)
    shard[f"{LM}layers.0.self_attn.k_proj_old.weight"] = two.parent[K]
    shard[K], shard[f"{K}_scale_inv"] = encoded(bf16("quite another", 128, 128), 32)
    manifest["renamed"] = {K: f"{LM}layers.0.self_attn.k_proj_old.weight"}


def _converted_from_nothing(two: Two, manifest: Value) -> None:
    """A weight that the parent never had, with a record of its conversion."""
    name = f"{LM}layers.0.self_attn.r_proj.weight"
    shard = two.child.find(Q)
    shard[name], shard[f"{name}_scale_inv"] = encoded(bf16("added", 128, 128), 32)
    manifest["conversions"][name] = {"family": "attention", "numerics": "amax/1", "block": [32, 32]}
    two.child.quantization["quantized_layers"][name.removesuffix(".weight")] = {
        "quant_algo": "FP8_BLOCK",
        "group_size": 32,
    }


def _left_out_and_here(two: Two, manifest: Value) -> None:
    manifest["dropped"] = [NORM]


def _left_out_of_nothing(two: Two, manifest: Value) -> None:
    manifest["dropped"] = ["model.nothing.weight"]


def _renamed_from_nothing(two: Two, manifest: Value) -> None:
    manifest["renamed"] = {"model.nothing.weight": "model.nowhere.weight"}


def _passed_on(two: Two, manifest: Value) -> None:
    def nothing_rewritten(value: Value) -> None:
        for shard in value["shards"].values():
            shard["rewritten"] = False

    two.after = nothing_rewritten  # type: ignore[attr-defined]


def _passed_on_elsewise(two: Two, manifest: Value) -> None:
    """A file that was passed on has its tensors in another order: it is not the parent's file."""
    file = next(file for file in two.child.shards if "input" in file)
    two.child.shards[file] = dict(reversed(two.child.shards[file].items()))


def _said_numerics(two: Two, manifest: Value) -> None:
    two.after = lambda value: value.update(numerics=["lossless/1"])  # type: ignore[attr-defined]


def _families(**row: object) -> Callable[[Two, Value], None]:
    usual = {
        "name": "attention", "action": "quantize", "reason": None, "tensors": 12, "bytes_before": 0,
        "bytes_after": 0, "scale_bytes": 0, "block": None,
    }  # fmt: skip
    return lambda two, manifest: manifest.update(families=[usual | row])


def _odd_values(two: Two, manifest: Value) -> None:
    manifest["values"] = {"model.nothing.weight": {"zero": 1}}


def _code(two: Two, manifest: Value) -> None:
    two.child.others["modeling_zoo.py"] = b"import os"


def _template(two: Two, manifest: Value) -> None:
    two.child.others["chat_template.jinja"] = b"{{ messages }} and what the forger says"


def _tokens(two: Two, manifest: Value) -> None:
    two.child.others["special_tokens_map.json"] = b'{"eos_token": "<x>"}'


def _settings(two: Two, manifest: Value) -> None:
    two.child.others["generation_config.json"] = b'{"eos_token_id": 7}'


def _norm_in_f32(two: Two, manifest: Value) -> None:
    """A norm a thousandth larger, in another dtype, with a record of its conversion."""
    wide = (np.frombuffer(two.child[NORM].data, "<u2").astype("<u4") << 16).view("<f4")
    two.child.find(NORM)[NORM] = Blob("F32", (128,), (wide * np.float32(1.001)).astype("<f4").tobytes())
    manifest["conversions"][NORM] = {"family": "x", "numerics": "bf16/1", "block": [1, 1]}


def _embedding_in_integers(two: Two, manifest: Value) -> None:
    shard = two.child.find(EMBEDDING)
    shard[EMBEDDING] = Blob("I8", (256, 128), bf16("x", 128, 128).data)
    shard[f"{EMBEDDING}_scale"] = Blob("F32", (256, 1), b"\0\0\x80\x38" * 256)
    manifest["conversions"][EMBEDDING] = {"family": "x", "numerics": "int8/1", "block": [1, 128]}


LIES: dict[str, tuple[Callable[[Two, Value], None], str]] = {
    **{
        f"altered codes of {numerics}": (
            lambda two, manifest, said=numerics: _numerics(two, manifest, said),  # type: ignore[misc]
            "recipe-unknown",
        )
        for numerics in ("int8/1", "nvfp4/1", "recast/1", "dequantize/1", "reconcile/1")
    },
    "codes kept that were altered": (lambda two, m: _numerics(two, m, "reblock/1"), "roundtrip-error"),
    "a repair of one half": (_repaired, "claim-false"),
    "a repair of a number": (_repaired_total, "claim-false"),
    "a head of another checkpoint": (_of_a_source, "source-not-given"),
    "half of the rows": (_shorter, "carried-retyped"),
    "another shape": (_turned, "carried-retyped"),
    "blocks that are not there": (_more_blocks, "claim-false"),
    "two norms in one": (_two_in_one, "rename-exchanges"),
    "a true weight renamed away": (_renamed_away, "block-differs"),
    "a conversion of nothing": (_converted_from_nothing, "added-undeclared"),
    "left out and here": (_left_out_and_here, "manifest-untrue"),
    "left out of nothing": (_left_out_of_nothing, "manifest-untrue"),
    "renamed from nothing": (_renamed_from_nothing, "manifest-untrue"),
    "rewritten files passed on": (_passed_on, "manifest-untrue"),
    "a file passed on in another order": (_passed_on_elsewise, "manifest-untrue"),
    "numerics of no conversion": (_said_numerics, "manifest-untrue"),
    "a family's bytes": (_families(bytes_after=1), "manifest-untrue"),
    "another family's name": (_families(name="nobody"), "manifest-untrue"),
    "the parent's bytes": (_families(bytes_before=1), "manifest-untrue"),
    "odd values of nothing": (_odd_values, "manifest-untrue"),
    "code beside the weights": (_code, "parent-side-file"),
    "a template of the forger's": (_template, "parent-side-file"),
    "other special tokens": (_tokens, "parent-side-file"),
    "other settings": (_settings, "parent-side-file"),
    "a norm in F32": (_norm_in_f32, "carried-retyped"),
    "an embedding in integers": (_embedding_in_integers, "roundtrip-error"),
}  # fmt: skip


def _write(two: Two, folder: Path) -> None:
    """Both checkpoints; `two.after` edits the manifest once more, and its own digest is made again."""
    two.sources()
    after = getattr(two, "after", None)
    if after is not None:
        path = folder / "child" / MANIFEST
        value = json.loads(path.read_bytes())
        after(value)
        del value["self"]
        value["self"] = hashlib.sha256(canonical(value)).hexdigest()
        path.write_bytes(canonical(value))


@pytest.mark.parametrize("name", LIES)
def test_a_coherent_lie_is_named_for_what_it_is(tmp_path: Path, name: str) -> None:
    lie, slug = LIES[name]
    two, manifest = _two(tmp_path)
    lie(two, manifest)
    _write(two, tmp_path)
    report = _all(tmp_path)
    assert slug in {finding.slug for finding in report.findings}
    assert report.exit_code == 1


def test_a_source_that_gave_the_parents_own_bytes_excuses_nothing_and_alarms_nobody(tmp_path: Path) -> None:
    two, manifest = _two(tmp_path)
    _of_a_source(two, manifest)
    two.child[HEAD].data = two.parent[HEAD].data
    _write(two, tmp_path)
    assert _all(tmp_path).exit_code == 0


def test_a_wrong_weight_is_found_under_every_word_for_its_numerics(tmp_path: Path) -> None:
    """No numerics excuses a weight of another model, whether the judge can make it again or not."""
    for number, numerics in enumerate(("amax/1", "mse/1", "recover/1", "recast/1", "mine/1", "int4/1")):
        two, manifest = _two(tmp_path / str(number))
        _foreign(two)
        manifest["conversions"][Q]["numerics"] = numerics
        _write(two, tmp_path / str(number))
        assert "roundtrip-error" in {finding.slug for finding in _all(tmp_path / str(number)).findings}
