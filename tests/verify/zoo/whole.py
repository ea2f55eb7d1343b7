"""The checkpoint as a whole: config against tensors, blocks against siblings, names, side files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.verify.zoo.case import Case, changed, damaged
from tests.verify.zoo.llama import HIDDEN, VOCAB
from tests.verify.zoo.model import Blob, Model, bf16, codes, scales

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 3\n"


def _config(**values: object) -> Callable[[Model], None]:
    return lambda model: model.config.update(values) if model.config is not None else None


def _other(file: str, data: bytes) -> Callable[[Model], None]:
    return lambda model: model.others.update({file: data})


def _put(name: str, blob: Blob) -> Callable[[Model], None]:
    return lambda model: model.shards["model.safetensors"].update({name: blob})


def _renamed(front: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for name in model.names:
            model.rename(name, front + name)

    return change


def _excluded(model: Model) -> None:
    """Twelve FP8 layers; layer 1 is left out by a name that also begins 10 and 11."""
    for layer in range(12):
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        shard = model.shards["model.safetensors"]
        shard[name] = bf16(name, HIDDEN, HIDDEN) if layer == 1 else codes(name, HIDDEN, HIDDEN)
        if layer != 1:
            shard[f"{name}_scale_inv"] = scales(name, 1, 1)
    assert model.config is not None
    model.config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
        "modules_to_not_convert": ["model.layers.1"],
    }  # fmt: skip


def _twice(model: Model) -> None:
    _excluded(model)
    assert model.config is not None
    model.config["text_config"] = {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}
    }


def _f16(model: Model) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"
    model[name].dtype = "F16"


def _small(name: str) -> Blob:
    return bf16(name, HIDDEN // 2, HIDDEN)


def rows() -> Iterator[Case]:
    yield from changed(
        "lint",
        ("vocab_size beyond the embedding", "whole", "config-shape", _config(vocab_size=VOCAB + 64)),
        ("hidden_size of another model", "whole", "config-shape", _config(hidden_size=2 * HIDDEN, head_dim=32)),
        ("intermediate_size of another model", "whole", "config-shape", _config(intermediate_size=3 * HIDDEN)),
        ("fewer key-value heads than k_proj has", "whole", "config-shape", _config(num_key_value_heads=2)),
        ("a layer more than the config says", "whole", "layer-beyond", _config(num_hidden_layers=3)),
        ("a norm missing in one layer", "whole", "sibling-lacks",
         lambda m: m.drop("model.layers.2.input_layernorm.weight")),
        ("o_proj missing in one layer", "whole", "sibling-lacks",
         lambda m: m.drop("model.layers.1.self_attn.o_proj.weight")),
        ("up half as wide as gate", "whole", "sibling-shape",
         _put("model.layers.2.mlp.up_proj.weight", _small("u"))),
        ("one layer under another float's label", "whole", "sibling-dtype", _f16),
        ("no head, and not tied", "whole", "head-missing", lambda m: m.drop("lm_head.weight")),
        ("no embedding", "whole", "embedding-missing", lambda m: m.drop("model.embed_tokens.weight")),
        ("names of a compiled model", "whole", "wrapper-name", _renamed("_orig_mod.")),
        ("names of a data-parallel model", "whole", "wrapper-name", _renamed("module.")),
        ("names of an adapter's base model", "whole", "wrapper-name", _renamed("base_model.model.")),
        ("a husk of ZeRO-3", "whole", "empty-weight",
         _put("model.layers.0.mlp.up_proj.weight", Blob("BF16", (0,), b""))),
        ("an exclusion that begins other layers", "whole", "exclude-by-prefix", _excluded),
        ("a second declaration in text_config", "whole", "declared-twice", _twice),
        ("no dtype", "whole", "dtype-unsaid", lambda m: m.config.pop("dtype")),
        ("another dtype than the tensors'", "whole", "dtype-differs", _config(dtype="float32")),
        ("two names that differ in case", "whole", "names-alike", _put("model.Norm.weight", bf16("n", HIDDEN))),
        ("a Cyrillic letter in a name", "whole", "names-alike",
         lambda m: m.rename("model.norm.weight", "m\u043edel.norm.weight")),
    )  # fmt: skip
    yield from changed(
        "integrity",
        ("a pointer in place of the tokenizer", "whole", "not-the-file", _other("tokenizer.json", POINTER)),
        ("an error page in place of a setting", "whole", "not-the-file",
         _other("generation_config.json", b"<!DOCTYPE html><html>Sign in</html>")),
        ("an empty tokenizer", "whole", "empty-file", _other("tokenizer.json", b"")),
        ("a tokenizer that ends early", "whole", "config-json", _other("tokenizer.json", b'{"model": {"vocab": ')),
        ("a module that is not here", "whole", "submodule-missing",
         _other("modules.json", b'[{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]')),
        ("settings of a tokenizer that is not here", "whole", "tokenizer-missing",
         lambda m: m.others.pop("tokenizer.json")),
        ("an end token beyond the embedding", "whole", "token-range",
         _other("generation_config.json", b'{"eos_token_id": 99999}')),
        ("a pickle beside the weights", "whole", "pickle-beside", _other("pytorch_model.bin", b"\x80\x02}q\x00.")),
        ("an index of an older save", "whole", "stale-index",
         _other("model.fp32.safetensors.index.json", b'{"weight_map": {"x": "gone.safetensors"}}')),
        ("a tied head of other values", "whole", "tied-differs", _config(tie_word_embeddings=True)),
    )  # fmt: skip
    yield from damaged(
        "integrity",
        ("a pointer in place of the weights", "whole", "not-the-file",
         lambda folder: (folder / "model.safetensors").write_bytes(POINTER)),
        ("a GGUF file named safetensors", "whole", "not-the-file",
         lambda folder: (folder / "model.safetensors").write_bytes(b"GGUF" + bytes(60))),
        ("a pointer in place of the config", "whole", "not-the-file",
         lambda folder: (folder / "config.json").write_bytes(POINTER)),
        ("a folder of folders without end", "whole", "listing-bound", lambda folder: _deep(folder)),
    )  # fmt: skip


def _deep(folder: Path) -> None:
    deep = folder.joinpath(*"abcdefghij")
    deep.mkdir(parents=True)
    (deep / "x").write_bytes(b"1")


CASES: tuple[Case, ...] = tuple(rows())
