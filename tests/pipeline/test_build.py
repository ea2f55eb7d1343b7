"""A build: its bytes, their sameness, and what lies beside the weights."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from shardmill.kernels.block_fp8 import encoder
from shardmill.pipeline.container.files import Buffers
from shardmill.pipeline.container.header import read_header
from shardmill.pipeline.types import DTYPE_BITS
from tests.pipeline.conftest import ROOT
from tests.pipeline.parents import (
    CONFIG,
    INDEX,
    MANIFEST,
    RECIPE,
    SCALES,
    SHARDMILL,
    SHARDS,
    Tensor,
    bf16,
    build,
    f32,
    library_bytes,
    listing,
    micro_tensors,
    prepare,
    published,
    write_parent,
    write_recipe,
    write_shard,
)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Name -> (dtype, shape, data) as the file holds them, read by offsets alone."""
    header, data = read_header(path, path.name), path.read_bytes()
    return {
        ref.name: (ref.dtype, ref.shape, data[header.data_begin + ref.begin : header.data_begin + ref.end])
        for ref in header.tensors
    }


def encoded(source: Tensor, block: tuple[int, int]) -> tuple[bytes, bytes]:
    """Codes and scales of a BF16 weight, straight from the kernel."""
    _, shape, data = source
    grid = tuple(-(-side // part) for side, part in zip(shape, block, strict=True))
    codes, scales = np.empty(shape, np.uint8), np.empty(grid, np.float32)
    encoder("amax/1", block, "numpy").encode(np.frombuffer(data, "<u2").reshape(shape), codes, scales)
    return codes.tobytes(), scales.tobytes()


BLOCKS = {"attn": (4, 4), "mlp": (8, 8)}


def expected_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a micro file's tensors must become: codes and scales of attention and MLP, the rest as it was."""
    found: dict[str, Tensor] = {}
    for name, source in tensors.items():
        block = BLOCKS.get(name.split(".")[3]) if source[0] == "BF16" and len(name.split(".")) > 5 else None
        if block is None:
            found[name] = source
            continue
        shape = source[1]
        codes, scales = encoded(source, block)
        found[name] = ("F8_E4M3", shape, codes)
        grid = tuple(-(-side // part) for side, part in zip(shape, block, strict=True))
        found[f"{name}_scale_inv"] = ("F32", grid, scales)
    return found


def test_every_shard_is_what_the_library_would_write(built: Path) -> None:
    """Codes and scales from the kernel, all else from the parent; then the library's own bytes for these tensors."""
    for file, tensors in micro_tensors().items():
        assert (built / file).read_bytes() == library_bytes(expected_tensors(tensors), {"format": "pt"}), file


def test_ragged_blocks_are_covered(built: Path) -> None:
    """The micro parent's matrices end inside a block in their columns and in their rows."""
    found = tensors_of(built / SHARDS[2])
    assert found["model.layers.1.attn.q.weight_scale_inv"][1] == (4, 3)  # 16 x 10 in blocks of 4 x 4
    assert found["model.layers.1.mlp.down.weight_scale_inv"][1] == (2, 3)  # 12 x 20 in blocks of 8 x 8


def test_the_library_reads_every_file(built: Path) -> None:
    """safe_open finds the tensors that the index names, with the shapes of the plan."""
    weight_map = json.loads((built / INDEX).read_text())["weight_map"]
    for file in (*SHARDS, SCALES):
        with safe_open(built / file, framework="numpy") as opened:
            assert set(opened.keys()) == {name for name, place in weight_map.items() if place == file}
            for name in opened.keys():  # noqa: SIM118  (a handle, no mapping)
                assert tuple(opened.get_slice(name).get_shape()) == tensors_of(built / file)[name][1]
            assert opened.metadata() == {"format": "pt"}


def test_the_index_names_every_tensor_once_and_counts_their_bytes(built: Path) -> None:
    index = json.loads((built / INDEX).read_text())
    held = {
        name: (file, tensor)
        for file in (*SHARDS, SCALES)
        for name, tensor in tensors_of(built / file).items()
    }
    assert index["weight_map"] == {name: file for name, (file, _) in held.items()}
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    assert index["metadata"] == {"total_size": sum(len(tensor[2]) for _, tensor in held.values())}
    assert (built / INDEX).read_bytes().endswith(b"\n}\n")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_sources_of_each_float_dtype_convert(tmp_path: Path, dtype: str) -> None:
    values = np.arange(-80, 80, dtype=np.float32).reshape(16, 10) / 7
    data = {
        "F32": values.astype("<f4"),
        "F16": values.astype("<f2"),
        "BF16": (values.view(np.uint32) >> 16).astype("<u2"),
    }
    files = micro_tensors()
    for x in "qk":
        files[SHARDS[0]][f"model.layers.0.attn.{x}.weight"] = (dtype, (16, 10), data[dtype].tobytes())
    build(write_parent(tmp_path / "parent", files), tmp_path / "out")
    found = tensors_of(tmp_path / "out" / SHARDS[0])
    codes, scales = np.empty((16, 10), np.uint8), np.empty((4, 3), np.float32)
    encoder("amax/1", (4, 4), "numpy").encode(data[dtype], codes, scales)
    assert found["model.layers.0.attn.q.weight"] == ("F8_E4M3", (16, 10), codes.tobytes())
    assert found["model.layers.0.attn.q.weight_scale_inv"] == ("F32", (4, 3), scales.tobytes())


@pytest.mark.parametrize("strip_bytes", [1, 64, 200, 1 << 20])
def test_the_height_of_strips_changes_no_byte(
    parent: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reference: dict[str, bytes],
    strip_bytes: int,
) -> None:
    monkeypatch.setattr(sys.modules["shardmill.pipeline.stages.quantize"], "STRIP_BYTES", strip_bytes)
    build(parent, tmp_path / "out")
    assert published(tmp_path / "out") == reference


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_the_number_of_workers_changes_no_byte(
    parent: Path, tmp_path: Path, reference: dict[str, bytes], workers: int
) -> None:
    build(parent, tmp_path / "out", workers=workers)
    assert published(tmp_path / "out") == reference


def test_numba_and_numpy_give_the_same_checkpoint(
    parent: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    pytest.importorskip("numba", reason="needs the extra `fast`")
    assert build(parent, tmp_path / "out", kernel="numba").kernel.startswith("numba")
    assert published(tmp_path / "out") == reference


def test_the_places_of_parent_and_output_change_no_byte(
    twin: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    out = tmp_path / "a longer way" / "to the öutput"
    build(twin, out)
    assert published(out) == reference


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_neither_hash_seed_nor_locale_nor_time_zone_changes_a_byte(
    parent: Path, tmp_path: Path, reference: dict[str, bytes], seed: str
) -> None:
    recipe = write_recipe(tmp_path)
    zone = {"0": "UTC", "1": "Asia/Tokyo", "4242": "America/Lima"}[seed]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": "C", "TZ": zone}
    command = [*SHARDMILL, "build", "-c", recipe, "--parent", parent]
    subprocess.run(
        [*command, "--out", tmp_path / "out"], env=environment, cwd=ROOT, check=True, capture_output=True
    )
    assert published(tmp_path / "out") == reference


def test_the_manifest_holds_no_time_host_path_or_float(built: Path, tmp_path: Path) -> None:
    text = (built / MANIFEST).read_text()
    for word in (socket.gethostname(), str(tmp_path), os.environ.get("USER", "root") + "@", "202"):
        assert (
            re.search(rf'"[^"]*{re.escape(word)}[^"]*"', re.sub(r'"[0-9a-f]{32,64}"', '""', text)) is None
        ), word
    manifest = json.loads(text, parse_float=lambda number: pytest.fail(f"the manifest holds {number}"))
    assert text == json.dumps(manifest, sort_keys=True, separators=(",", ":")) + "\n"


def test_the_manifest_digests_every_published_file_and_tensor(built: Path) -> None:
    """Recomputed here from the files alone: sizes, sha256, xxh3-128, and the manifest's own digest."""
    xxhash = pytest.importorskip("xxhash")
    manifest = json.loads((built / MANIFEST).read_text())
    files = published(built)
    assert manifest["files"] == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
        if name != MANIFEST
    }
    for file, record in manifest["shards"].items():
        found = {
            name: xxhash.xxh3_128_hexdigest(data) for name, (_, _, data) in tensors_of(built / file).items()
        }
        assert record["tensors"] == found
    sources = micro_tensors()[SHARDS[0]]
    assert manifest["shards"][SHARDS[0]]["sources"] == {
        name: xxhash.xxh3_128_hexdigest(sources[name][2]) for name in sources if ".attn." in name
    }
    claimed = manifest.pop("self")
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":")) + "\n"
    assert claimed == hashlib.sha256(canonical.encode()).hexdigest()


def test_the_manifest_says_what_was_made_from_what(built: Path) -> None:
    manifest = json.loads((built / MANIFEST).read_text())
    assert manifest["format"] == "shardmill/manifest/2"
    assert manifest["recipe"] == {
        "name": "micro",
        "layers": [{"toml": RECIPE, "sha256": hashlib.sha256(RECIPE.encode()).hexdigest()}],
    }
    assert [(family["name"], family["tensors"], family["reason"]) for family in manifest["families"]] == [
        ("attention", 4, None),
        ("mlp", 2, None),
        ("experts", 16, "already packed"),
        ("norms", 3, "small"),
    ]
    assert manifest["parent"] == {
        "repository": "nobody/micro",
        "revision": "0123456789abcdef0123456789abcdef01234567",
    }
    assert manifest["parent_verified"] is False
    assert manifest["numerics"] == ["amax/1"]
    assert manifest["algorithms"] == {"tensor": "xxh3-128", "file": "sha256"}
    assert {file: record["rewritten"] for file, record in manifest["shards"].items()} == {
        SHARDS[0]: True,
        SHARDS[1]: False,
        SHARDS[2]: True,
        SCALES: False,
    }
    assert manifest["conversions"]["model.layers.0.mlp.down.weight"] == {
        "family": "mlp",
        "numerics": "amax/1",
        "block": [8, 8],
    }
    assert len(manifest["conversions"]) == 6
    assert (manifest["dropped"], manifest["renamed"], manifest["repairs"]) == ([], {}, [])


def test_files_that_are_passed_on_are_the_parents(built: Path, parent: Path) -> None:
    for name in (SHARDS[1], SCALES, "tokenizer.json", "LICENSE", "assets/logo.txt"):
        assert (built / name).read_bytes() == (parent / name).read_bytes(), name


def test_a_parents_own_header_is_passed_on_as_it_is(tmp_path: Path) -> None:
    """A file that need not change keeps its metadata, padding and order, whatever they are."""
    parent = write_parent(tmp_path / "parent")
    data = (parent / SHARDS[1]).read_bytes()
    length = int.from_bytes(data[:8], "little")
    odd = data[8 : 8 + length].rstrip().replace(b'"format":"pt"', b'"z":"1","a":"2"') + b" " * 13
    (parent / SHARDS[1]).write_bytes(len(odd).to_bytes(8, "little") + odd + data[8 + length :])
    build(parent, tmp_path / "out")
    assert (tmp_path / "out" / SHARDS[1]).read_bytes() == (parent / SHARDS[1]).read_bytes()


def test_metadata_of_a_rewritten_shard_are_kept_sorted(tmp_path: Path) -> None:
    parent = write_parent(tmp_path / "parent")
    write_shard(parent / SHARDS[0], micro_tensors()[SHARDS[0]], {"z": "1", "a": "ä"})
    build(parent, tmp_path / "out")
    assert (
        (tmp_path / "out" / SHARDS[0])
        .read_bytes()[8:]
        .startswith('{"__metadata__":{"a":"ä","format":"pt","z":"1"},'.encode())
    )


def test_a_shard_that_is_read_by_offset_may_be_in_any_order(
    tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """A parent whose tensors lie in another order than the library's, unaligned ones included, gives the same child."""
    parent = write_parent(tmp_path / "parent")
    for file in SHARDS[::2]:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        data = b""
        for name, (dtype, shape, held) in sorted(
            micro_tensors()[file].items(), key=lambda item: item[0][::-1]
        ):
            entries[name] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [len(data), len(data) + len(held)],
            }
            data += held
        text = json.dumps(entries).encode()
        (parent / file).write_bytes(len(text).to_bytes(8, "little") + text + data)
    build(parent, tmp_path / "out")
    for file in SHARDS[::2]:
        assert (tmp_path / "out" / file).read_bytes() == reference[file]


def test_what_speaks_of_the_parent_alone_is_not_carried(tmp_path: Path) -> None:
    """README, hf_quant_config.json, signatures, dotfiles, and links that lead outside the folder."""
    parent = write_parent(tmp_path / "parent")
    (tmp_path / "secret").write_text("outside")
    for name in ("hf_quant_config.json", "model.sig", "release.sigstore.json", "x.asc", ".gitattributes"):
        (parent / name).write_text("{}")
    (parent / ".cache").mkdir()
    (parent / ".cache" / "x").write_text("x")
    (parent / "leak").symlink_to(tmp_path / "secret")
    (parent / "gone").symlink_to(tmp_path / "nowhere")
    (parent / "NOTICE").symlink_to("LICENSE")
    build(parent, tmp_path / "out")
    files = published(tmp_path / "out")
    assert sorted(files) == sorted(
        [
            *SHARDS,
            SCALES,
            INDEX,
            MANIFEST,
            "README.md",
            "config.json",
            "LICENSE",
            "NOTICE",
            "assets/logo.txt",
            "tokenizer.json",
        ]
    )
    assert not (tmp_path / "out" / "NOTICE").is_symlink()
    assert files["NOTICE"] == b"free\n"


def test_the_readme_is_the_childs_own(built: Path) -> None:
    """Parent, revision, recipe and counts; nothing of the parent's text."""
    text = (built / "README.md").read_text()
    for words in (
        "nobody/micro",
        "0123456789abcdef0123456789abcdef01234567",
        "`micro`",
        "2 of 4 weight files",
    ):
        assert words in text
    assert re.search(r"\| attention \| 4 \| quantize \| \[4,4\] \| 1,280 \| 640 \| 192 \|", text)
    assert "The parent's own words" not in text


def test_config_json_is_the_parents_with_one_entry_a_quantized_linear(built: Path) -> None:
    text = (built / "config.json").read_text()
    child = json.loads(text)
    layers: dict[str, dict[str, Any]] = {}
    for layer in (0, 1):
        for prefix in [f"model.layers.{layer}", *(["draft.layers.1"] if layer else [])]:
            layers |= {f"{prefix}.attn.{x}": {"quant_algo": "FP8_BLOCK", "group_size": 4} for x in "qk"}
            layers[f"{prefix}.mlp.down"] = {"quant_algo": "FP8_BLOCK", "group_size": 8}
            layers |= {f"{prefix}.experts.{e}": {"quant_algo": "NVFP4", "group_size": 16} for e in (0, 1)}
    assert child.pop("quantization_config") == {
        "ignore": ["lm_head", "*.norm", "*.experts.9"],
        "kv_cache_scheme": None,
        "producer": {"name": "modelopt", "version": "0.45.0"},
        "quant_algo": "MIXED_PRECISION",
        "quant_method": "modelopt",
        "quantized_layers": layers,
    }
    assert child.pop("torch_dtype") == "bfloat16", "the parent states none, and loaders would guess"
    assert child == {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    assert "naïve ☃" in text


def single_parent(folder: Path) -> Path:
    """The micro parent as one model.safetensors without an index."""
    write_parent(folder)
    for name in (*SHARDS, SCALES, INDEX):
        (folder / name).unlink()
    whole = {name: tensor for tensors in micro_tensors().values() for name, tensor in tensors.items()}
    write_shard(folder / "model.safetensors", whole)
    return folder


def test_a_single_file_parent_gives_a_single_file(tmp_path: Path) -> None:
    build(single_parent(tmp_path / "parent"), tmp_path / "out")
    whole = {name: tensor for tensors in micro_tensors().values() for name, tensor in tensors.items()}
    files = published(tmp_path / "out")
    assert files["model.safetensors"] == library_bytes(expected_tensors(whole), {"format": "pt"})
    assert INDEX not in files
    assert not [name for name in files if name.endswith(".safetensors") and name != "model.safetensors"]


def test_a_parent_without_metadata_or_quantization_converts(tmp_path: Path) -> None:
    plain = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    parent = write_parent(tmp_path / "parent", config=plain)
    write_shard(parent / SHARDS[0], micro_tensors()[SHARDS[0]], {})
    build(parent, tmp_path / "out")
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert declared["quant_method"] == "modelopt"
    assert declared["quant_algo"] == "MIXED_PRECISION"
    expected = library_bytes(expected_tensors(micro_tensors()[SHARDS[0]]), {"format": "pt"})
    assert (tmp_path / "out" / SHARDS[0]).read_bytes() == expected


def test_odd_tensors_pass_through(tmp_path: Path) -> None:
    """Empty and 0-d tensors, every dtype, names with quotes, backslashes and other scripts."""
    files = micro_tensors()
    odd = {
        f'model.layers.0.norm"\\é☃{dtype}.weight': (
            dtype,
            (0, 3) if i % 2 else (2, 2),
            bytes(0 if i % 2 else DTYPE_BITS[dtype] // 2),
        )
        for i, dtype in enumerate(("BOOL", "F4", "I8", "F8_E5M2", "F8_E8M0", "U16", "C64", "U64", "F64"))
    }
    odd["model.layers.0.norm.scalar.weight"] = ("I64", (), bytes(range(8)))
    files[SHARDS[0]] |= odd
    recipe = RECIPE.replace(
        '"model.layers.*.norm.weight"', '"model.layers.*.norm.weight", "model.layers.*.norm*.**"'
    )
    recipe = recipe.replace('["model.layers.*.norm.weight", ', "[")
    build(write_parent(tmp_path / "parent", files), tmp_path / "out", recipe)
    assert (tmp_path / "out" / SHARDS[0]).read_bytes() == library_bytes(
        expected_tensors(files[SHARDS[0]]), {"format": "pt"}
    )


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(parent: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        build(parent, tmp_path / "out")
    finally:
        os.umask(before)
    for name in published(tmp_path / "out"):
        assert stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) == 0o666 & ~umask, name


def test_the_parent_is_not_touched(parent: Path, tmp_path: Path) -> None:
    """Not a byte, not a time, not a new file."""
    before = listing(parent)
    build(parent, tmp_path / "out")
    assert listing(parent) == before


@pytest.mark.parametrize("how", ["reflink", "hardlink"])
def test_shared_files_are_the_same_bytes(
    parent: Path, tmp_path: Path, reference: dict[str, bytes], how: str
) -> None:
    """However an unchanged file is passed on, the checkpoint is the same, and building again does nothing."""
    build(parent, tmp_path / "out", passthrough=how)
    assert published(tmp_path / "out") == reference
    again = build(parent, tmp_path / "out", passthrough=how)
    assert (again.made, again.files_written) == ((), ())
    linked = (tmp_path / "out" / SHARDS[1]).samefile(parent / SHARDS[1])
    assert linked == (how == "hardlink")


def test_a_parent_made_of_links_as_the_hub_cache_keeps_it(
    parent: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """snapshots/<revision>/<file> -> blobs/<digest>: weights and side files are both followed."""
    cache = tmp_path / "models--nobody--micro"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    for path in (path for path in parent.rglob("*") if path.is_file()):
        blob = cache / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blob)
        link = snapshot / path.relative_to(parent)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    build(snapshot, tmp_path / "out")
    assert published(tmp_path / "out") == reference


def test_names_with_spaces_and_other_scripts(tmp_path: Path, reference: dict[str, bytes]) -> None:
    files = {
        name.replace("model-00002", "mödel ☃ 00002"): tensors for name, tensors in micro_tensors().items()
    }
    parent = write_parent(tmp_path / "pärent folder", files)
    (parent / "a note é.txt").write_text("x")
    build(parent, tmp_path / "out put")
    found = published(tmp_path / "out put")
    assert found["mödel ☃ 00002-of-00003.safetensors"] == reference[SHARDS[1]]
    assert found["a note é.txt"] == b"x"
    assert build(parent, tmp_path / "out put").files_written == ()


def test_a_path_longer_than_255_characters(parent: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    out = tmp_path.joinpath(*["deep" * 20] * 4, "out")
    assert len(str(out)) > 300
    build(parent, out)
    assert published(out) == reference


def test_the_summary_tells_what_was_done(parent: Path, tmp_path: Path) -> None:
    summary = build(parent, tmp_path / "out")
    assert [verdict.file for verdict in summary.made] == [*sorted((*SHARDS, SCALES))]
    assert set(summary.files_written) == published(tmp_path / "out").keys()
    assert summary.resumed == ()
    assert summary.kernel.startswith("numpy")
    assert summary.bytes_read == sum((parent / file).stat().st_size for file in (*SHARDS, SCALES))


def test_progress_counts_each_byte_of_input_once(parent: Path, tmp_path: Path) -> None:
    """The bar ends at what it was told at the start: data bytes of what is read, header bytes of what is passed on."""
    from shardmill.pipeline.run import build as run
    from shardmill.pipeline.stages.job import Settings, Watch

    counts: list[int] = []
    totals: list[int] = []
    run.build(
        prepare(parent), tmp_path / "out", Settings(kernel="numpy"), Watch(counts.append), totals.append
    )
    assert len(totals) == 1
    assert 0 < sum(counts) <= totals[0] * 1.1 + 4096


def test_the_tiny_toy_builds_by_the_shipped_recipe(tiny: Path, tiny_built: Path) -> None:
    """549 tensors convert, the index agrees with the files, and what converts is read back as E4M3 with F32 scales."""
    weight_map = json.loads((tiny_built / INDEX).read_text())["weight_map"]
    scales = [name for name in weight_map if name.endswith("_scale_inv")]
    assert len(scales) == 549
    found = {}
    for path in sorted(tiny_built.glob("*.safetensors")):
        for ref in read_header(path, path.name).tensors:
            assert weight_map[ref.name] == path.name
            found[ref.name] = ref
    assert found.keys() == weight_map.keys()
    for name in scales:
        assert (found[name].dtype, found[name.removesuffix("_scale_inv")].dtype) == ("F32", "F8_E4M3")
    layers = json.loads((tiny_built / "config.json").read_text())["quantization_config"]["quantized_layers"]
    assert sum(entry["quant_algo"] == "FP8_BLOCK" for entry in layers.values()) == 549 + 7


def test_a_source_weight_of_many_strips_is_encoded_as_one(tmp_path: Path) -> None:
    """A matrix of several megabytes: strip by strip, and the same codes as in one go."""
    files = micro_tensors()
    big = bf16("big", 3000, 700)
    files[SHARDS[2]]["model.layers.1.mlp.down.weight"] = big
    build(write_parent(tmp_path / "parent", files), tmp_path / "out")
    found = tensors_of(tmp_path / "out" / SHARDS[2])
    codes, scales = encoded(big, (8, 8))
    assert found["model.layers.1.mlp.down.weight"][2] == codes
    assert found["model.layers.1.mlp.down.weight_scale_inv"][2] == scales


def test_no_buffer_grows_with_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips, not tensors: twenty times the rows take the same buffers, of about a megabyte each."""
    sizes: dict[str, int] = {}
    original = Buffers.get

    def noting(self: Buffers, name: str, size: int) -> memoryview:
        sizes[name] = max(size, sizes.get(name, 0))
        return original(self, name, size)

    monkeypatch.setattr(Buffers, "get", noting)
    seen = []
    for rows in (1000, 20_000):
        files = micro_tensors()
        files[SHARDS[2]]["model.layers.1.mlp.down.weight"] = ("BF16", (rows, 700), bytes(rows * 1400))
        files[SHARDS[1]]["model.embed.weight"] = ("BF16", (rows, 700), bytes(rows * 1400))
        build(write_parent(tmp_path / f"parent{rows}", files), tmp_path / f"out{rows}")
        seen.append(dict(sizes))
    assert seen[0] == seen[1]
    assert max(sizes.values()) <= 1 << 20


def forget(parent: Path, file: str) -> None:
    """The index names no tensor of `file` any more."""
    index = json.loads((parent / INDEX).read_text())
    index["weight_map"] = {name: shard for name, shard in index["weight_map"].items() if shard != file}
    (parent / INDEX).write_text(json.dumps(index))


def test_a_file_of_weights_that_the_recipe_names_is_taken_in(tmp_path: Path) -> None:
    """Some parents publish a later file of scales beside an older index: `[parent] also` names it."""
    parent = write_parent(tmp_path / "parent")
    forget(parent, SCALES)
    build(parent, tmp_path / "out", RECIPE.replace("[parent]", f'[parent]\nalso = ["{SCALES}"]'))
    assert SCALES in json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"].values()


def test_zero_blocks_and_signed_zeros_have_the_scale_one(tmp_path: Path) -> None:
    files = micro_tensors()
    zeros = np.zeros((16, 10), "<u2")
    zeros[0, 0] = 0x8000
    for x in "qk":
        files[SHARDS[0]][f"model.layers.0.attn.{x}.weight"] = ("BF16", (16, 10), zeros.tobytes())
    build(write_parent(tmp_path / "parent", files), tmp_path / "out")
    found = tensors_of(tmp_path / "out" / SHARDS[0])
    assert found["model.layers.0.attn.q.weight_scale_inv"][2] == f32(*[1.0] * 12)[2]
    assert found["model.layers.0.attn.q.weight"][2] == b"\x80" + bytes(159)
