"""`shardmill verify fit` as a user meets it: presets, JSON, exit codes, boot log, picture."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardmill.verify.fit.bootlog import LogError, read_log
from shardmill.verify.fit.commands import fit
from shardmill.verify.fit.layers import plan_layers
from shardmill.verify.fit.planner import plan_blocks
from shardmill.verify.fit.preset import PRESETS_DIR, PresetError, find_preset, read_preset
from shardmill.verify.fit.published.boots import GLM_5_3_FLASH_SERVED
from shardmill.verify.fit.shape import read_shape
from shardmill.verify.fit.weights import DTYPE_BITS
from tests.schemas import held
from tests.verify.fit.glm import converted

PRESETS = """
name = "long"
[serve]
tensor_parallel_size = 2
max_model_len = 524288
max_num_batched_tokens = 1024
gpu_memory_utilization = 0.95
kv_cache_memory_bytes = 3390000000
kv_cache_dtype = "fp8"
kda_prefill_backend = "flashkda"
cudagraph_capture_sizes = [1, 2]
[serve.limit_mm_per_prompt]
image = 1
[serve.speculative]
method = "mtp"
num_speculative_tokens = 1
[kv]
rung = "8666"
"""
LOG = """
INFO Model loading took 87.28 GiB memory and 60.1 seconds
INFO Setting attention block size to 4352 tokens to ensure that attention page size is >= mamba page size.
INFO Initial free memory 93.89 GiB, reserved 3.16 GiB memory for KV Cache as specified by kv_cache_memory_bytes
INFO GPU KV cache size: 512,890 tokens, Maximum concurrency for 524,288 tokens per request: 0.98x
INFO Graph capturing finished in 4 secs, took 0.08 GiB
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint of full size whose data are a hole in the file: headers alone are read."""
    folder = tmp_path_factory.mktemp("checkpoint")
    entries, offset = {}, 0
    for name, (dtype, shape) in converted(vision=True).items():
        if ".experts." in name and ".layers.3." not in name:
            continue
        size = DTYPE_BITS[dtype] // 8
        for side in shape:
            size *= side
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    (folder / "config.json").write_text(json.dumps(GLM_5_3_FLASH_SERVED))
    return folder


@pytest.fixture
def preset(tmp_path) -> str:
    path = tmp_path / "long.toml"
    path.write_text(PRESETS)
    return str(path)


def ask(*arguments: str):
    return CliRunner().invoke(fit, [str(a) for a in arguments])


def test_json_holds_the_promised_keys_with_the_planners_numbers(checkpoint, preset):
    result = ask(checkpoint, "--preset", preset, "--json")
    value = held(result.stdout)
    assert value["kv"]["bytes_per_token"] == pytest.approx(6582.0, abs=0.05)
    assert value["kv"]["need_bytes"] == 3_450_839_040
    assert value["kv"]["pool_tokens"] == 512_890
    assert value["kv"]["max_context"] == 509_184
    assert value["weights"]["bytes_per_rank"] == sum(value["weights"]["families"].values())
    assert value["verdict"] == "does not fit"
    assert result.exit_code == 1


def test_flags_override_the_preset(checkpoint, preset):
    flags = ["--rung", "6666", "--no-mtp", "--max-model-len", "262144", "--kda-prefill-backend", "triton"]
    value = held(ask(checkpoint, "--preset", preset, *flags, "--pin", 5_000_000_000, "--json").stdout)
    assert (value["preset"]["rung"], value["preset"]["draft_tokens"], value["preset"]["max_model_len"]) == (
        "6666",
        0,
        262144,
    )
    assert value["kv"]["pool_bytes"] == 5_000_000_000
    assert "draft layer" not in value["weights"]["families"]


def test_without_prefix_caching_the_same_pin_holds_the_context(checkpoint, preset):
    result = ask(checkpoint, "--preset", preset, "--no-prefix-caching", "--json")
    value = held(result.stdout)
    assert value["kv"]["pool_tokens"] == 544_452
    assert (value["verdict"], result.exit_code) == ("fits", 0)


def test_a_person_reads_verdict_pin_and_ladder(checkpoint, preset):
    text = ask(checkpoint, "--preset", preset, "--ladder").output
    assert text.startswith("long: does not fit")
    assert "3,475,845,120 B are needed" in text
    assert "pin to set: 3,475,845,120 B" in text
    assert all(f"\n  {rung} " in text for rung in ("stock", "8888", "8666", "6666f", "6666"))


def test_a_boot_log_is_compared_term_by_term(checkpoint, preset, tmp_path):
    log = tmp_path / "boot.log"
    log.write_text(LOG)
    value = held(ask(checkpoint, "--preset", preset, "--log", log, "--json").stdout)
    rows = {row["term"]: row for row in value["log"]}
    assert set(rows) == {
        "weights",
        "free at boot",
        "block tokens",
        "CUDA graphs",
        "pool tokens",
        "concurrency",
    }
    assert all(
        rows[term]["residual"] == 0 for term in ("block tokens", "pool tokens", "concurrency", "CUDA graphs")
    )
    assert rows["weights"]["residual"] > 0


def test_a_profiled_pool_is_taken_from_the_log_within_its_rounding(checkpoint, preset, tmp_path):
    log = tmp_path / "boot.log"
    log.write_text("Available KV cache memory: 4.54 GiB\nGPU KV cache size: 740,841 tokens\n")
    value = held(ask(checkpoint, "--preset", preset, "--log", log, "--json").stdout)
    row = next(row for row in value["log"] if row["term"] == "pool tokens")
    assert (row["low"], row["high"]) == (737_042, 740_841)
    assert row["residual"] == 0


def test_a_file_that_is_no_boot_log_is_refused_by_name(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("nothing here")
    with pytest.raises(LogError, match=r"notes\.txt: no line of a vLLM boot log"):
        read_log(path)


def test_the_picture_is_the_same_bytes_each_time(checkpoint, preset, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs the extra `report`")
    pictures = []
    for name in ("a.svg", "b.svg"):
        ask(checkpoint, "--preset", preset, "--waterfall", tmp_path / name)
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1]
    assert b"KV pool" in pictures[0]


def test_the_published_figures_need_no_checkpoint():
    result = ask("--published")
    assert result.exit_code == 0
    assert "DIFFERS" not in result.output
    assert result.output.count("residual") >= 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a checkpoint's folder and --preset"),
        (["{checkpoint}", "--preset", "no-such-preset"], "no such preset; presets in"),
        (["{checkpoint}", "--preset", "{preset}", "--card", "toaster"], "give one of rtx-pro-6000"),
        (["{checkpoint}", "--preset", "{preset}", "--waterfall", "a.bmp"], "ends in .svg or .png"),
        (["{checkpoint}/absent", "--preset", "{preset}"], "there is no such folder"),
    ],
)
def test_a_question_that_cannot_be_asked_exits_2_with_a_sentence(checkpoint, preset, arguments, message):
    result = ask(*(a.format(checkpoint=checkpoint, preset=preset) for a in arguments))
    assert result.exit_code == 2
    assert message in result.output


def test_a_folder_without_config_exits_2_with_a_sentence(tmp_path, preset):
    result = ask(tmp_path, "--preset", preset)
    assert result.exit_code == 2
    assert "config.json is missing" in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[serve", "cannot be read as TOML"),
        ("serve = 1", r"\[serve\] must be a table"),
        ('[serve]\nmax_model_len = "long"', "max_model_len must be an integer"),
        ("[serve]\nmax_num_seqs = 0", "max_num_seqs must be at least 1"),
        ('[env]\nVLLM_KVQ_INDEXER_MIB = "many"', "VLLM_KVQ_INDEXER_MIB must be a whole number"),
        ('[kv]\nrung = "9999"', "rung must be one of stock, 8888"),
    ],
)
def test_a_faulty_lane_is_refused_by_file_and_key(tmp_path, text, message):
    path = tmp_path / "preset.toml"
    path.write_text(text)
    with pytest.raises(PresetError, match=message):
        read_preset(path)


def test_the_lanes_environment_sizes_the_plugins_scratch(tmp_path):
    path = tmp_path / "preset.toml"
    path.write_text('[env]\nVLLM_KVQ_INDEXER_MIB = "0"\nVLLM_KVQ_STAGE_MIB = "32"\n')
    preset = read_preset(path)
    assert (preset.indexer_mib, preset.logits_mib, preset.stage_mib) == (0, 512, 32)


def test_every_lane_of_the_project_is_read():
    names = sorted(path.stem for path in PRESETS_DIR.glob("*.toml"))
    assert [read_preset(find_preset(name)).name for name in names] == names


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS_DIR.glob("*.toml")))
def test_every_lane_of_the_project_holds_the_context_that_it_promises(name):
    preset = read_preset(find_preset(name))
    plan = plan_blocks(plan_layers(read_shape(GLM_5_3_FLASH_SERVED), preset))
    assert plan.sequences(preset.pin, preset.max_model_len) >= 1


def test_help_shows_an_example():
    assert "Example: shardmill verify fit" in ask("--help").output
