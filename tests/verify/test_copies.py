"""Mistral's own file beside an indexed model: the same weights once more, or a stray of other ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.reading.source import Folder
from tests.verify.zoo.model import Blob, Model, shard_bytes
from tests.verify.zoo.published import parent

WORDS = {
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
}
Tensors = dict[str, Blob]


def _native(model: Model) -> Tensors:
    """Mistral's names, the middle rows of q and k in another order."""
    made = {}
    for name, blob in next(iter(model.shards.values())).items():
        if "q_proj" in name or "k_proj" in name:
            width = len(blob.data) // blob.shape[0]
            rows = [blob.data[place : place + width] for place in range(0, len(blob.data), width)]
            blob = Blob(blob.dtype, blob.shape, b"".join([rows[0], *rows[-2:0:-1], rows[-1]]))
        for old, new in WORDS.items():
            name = name.replace(old, new)
        made[name] = blob
    return made


def _found(folder: Path, native: Tensors) -> list[str]:
    model = parent(False)
    model.indexed = True
    model.write(folder)
    (folder / "consolidated.safetensors").write_bytes(shard_bytes(native))
    return [finding.slug for finding in integrity(Folder(folder)).findings]


def test_the_models_own_weights_under_mistrals_names_are_a_note(tmp_path: Path) -> None:
    assert _found(tmp_path, _native(parent(False))) == ["copy-beside"]


@pytest.mark.parametrize("place", ["norm.weight", "layers.2.feed_forward.w2.weight", "output.weight"])
def test_a_copy_in_which_one_weight_is_another_is_a_stray(place: str, tmp_path: Path) -> None:
    native = _native(parent(False))
    old = native[place]
    native[place] = Blob(old.dtype, old.shape, bytes(2) + old.data[2:])
    assert _found(tmp_path, native) == ["stray-shard"]


def test_a_copy_that_cannot_be_read_is_a_stray(tmp_path: Path) -> None:
    model = parent(False)
    model.indexed = True
    model.write(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"\xff" * 64)
    assert "stray-shard" in {finding.slug for finding in integrity(Folder(tmp_path)).findings}
