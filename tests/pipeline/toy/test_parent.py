"""The folder that `shardmill toy-parent` leaves behind."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors import safe_open

from shardmill.pipeline.commands.toy import toy_parent
from shardmill.pipeline.container.header import read_header
from shardmill.pipeline.errors import ShardmillError
from shardmill.pipeline.toy.sizes import SIZES
from shardmill.pipeline.toy.tokenizer import SPECIAL_TOKENS, byte_symbols
from shardmill.pipeline.toy.write import check_folder, toy_headers, write_parent

GOLDEN = Path(__file__).with_name("golden") / "tiny.sha256"  # as `sha256sum *` prints it


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_tiny_has_the_golden_bytes(tiny: Path) -> None:
    """Every file's sha256 is the recorded one. To change a byte is to change the toy's name in its README too."""
    golden = {name: digest for digest, name in (line.split() for line in GOLDEN.read_text().splitlines())}
    assert _digests(tiny) == golden


def test_making_a_toy_twice_gives_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    write_parent(tmp_path, SIZES["tiny"], toy_headers(SIZES["tiny"]), lambda count: None)
    assert _digests(tmp_path) == _digests(tiny)


def test_the_safetensors_library_reads_every_tensor_that_the_index_names(tiny: Path) -> None:
    """Index and files agree in both directions, and total_size is the sum of the tensors' bytes."""
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    held, size = {}, 0
    for path in sorted(tiny.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
            held |= dict.fromkeys(file.keys(), path.name)
        size += read_header(path, path.name).data_bytes
    assert index == {"metadata": {"total_size": size}, "weight_map": held}
    assert list(index["weight_map"]) == sorted(held)


def test_the_config_declares_the_toys_shapes(tiny: Path) -> None:
    """The dimensions in config.json are those of the tensors; the layer lists have 45 entries."""
    config = json.loads((tiny / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    refs = {r.name: r.shape for p in tiny.glob("*.safetensors") for r in read_header(p, p.name).tensors}
    layer = "model.language_model.layers."
    attention = text["linear_attn_config"]
    assert refs["lm_head.weight"] == (text["vocab_size"], text["hidden_size"])
    assert refs[f"{layer}0.self_attn.q_proj.weight"][0] == attention["num_heads"] * attention["head_dim"]
    assert refs[f"{layer}3.self_attn.kv_b_proj.weight"] == (
        text["num_attention_heads"] * (text["qk_nope_head_dim"] + text["v_head_dim"]),
        text["kv_lora_rank"],
    )
    shared = text["moe_intermediate_size"] * text["n_shared_experts"]
    assert refs[f"{layer}3.mlp.shared_experts.up_proj.weight"] == (shared, text["hidden_size"])
    assert refs[f"{layer}3.mlp.gate.weight"][0] == text["n_routed_experts"]
    assert refs["model.visual.merger.gate_proj.weight"] == (
        vision["projection_intermediate_size"],
        vision["out_hidden_size"],
    )
    assert (len(text["layer_types"]), len(text["mlp_layer_types"]), vision["depth"]) == (45, 45, 24)
    assert [i for i, kind in enumerate(text["layer_types"]) if kind != "linear_attention"] == list(
        range(3, 45, 4)
    )


def test_the_quantization_config_is_the_published_one(tiny: Path) -> None:
    """Six keys, NVFP4 in groups of 16, 43 different globs."""
    quantization = json.loads((tiny / "config.json").read_text())["quantization_config"]
    assert list(quantization) == [
        "config_groups",
        "quant_algo",
        "kv_cache_scheme",
        "producer",
        "quant_method",
        "ignore",
    ]
    assert (quantization["quant_algo"], quantization["quant_method"]) == ("NVFP4", "modelopt")
    assert quantization["config_groups"]["group_0"]["weights"]["group_size"] == 16
    assert len(set(quantization["ignore"])) == len(quantization["ignore"]) == 43
    assert quantization["ignore"][:3] == [
        "lm_head",
        "model.language_model.embed_tokens",
        "*.self_attn.in_proj_qkvbfg_a",
    ]
    assert quantization["ignore"][30:32] == ["*.eh_proj", "model.visual.*"]


def test_the_tokenizer_has_a_token_for_each_byte_and_fits_the_vocabulary(tiny: Path) -> None:
    """256 distinct symbols, then the special tokens, all below vocab_size."""
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    numbers = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    assert numbers == list(range(256 + len(SPECIAL_TOKENS)))
    assert len(numbers) <= SIZES["tiny"].dimensions.vocabulary
    assert len(set(byte_symbols())) == 256
    assert (byte_symbols()[ord("a")], byte_symbols()[ord(" ")]) == ("a", "Ġ")


def test_the_tokenizers_library_reads_any_text_back(tiny: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    text = "<|user|>Grüße, 世界\n"
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == 256 + SPECIAL_TOKENS.index("<|user|>")
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


def test_the_headers_toy_has_true_headers_and_holes_for_data(tmp_path: Path) -> None:
    """Its files have the real sizes and take next to no room on disk."""
    chosen = [header for header in toy_headers(SIZES["headers"]) if header.shard.startswith("model-0011")]
    write_parent(tmp_path, SIZES["headers"], chosen, lambda count: None)
    for header in chosen:
        path = tmp_path / header.shard
        assert read_header(path, header.shard) == header
        assert path.stat().st_size == header.file_bytes
        assert path.stat().st_blocks * 512 < 1 << 20


def test_the_command_says_what_it_made_and_what_to_type_next(tmp_path: Path) -> None:
    """A second call finds the parent whole and leaves its files alone."""
    folder = tmp_path / "parent"
    first = CliRunner().invoke(toy_parent, [str(folder)], catch_exceptions=False)
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    second = CliRunner().invoke(toy_parent, [str(folder)], catch_exceptions=False)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert f"{folder}: toy parent tiny: 5 files, 2,650 tensors, 124,331,896 bytes.\n" in first.stdout
    assert f"Next:  shardmill plan -c glm-5.3-flash-fp8 --parent {folder}\n" in first.stdout
    assert "nothing to do" in second.stdout
    assert times == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_toy_that_was_begun_is_made_whole(tiny: Path, tmp_path: Path) -> None:
    """Without its index, or with a shard cut short, the same command makes the folder again."""
    write_parent(tmp_path, SIZES["tiny"], toy_headers(SIZES["tiny"]), lambda count: None)
    shard = tmp_path / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    assert CliRunner().invoke(toy_parent, [str(tmp_path)], catch_exceptions=False).exit_code == 0
    assert _digests(tmp_path) == _digests(tiny)


def test_a_hard_link_to_a_shard_keeps_its_bytes_when_the_toy_is_made_again(tmp_path: Path) -> None:
    """A child built with hard links must not change with its parent."""
    folder, link = tmp_path / "parent", tmp_path / "child.safetensors"
    headers = toy_headers(SIZES["tiny"])[-1:]
    write_parent(folder, SIZES["tiny"], headers, lambda count: None)
    shard = folder / headers[0].shard
    link.hardlink_to(shard)
    write_parent(folder, SIZES["tiny"], headers, lambda count: None)
    assert link.stat().st_nlink == 1


def test_a_folder_that_holds_something_else_is_refused(tiny: Path, tmp_path: Path) -> None:
    """A toy never overwrites another parent: neither files of unknown origin nor a toy of another size."""
    (tmp_path / "model-00001-of-00120.safetensors").write_bytes(b"precious")
    for folder, size in ((tmp_path, "tiny"), (tiny, "many")):
        with pytest.raises(
            ShardmillError, match=rf"something other than a toy parent of size {size}; name a new"
        ):
            check_folder(folder, SIZES[size])


def test_progress_counts_every_byte_of_the_shards(tmp_path: Path) -> None:
    headers, seen = toy_headers(SIZES["tiny"])[-1:], []
    write_parent(tmp_path, SIZES["tiny"], headers, seen.append)
    assert sum(seen) == headers[0].file_bytes
