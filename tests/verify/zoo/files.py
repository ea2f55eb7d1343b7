"""Faults of index, files, config entries and manifest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.verify.zoo.case import Case, changed, damaged
from tests.verify.zoo.clean import LM
from tests.verify.zoo.model import (
    INDEX,
    MANIFEST,
    Model,
    bf16,
    block_scales,
    canonical,
    codes,
    f32,
    patch,
    shard_bytes,
)

A, B, INPUTS = (
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model-input-scales.safetensors",
)
EXPERT = f"{LM}layers.1.mlp.experts.0.gate_proj"
Q = f"{LM}layers.0.self_attn.q_proj"


def _json(file: str, edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Edits a JSON file; what `edit` returns replaces the value unless it is None."""

    def damage(folder: Path) -> None:
        value = json.loads((folder / file).read_text())
        edited = edit(value)
        (folder / file).write_text(json.dumps(value if edited is None else edited))

    return damage


def _text(file: str, text: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(text) and None


def _map(edit: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    return _json(INDEX, lambda index: edit(index["weight_map"]) and None)


def _move(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: (folder / old).rename(folder / new) and None


def _flip(file: str, at: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[at] ^= 1
        (folder / file).write_bytes(data)

    return damage


def _manifest(edit: Callable[[dict[str, Any]], Any], sealed: bool = True) -> Callable[[Path], None]:
    """Edits the manifest and, if `sealed`, makes its own digest right again."""

    def damage(folder: Path) -> None:
        import hashlib

        value = json.loads((folder / MANIFEST).read_bytes())
        edit(value)
        if sealed:
            body = {key: item for key, item in value.items() if key != "self"}
            value["self"] = hashlib.sha256(canonical(body)).hexdigest()
        (folder / MANIFEST).write_bytes(canonical(value))

    return damage


def _link_out(folder: Path) -> None:
    target = folder.parent / "outside.safetensors"
    target.write_bytes(shard_bytes({"x": f32(1.0)}))
    (folder / "extra.safetensors").symlink_to(target)


def _lose_shard_in_index(folder: Path) -> None:
    """The rewritten index names only the files of one pattern and their file is gone: nothing else would tell."""
    (folder / B).unlink()
    _json(INDEX, lambda index: _keep(index, {A, INPUTS}))(folder)


def _keep(index: dict[str, Any], files: set[str]) -> None:
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file in files}


def _lose_odd_name(folder: Path) -> None:
    """An index rewritten from `model-N-of-M` names forgets the file of another name."""
    _json(INDEX, lambda index: _keep(index, {A, B}))(folder)


def _dup(folder: Path) -> None:
    (folder / INPUTS).unlink()
    (folder / INPUTS).write_bytes(
        shard_bytes({f"{EXPERT}.input_scale": f32(0.004), f"{LM}norm.weight": bf16("n", 128)})
    )


INDEX_ROWS = damaged(
    "integrity",
    ("index not JSON", "nvfp4_parent", "index-json", _text(INDEX, b"{")),
    ("index a list", "nvfp4_parent", "index-json", _text(INDEX, b"[]")),
    ("index deep", "nvfp4_parent", "index-json", _text(INDEX, b"[" * 200_000)),
    ("index key twice", "nvfp4_parent", "index-json", _text(INDEX, b'{"weight_map":{"a":"x","a":"y"}}')),
    ("index maps to numbers", "nvfp4_parent", "index-json", _map(lambda m: m.update(x=3))),
    ("index total a string", "nvfp4_parent", "index-json", _json(
        INDEX, lambda i: i["metadata"].update(total_size="9"))),
    ("index path up", "nvfp4_parent", "index-path", _map(lambda m: m.update(x="../x.safetensors"))),
    ("index path absolute", "nvfp4_parent", "index-path", _map(lambda m: m.update(x="/etc/passwd"))),
    ("index path NUL", "nvfp4_parent", "index-path", _map(lambda m: m.update(x="a\0.safetensors"))),
    ("index names no file", "nvfp4_parent", "missing-shard", _map(lambda m: m.update(x="nowhere.safetensors"))),
    ("shard removed", "nvfp4_parent", "missing-shard", lambda f: (f / B).unlink()),
    ("index lists too much", "nvfp4_parent", "index-extra-tensor", _map(lambda m: m.update(x=A))),
    ("index lacks one", "nvfp4_parent", "index-lacks-tensor", _map(lambda m: m.pop("lm_head.weight"))),
    ("index in another file", "nvfp4_parent", "index-wrong-shard", _map(lambda m: m.update({"lm_head.weight": B}))),
    ("index total off by 8", "nvfp4_parent", "total-size", _json(INDEX, lambda i: i["metadata"].update(total_size=8))),
    ("total counts headers", "nvfp4_parent", "total-size", lambda f: _total_of_files(f)),
    ("tensor in two files", "nvfp4_parent", "duplicate-tensor", _dup),
    ("file of another name forgotten", "nvfp4_parent", "stray-shard", _lose_odd_name),
    ("no index", "nvfp4_parent", "no-index", lambda f: (f / INDEX).unlink()),
    ("no weights", "plain", "no-weights", lambda f: (f / "model.safetensors").unlink()),
    ("weights in a subfolder", "plain", "no-weights", lambda f: (
        (f / "deep").mkdir(), (f / "model.safetensors").rename(f / "deep/model.safetensors"))[0]),
    ("shard renamed", "nvfp4_parent", "renamed-shard", _move(B, "model-2.safetensors")),
    ("index without total", "nvfp4_parent", "no-total-size", _json(INDEX, lambda i: i.pop("metadata") and None)),
    ("orphan of a cut save", "nvfp4_parent", "orphan-file", _text(".tmpAb12Cd", b"\0" * 9)),
    ("orphan of a cut download", "nvfp4_parent", "orphan-file", _text("x.safetensors.incomplete", b"")),
    ("shard lost, index rewritten", "nvfp4_parent", "incomplete-shards", _lose_shard_in_index),
    ("FIFO for a shard", "plain", "special-file", lambda f: _fifo(f)),
    ("link out of the folder", "plain", "link-leaves-folder", _link_out),
    ("link to nothing", "plain", "special-file", lambda f: (f / "x.safetensors").symlink_to(f / "none")),
    ("config not JSON", "nvfp4_parent", "config-json", _text("config.json", b"{")),
    ("config a string", "nvfp4_parent", "config-json", _text("config.json", b'"x"')),
    ("quantization_config a list", "nvfp4_parent", "config-json", _json(
        "config.json", lambda c: c.update(quantization_config=[]))),
)  # fmt: skip


def _total_of_files(folder: Path) -> None:
    """A total_size that sums file sizes, headers included."""
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    _json(INDEX, lambda index: index["metadata"].update(total_size=total))(folder)


def _fifo(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def _entries(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        edit(model.quantization["quantized_layers"])

    return change


CONFIG_ROWS = changed(
    "integrity",
    ("no config", "deepseek", "no-config", lambda m: setattr(m, "config", None)),
    ("config says nothing", "deepseek", "config-silent", lambda m: m.config.pop("quantization_config")),
    ("declared, none quantized", "plain", "nothing-quantized", lambda m: m.config.update(
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})),
    ("entry without tensors", "mixed_child", "entry-without-tensors", _entries(
        lambda e: e.update({f"{LM}layers.0.self_attn.r_proj": {"quant_algo": "NVFP4", "group_size": 16}}))),
    ("entry of an unquantized module", "mixed_child", "entry-without-tensors", _entries(
        lambda e: e.update({f"{LM}layers.1.mlp.gate": {"quant_algo": "FP8_BLOCK", "group_size": 32}}))),
    ("tensors without entry", "mixed_child", "tensors-without-entry", _entries(lambda e: e.pop(Q))),
    ("entry of another kind", "mixed_child", "entry-kind", _entries(lambda e: e[Q].update(quant_algo="NVFP4"))),
    ("entry of no algorithm", "mixed_child", "entry-kind", _entries(lambda e: e[Q].update(quant_algo="FP9"))),
    ("entry malformed", "mixed_child", "config-json", _entries(lambda e: e.update({Q: "FP8_BLOCK"}))),
    ("entry with another block", "mixed_child", "entry-block", _entries(lambda e: e[Q].update(group_size=128))),
    ("block size of the config wrong", "deepseek", "entry-block",
     lambda m: m.quantization.update(weight_block_size=[64, 64])),
    ("excluded and quantized", "mixed_child", "entry-excluded", lambda m: m.quantization["ignore"].append("*.q_proj")),
    ("excluded by a fused name's member", "nvfp4_parent", "entry-excluded",
     lambda m: m.quantization["ignore"].append("*.mlp.experts.*")),
    ("FP8 declared, NVFP4 there", "nvfp4_parent", "entry-kind", lambda m: m.quantization.update(quant_algo="FP8")),
    ("legacy config differs", "nvfp4_parent", "configs-differ", lambda m: m.others.update(
        {"hf_quant_config.json": b'{"quantization": {"quant_algo": "FP8"}}'})),
)  # fmt: skip


def _shape(name: str, *shape: int) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model[name].shape = shape

    return change


def _put(name: str, at: int, value: bytes) -> Callable[[Model], None]:
    return lambda model: patch(model[name], at, value)


VALUE_ROWS = changed(
    "integrity",
    ("scale grid turned", "mixed_child", "entry-block", _shape(f"{Q}.weight_scale_inv", 2, 8)),
    ("scale grid of no block size", "mixed_child", "scale-grid", lambda m: m.find(f"{Q}.weight").update(
        {f"{Q}.weight_scale_inv": f32(1e-4, 100, 4)})),
    ("scale grid flat", "mixed_child", "scale-grid", _shape(f"{Q}.weight_scale_inv", 16)),
    ("NVFP4 scale of groups of 32", "nvfp4_parent", "scale-grid", lambda m: m.find(f"{EXPERT}.weight").update(
        {f"{EXPERT}.weight_scale": block_scales("x", 128, 4)})),
    ("scale NaN", "mixed_child", "scale-not-finite", _put(f"{Q}.weight_scale_inv", 4, b"\0\0\xc0\x7f")),
    ("scale infinite", "mixed_child", "scale-not-finite", _put(f"{Q}.weight_scale_inv", 8, b"\0\0\x80\x7f")),
    ("scale zero", "mixed_child", "scale-not-positive", _put(f"{Q}.weight_scale_inv", 0, b"\0\0\0\0")),
    ("scale minus zero", "mixed_child", "scale-not-positive", _put(f"{Q}.weight_scale_inv", 0, b"\0\0\0\x80")),
    ("scale negative", "mixed_child", "scale-not-positive", _put(f"{Q}.weight_scale_inv", 60, b"\0\0\x80\xbf")),
    ("global scale negative", "nvfp4_parent", "scale-not-positive",
     _put(f"{EXPERT}.weight_scale_2", 0, b"\0\0\x80\xbf")),
    ("input scale NaN", "nvfp4_parent", "scale-not-finite", _put(f"{EXPERT}.input_scale", 0, b"\0\0\xc0\x7f")),
    ("input scale infinite", "nvfp4_parent", "scale-not-finite", _put(f"{EXPERT}.input_scale", 0, b"\0\0\x80\x7f")),
    ("input scale zero", "nvfp4_parent", "scale-not-positive", _put(f"{EXPERT}.input_scale", 0, b"\0\0\0\0")),
    ("NaN code", "mixed_child", "nan-code", _put(f"{Q}.weight", 777, b"\x7f")),
    ("negative NaN code", "mixed_child", "nan-code", _put(f"{Q}.weight", 0, b"\xff")),
    ("block scale cast to NaN", "nvfp4_parent", "block-scale-nan", _put(f"{EXPERT}.weight_scale", 100, b"\x7f")),
    ("block scale negative", "nvfp4_parent", "block-scale-negative", _put(f"{EXPERT}.weight_scale", 9, b"\xb8")),
    ("global scale in BF16", "nvfp4_parent", "scale-dtype", lambda m: m.find(f"{EXPERT}.weight_scale_2").update(
        {f"{EXPERT}.weight_scale_2": bf16("x")})),
    ("NVFP4 scale in F32", "nvfp4_parent", "scale-dtype", lambda m: m.find(f"{EXPERT}.weight_scale").update(
        {f"{EXPERT}.weight_scale": f32(0.1, 128, 8)})),
    ("scale without weight", "mixed_child", "orphan-scale", lambda m: m.drop(f"{Q}.weight") and None),
    ("weight refused after its scale", "mixed_child", "orphan-scale", lambda m: m.find(f"{Q}.weight").update(
        {f"{Q}.weight": bf16("x", 128, 128)})),
    ("codes without scale", "mixed_child", "bare-codes", lambda m: m.drop(f"{Q}.weight_scale_inv") and None),
    ("NVFP4 without global scale", "nvfp4_parent", "bare-codes", lambda m: m.drop(f"{EXPERT}.weight_scale_2") and None),
    ("NVFP4 without block scale", "nvfp4_parent", "bare-codes", lambda m: m.drop(f"{EXPERT}.weight_scale") and None),
    ("one weight cast, the others scaled", "comfy", "bare-codes", lambda m: m.shards["model.safetensors"].update(
        {"lm_head.weight": codes("h", 256, 128)})),
)  # fmt: skip

MANIFEST_ROWS = damaged(
    "integrity",
    ("manifest not JSON", "mixed_child", "manifest-json", _text(MANIFEST, b"{")),
    ("manifest of another format", "mixed_child", "manifest-json", _manifest(lambda m: m.update(format="x/2"))),
    ("manifest lacks a key", "mixed_child", "manifest-json", _manifest(lambda m: m.pop("shards"))),
    ("manifest with a stray key", "mixed_child", "manifest-json", _manifest(lambda m: m.update(x=1))),
    ("manifest digest malformed", "mixed_child", "manifest-json", _manifest(
        lambda m: m["files"]["config.json"].update(sha256="XYZ"))),
    ("manifest with spaces", "mixed_child", "manifest-canonical", _json(MANIFEST, lambda m: None)),
    ("manifest edited", "mixed_child", "manifest-self", _manifest(lambda m: m.update(plan_key="1" * 64), sealed=False)),
    ("manifest path up", "mixed_child", "index-path", _manifest(
        lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": None}}))),
    ("file gone", "mixed_child", "missing-file", lambda f: (f / "tokenizer.json").unlink()),
    ("file grown", "mixed_child", "file-size", _text("tokenizer.json", b"{} ")),
    ("byte of a small file", "mixed_child", "file-digest", _text("tokenizer.json", b"[]")),
    ("byte of a shard's header", "mixed_child", "file-digest", _flip(A, 20)),
    ("right size, wrong bytes", "mixed_child", "tensor-digest", _flip(A, -9)),
    ("manifest lists a tensor too many", "mixed_child", "manifest-extra-tensor", _manifest(
        lambda m: m["shards"][A]["tensors"].update(x="0" * 32))),
    ("manifest lacks a tensor", "mixed_child", "manifest-lacks-tensor", _manifest(
        lambda m: m["shards"][A]["tensors"].pop("lm_head.weight"))),
    ("file that nobody vouches for", "mixed_child", "stray-file", _text("run.py", b"")),
    ("conversion of another block", "mixed_child", "conversion-record", _manifest(
        lambda m: m["conversions"][f"{Q}.weight"].update(block=[128, 128]))),
    ("conversion of no tensor", "mixed_child", "conversion-record", _manifest(lambda m: m["conversions"].update(
        {"x.weight": {"family": "x", "numerics": "amax/1", "block": [32, 32]}}))),
    ("conversion of a copy", "mixed_child", "conversion-record", _manifest(lambda m: m["conversions"].update(
        {f"{LM}layers.1.mlp.gate.weight": {"family": "x", "numerics": "amax/1", "block": [32, 32]}}))),
)  # fmt: skip

CASES: tuple[Case, ...] = (*INDEX_ROWS, *CONFIG_ROWS, *VALUE_ROWS, *MANIFEST_ROWS)


def copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
