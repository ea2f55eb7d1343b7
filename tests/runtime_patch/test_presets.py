"""The shipped presets and the checks that a preset must pass before it starts."""

import tomllib
from dataclasses import replace

import pytest

from shardmill.runtime_patch import presets
from shardmill.runtime_patch.errors import PresetError
from shardmill.runtime_patch.kv_budget import budget


@pytest.fixture
def preset():
    return presets.load("everything-512k")


def changed(preset, **serve):
    return replace(preset, serve=dict(preset.serve) | serve)


def test_shipped_presets_hold_what_they_promise():
    """Each shipped preset passes its own checks, and its pool holds a request of its full context."""
    assert presets.names() == (
        "c4-262k",
        "everything-512k",
        "everything-512k-6666",
        "text-262k",
        "text-512k",
    )
    for name in presets.names():
        found = presets.load(name)
        assert found.name == name
        assert found.budget.holds


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("everything-512k", (524_288, 1, 1024, 3_390_000_000, [1, 2], "8666", 1, {"image": 1, "video": 0})),
        (
            "c4-262k",
            (262_144, 4, 4096, 3_390_000_000, [1, 2, 3, 4, 6, 8], "8666", 1, {"image": 1, "video": 0}),
        ),
        ("text-512k", (524_288, 1, 1024, 4_290_000_000, [1], "stock", 0, {"image": 0, "video": 0})),
        ("text-262k", (262_144, 2, 1024, 3_113_851_289, [1, 2, 4], "stock", 1, {"image": 0, "video": 0})),
        (
            "everything-512k-6666",
            (524_288, 1, 1024, 3_300_000_000, [1, 2], "6666", 1, {"image": 1, "video": 0}),
        ),
    ],
)
def test_preset_figures(name, expected):
    """Context, sequences, batched tokens, pin, captures, KV layout, speculated tokens and media of each preset."""
    preset, serve = presets.load(name), presets.load(name).serve
    assert (
        serve["max_model_len"],
        serve["max_num_seqs"],
        serve["max_num_batched_tokens"],
        serve["kv_cache_memory_bytes"],
        serve["cudagraph_capture_sizes"],
        preset.layout,
        preset.speculated,
        serve["limit_mm_per_prompt"],
    ) == expected
    assert serve["tensor_parallel_size"] == 2
    assert serve["gpu_memory_utilization"] == 0.95
    assert serve["kv_cache_dtype"] == "fp8"
    assert serve["enable_prefix_caching"] is True
    assert serve["enable_flashinfer_autotune"] is False
    assert serve["kernel_config"] == {"enable_jit_warmup": False, "enable_cutedsl_warmup": False}
    assert (serve["tool_call_parser"], serve["reasoning_parser"]) == ("glm47", "glm45")


def test_the_published_pins_are_short_on_this_vllm(preset):
    """With FlashKDA the published pin holds no 524,288 tokens: the check says how many bytes would."""
    (told,) = presets.check(changed(preset, kda_prefill_backend="flashkda"))
    assert "135 blocks of 25,006,080 B; 524,288 tokens need 139, so at least 3,475,845,120" in told
    text = presets.load("text-512k")
    (told,) = presets.check(changed(text, kv_cache_memory_bytes=4_241_026_048))
    assert "at least 4,289,421,312" in told


def test_captures_must_reach_a_whole_decode_step(preset):
    """A decode step is (1 + k) tokens a sequence; captures below that run eager."""
    assert presets.check(changed(preset, cudagraph_capture_sizes=[1])) != []
    c4 = presets.load("c4-262k")
    (told,) = presets.check(changed(c4, cudagraph_capture_sizes=[1, 2, 4]))
    assert "do not reach 8" in told


def test_four_ranks_do_not_load(preset):
    """The format loads at one and two ranks."""
    (told,) = presets.check(changed(preset, tensor_parallel_size=4))
    assert "loads at 1 or 2 ranks" in told


def test_every_flag_is_explained(preset):
    """A flag without a sentence, and a sentence without a flag, are both found."""
    told = presets.check(changed(preset, seed=0))
    assert told == ["[explain] lacks seed"]
    fewer = {name: value for name, value in preset.serve.items() if name != "reasoning_parser"}
    assert presets.check(replace(preset, serve=fewer)) == [
        "[explain] speaks of reasoning_parser, which the preset does not set"
    ]


def test_command_is_the_flags(preset):
    """Booleans become --flag or --no-flag, tables become JSON, and further arguments come last."""
    words = presets.command(preset, "/model", ("--port", "9000"))
    assert words[:3] == ["vllm", "serve", "/model"]
    assert words[-2:] == ["--port", "9000"]
    assert "--no-enable-flashinfer-autotune" in words
    assert words[words.index("--compilation-config") + 1] == '{"cudagraph_capture_sizes":[1,2]}'
    assert words[words.index("--speculative-config") + 1] == '{"method":"mtp","num_speculative_tokens":1}'
    assert preset.environment == {
        "VLLM_KVQ_TILES": "8666",
        "VLLM_KVQ_SCALES": "fine",
        "VLLM_USE_DEEP_GEMM_E8M0": "0",
        "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name =", "not a preset file"),
        ('name = "x"\nserver = 1', "unknown table server"),
        ('name = "x"\nsummary = ""\n[serve]\n[kv]\n[explain]', "lacks tensor_parallel_size"),
        ("[serve]\nmax_model_len = 1", "lacks"),
    ],
)
def test_a_file_that_is_no_preset(tmp_path, text, told):
    """A broken preset file is one sentence that names it."""
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(PresetError, match=told):
        presets.load(str(path))


def test_an_unknown_name_lists_the_known():
    """A preset that does not exist is answered with those that do."""
    with pytest.raises(PresetError, match="everything-512k"):
        presets.load("everything")


def test_unknown_layout_or_backend_is_one_sentence(preset):
    """What the preset's own numbers cannot be computed for is refused first."""
    assert presets.check(replace(preset, layout="7777")) != []
    (told,) = presets.check(changed(preset, kda_prefill_backend="cute"))
    assert "flashkda or triton" in told


@pytest.mark.parametrize(
    ("row_bytes", "speculated", "block_bytes", "request_blocks"),
    [
        (656, 1, 36_022_272, 134),
        (528, 1, 29_297_664, 134),
        (444, 1, 25_006_080, 138),
        (432, 1, 24_330_240, 138),
        (416, 1, 23_721_984, 138),
        (656, 0, 33_251_328, 131),
        (528, 0, 26_864_640, 131),
    ],
)
def test_budget_as_the_planner_gave_it(row_bytes, speculated, block_bytes, request_blocks):
    """Block bytes and blocks a request, as vLLM 0.33.0's planner computed them at two ranks with FlashKDA."""
    found = budget(
        tokens=524_288, row_bytes=row_bytes, pool_bytes=0, ranks=2, speculated=speculated, checkpoints=1
    )
    assert (found.block_tokens, found.block_bytes, found.request_blocks) == (
        4352,
        block_bytes,
        request_blocks,
    )


def test_preset_files_are_plain_data():
    """Every preset is readable by path with a TOML reader alone, under the agreed keys."""
    for path in presets.FOLDER.glob("*.toml"):
        table = tomllib.loads(path.read_text())
        assert {"name", "summary", "serve", "kv", "env", "card", "explain"} == set(table)
        assert {"layout", "scales"} == set(table["kv"])


@pytest.mark.parametrize(
    ("name", "layout", "scales", "row_bytes"),
    [("6666", "6666", "fine", 416), ("6666-stock", "6666", "stock", 416), ("8666-fine", "8666", "fine", 444)],
)
def test_another_layout_is_a_preset_too(preset, name, layout, scales, row_bytes):
    """--kv-layout changes the rows and their scales, and the pin is checked against them."""
    found = presets.with_layout(preset, name)
    assert (found.layout, found.scales, found.row_bytes) == (layout, scales, row_bytes)
    assert found.environment[presets.settings.TILES] == layout
    assert any("chosen by --kv-layout" in line for line in presets.explanation(found))


def test_a_layout_that_does_not_fit_is_refused(preset):
    """Stock rows need more than the preset's pin: the sentence says how much."""
    with pytest.raises(
        PresetError, match=r"with --kv-layout stock: kv_cache_memory_bytes.*at least 4,754,939,904"
    ):
        presets.with_layout(preset, "stock")


@pytest.mark.parametrize("name", ["7777", "stock-fine", "6666-coarse", ""])
def test_an_unknown_layout_is_one_sentence(preset, name):
    """A layout or policy that does not exist is answered with those that do."""
    with pytest.raises(PresetError, match="expected stock, or one of 8888"):
        presets.with_layout(preset, name)


def test_the_shell_is_told_when_it_loses(preset):
    """A KV layout in the environment loses to the preset's, and the sentence names the flag that would win."""
    shell = {"VLLM_KVQ_TILES": "6666", "VLLM_KVQ_SCALES": "fine", "OTHER": "1"}
    assert (
        "loses to the preset's 8666; to have it, pass --kv-layout 6666"
        in preset.overruled(shell)["VLLM_KVQ_TILES"]
    )
    assert set(preset.overruled(shell)) == {"VLLM_KVQ_TILES"}  # its scales are the preset's
    assert preset.environment_over(shell)["VLLM_KVQ_TILES"] == "8666"
    assert preset.overruled(preset.environment) == {}


def test_a_stock_preset_serves_stock_rows_whatever_the_shell_says():
    """A preset with vLLM's own rows drops the shell's layout instead of inheriting it."""
    text = presets.load("text-512k")
    shell = {"VLLM_KVQ_TILES": "6666", "VLLM_KVQ_SCALES": "fine", "OTHER": "1"}
    kept = text.environment_over(shell)
    assert "VLLM_KVQ_TILES" not in kept
    assert "VLLM_KVQ_SCALES" not in kept
    assert kept["OTHER"] == "1"
    assert set(text.overruled(shell)) == {"VLLM_KVQ_TILES", "VLLM_KVQ_SCALES"}


def test_cards_have_their_flags(preset):
    """An H100 or H200 gets its backend and dtype, the card that the file was written for gets the file's."""
    words = presets.command(presets.on_card(preset, "9.0"), "m")
    assert words[words.index("--attention-backend") + 1] == "FLASHMLA_SPARSE"
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8_ds_mla"
    for capability in (None, "12.0"):
        words = presets.command(presets.on_card(preset, capability), "m")
        assert "--attention-backend" not in words
        assert words[words.index("--kv-cache-dtype") + 1] == "fp8"


def test_an_unknown_card_is_refused(preset):
    """A capability whose sparse attention nobody looked at is named with those that were."""
    with pytest.raises(PresetError, match=r"compute capability 10\.0.*9\.0 \(H100 and H200\)"):
        presets.on_card(preset, "10.0")


def test_the_old_word_for_a_layout_is_read(tmp_path, preset):
    """A preset file of a user's that says [kv] rung means the same."""
    text = (presets.FOLDER / "everything-512k.toml").read_text().replace('layout = "8666"', 'rung = "8666"')
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert presets.load(str(path)) == preset
