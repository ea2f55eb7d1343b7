"""What preflight says of a checkpoint, an environment and a machine; and the command line around it."""

import json
import sys
import types
from pathlib import Path

import pytest

from shardmill.runtime_patch import __main__ as main
from shardmill.runtime_patch import checkpoint, plugin, preflight, presets, tuned_configs
from shardmill.runtime_patch.errors import PatchError
from tests.schemas import held

O_PROJ = "model.language_model.layers.0.self_attn.o_proj"
ENTRY = {"quant_algo": "FP8_BLOCK", "group_size": 128}


def write(folder, layers=None, conversions=None, model_type="glm5_next", **quantization):
    config = {"model_type": model_type}
    if layers is not None:
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
            **quantization,
        }
    (folder / "config.json").write_text(json.dumps(config))
    if conversions is not None:
        manifest = {"format": "shardmill/manifest/2", "conversions": conversions}
        (folder / "shardmill.manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def here(monkeypatch):
    """A machine where the plugin applies: what is asked below is the checkpoint and the environment."""
    monkeypatch.setattr(plugin, "vllm_problems", list)
    monkeypatch.setattr(plugin, "register", lambda: None)
    monkeypatch.setattr(plugin, "_applied", {})
    monkeypatch.setattr(preflight, "packages_distributions", dict)
    monkeypatch.setattr(preflight, "capability", lambda: None)
    monkeypatch.setattr(plugin, "APPLY", dict.fromkeys(plugin.APPLY, lambda _: "applied"))
    monkeypatch.setattr(preflight, "_plugin_found", lambda _: [])


def findings(folder=None, **environ):
    report = preflight.run(folder, None, environ)
    return {(f.level, f.subject): f.told for f in report.findings if f.level != "note"}


def test_rerounded_scales_are_a_warning_with_figures(here, tmp_path):
    """[128,128] weights that vLLM would re-round are counted, with the error as stored and as served."""
    write(tmp_path, {O_PROJ: ENTRY}, {f"{O_PROJ}.weight": {"numerics": "amax/1", "block": [128, 128]}})
    told = findings(tmp_path)[("warning", "VLLM_USE_DEEP_GEMM_E8M0")]
    assert "1 weights are re-rounded to UE8M0" in told
    assert "3.74 %" in told
    assert findings(tmp_path, VLLM_USE_DEEP_GEMM_E8M0="0") == {}


def test_scales_written_as_powers_of_two_need_no_warning(here, tmp_path):
    """A checkpoint of the recipe ue8m0/1 is served as stored."""
    write(tmp_path, {O_PROJ: ENTRY}, {f"{O_PROJ}.weight": {"numerics": "ue8m0/1", "block": [128, 128]}})
    assert findings(tmp_path) == {}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"layers": {O_PROJ: ENTRY}, "model_type": "deepseek_v3"}, "the patches are for glm5_next"),
        ({"layers": {O_PROJ: ENTRY}, "quant_method": "fp8"}, "expected modelopt"),
        ({"layers": {O_PROJ: ENTRY | {"group_size": 64}}}, "group_size 64"),
        ({"layers": {f"{O_PROJ[:-6]}q_a_proj": ENTRY}}, "kv_a_proj_with_mqa unquantized"),
        (
            {
                "layers": {O_PROJ: ENTRY},
                "conversions": {f"{O_PROJ}.weight": {"numerics": "amax/1", "block": [32, 32]}},
            },
            r"converted with block \[32, 32\], but config.json says 128",
        ),
        (
            {
                "layers": {O_PROJ: ENTRY},
                "conversions": {"lm_head.weight": {"numerics": "amax/1", "block": [128, 128]}},
            },
            "says nothing of it",
        ),
    ],
)
def test_a_checkpoint_that_would_be_served_wrong(here, tmp_path, arguments, told):
    """Each contradiction between config, manifest and patches is an error."""
    import re

    found = findings(write(tmp_path, **arguments))
    assert any(level == "error" and re.search(told, text) for (level, _), text in found.items()), found


def test_another_manifest_format_is_refused(tmp_path):
    """A manifest of a format that this version does not know is not guessed at."""
    write(tmp_path, {O_PROJ: ENTRY})
    (tmp_path / "shardmill.manifest.json").write_text('{"format": "shardmill/manifest/9"}')
    with pytest.raises(PatchError, match="expected shardmill/manifest/1 or shardmill/manifest/2"):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", None])
def test_a_config_that_is_none(here, tmp_path, text):
    """A config.json that is missing or no object is one sentence with its path."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    (told,) = findings(tmp_path).values()
    assert "config.json" in told


def test_a_name_on_the_hub_is_not_checked(here):
    """What is no folder here is vLLM's to resolve: a warning says that nothing was looked at."""
    assert "was not checked" in findings(Path("org/name"))[("warning", "checkpoint")]


def test_other_checkpoints_are_left_alone(here, tmp_path):
    """A checkpoint without block-FP8 weights is served as stock vLLM does; a rung for it is an error."""
    write(tmp_path, model_type="llama")
    assert findings(tmp_path) == {}
    assert ("error", "VLLM_KVQ_TILES") in findings(tmp_path, VLLM_KVQ_TILES="8666")


@pytest.mark.parametrize(
    ("environ", "subject"),
    [
        ({"VLLM_KVQ_TILES": "7"}, "environment"),
        ({"VLLM_KVQ_TILE": "8666"}, "environment"),
    ],
)
def test_a_misspelt_variable_is_an_error(here, environ, subject):
    """An unknown rung and an unknown VLLM_KVQ_ name would both be ignored silently, so they are errors."""
    assert ("error", subject) in findings(**environ)


def test_the_plugin_must_be_found_and_let_in(monkeypatch):
    """Without the entry point, or with VLLM_PLUGINS leaving it out, vLLM would serve without the plugin."""
    monkeypatch.setattr(preflight, "entry_points", lambda group: [])
    assert len(list(preflight._plugin_found({"VLLM_PLUGINS": "other"}))) == 2
    ours = types.SimpleNamespace(value="shardmill.runtime_patch.plugin:register")
    monkeypatch.setattr(preflight, "entry_points", lambda group: [ours])
    assert list(preflight._plugin_found({"VLLM_PLUGINS": "other,shardmill"})) == []
    assert list(preflight._plugin_found({})) == []


def test_a_missing_tuned_configuration_is_a_warning_with_the_command(here, monkeypatch, tmp_path):
    """A card without a file is told how to make one; a file in VLLM_TUNED_CONFIG_FOLDER settles it."""
    monkeypatch.setattr(preflight, "_card", lambda: "NVIDIA_Nothing")
    told = findings()[("warning", "tuned configuration")]
    assert "shardmill tune --shape 12576,4096 --block 32" in told
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    (tmp_path / tuned_configs.file_name(12576, 4096, "NVIDIA_Nothing", 32)).write_text("{}")
    assert findings() == {}


def test_refusal_is_in_every_row(monkeypatch):
    """Where the plugin refuses, each row of the table says why, and the exit code is not zero."""
    monkeypatch.setattr(plugin, "vllm_problems", lambda: ["version 0.1, expected 0.33.0"])
    monkeypatch.setattr(plugin, "_applied", {})
    monkeypatch.setattr(plugin, "register", lambda: None)
    report = preflight.run(None, None, {})
    assert not report.ok
    assert all(state.state.startswith("refused: version 0.1") for state in report.states)


def test_json_is_one_object(here, capsys, tmp_path, monkeypatch):
    """preflight --json prints one object; 0 where nothing is wrong, 1 where something is."""
    monkeypatch.setattr(main.os, "environ", {})
    assert main.main(["preflight", "--json"]) == 0
    printed = held(capsys.readouterr().out)
    assert printed["ok"] is True
    assert set(printed["states"][0]["patch"]) >= {
        "name",
        "kind",
        "target",
        "why",
        "upstream",
        "remove_when",
        "expects",
    }
    assert main.main(["preflight", "--json", "--preset", "nothing"]) == 1
    assert held(capsys.readouterr().out)["ok"] is False


def test_serve_prints_a_reason_for_every_flag(capsys):
    """serve --print shows each flag with its sentence, the pool, and a command to paste."""
    assert main.main(["serve", "everything-512k", "--model", "/m x", "--print", "--", "--port", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in presets.load("everything-512k").serve:
        assert any(line.startswith(f"# {name} = ") for line in lines), name
    assert lines[-1].startswith("VLLM_KVQ_TILES=8666 VLLM_KVQ_SCALES=fine VLLM_USE_DEEP_GEMM_E8M0=0 ")
    assert " vllm serve '/m x' --tensor-parallel-size 2 " in lines[-1]
    assert lines[-1].endswith("--port 1")


def test_the_layout_of_a_flag_wins_and_the_shells_is_named(capsys, monkeypatch):
    """--kv-layout, or its old name --rung, changes the command; a shell's variable that loses is a comment above it."""
    monkeypatch.setenv("VLLM_KVQ_TILES", "6666f")
    for flag in ("--kv-layout", "--rung"):
        asked = ["serve", "everything-512k", "--model", "m", "--print", flag, "6666-stock", "--card", "12.0"]
        assert main.main(asked) == 0
        printed = capsys.readouterr().out
        assert "VLLM_KVQ_TILES=6666 VLLM_KVQ_SCALES=stock " in printed
        assert "# VLLM_KVQ_TILES: the environment's 6666f loses to the preset's 6666" in printed


def test_a_stock_presets_command_takes_the_shells_layout_out(capsys, monkeypatch):
    """The printed command of a preset with vLLM's rows unsets what the shell holds."""
    monkeypatch.setenv("VLLM_KVQ_TILES", "6666")
    assert main.main(["serve", "text-512k", "--model", "m", "--print"]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("env -u VLLM_KVQ_TILES VLLM_USE_DEEP_GEMM_E8M0=0 ")
    )


@pytest.mark.parametrize(
    ("flag", "told"), [(["--kv-layout", "7777"], "7777"), (["--card", "8.9"], "compute capability 8.9")]
)
def test_a_layout_or_card_that_is_not_known(capsys, flag, told):
    """An unknown KV layout or card is one line on stderr and exit code 2."""
    assert main.main(["serve", "everything-512k", "--model", "m", "--print", *flag]) == 2
    assert told in capsys.readouterr().err


def test_preflight_knows_the_card(here, monkeypatch):
    """A preset on a card without known sparse attention is an error before anything starts."""
    monkeypatch.setattr(preflight, "capability", lambda: "10.0")
    report = preflight.run(None, presets.load("everything-512k"), {})
    assert [f.subject for f in report.findings if f.level == "error"] == ["card"]


def test_preflight_warns_where_the_shell_loses(here, monkeypatch, capsys):
    """A KV layout in the environment beside a preset is a warning with both values."""
    monkeypatch.setattr(main.os, "environ", {"VLLM_KVQ_TILES": "6666"})
    assert main.main(["preflight", "--preset", "everything-512k"]) == 0
    assert (
        "warning: VLLM_KVQ_TILES: the environment's 6666 loses to the preset's 8666"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("owners", "told"),
    [
        (["shardmill", "shardmill"], "shardmill still installs a package `kernels` at the top level; run"),
        (["shardmill-serving"], "shardmill-serving still installs a package `kernels` at the top level; run"),
        (
            ["kernels", "shardmill"],
            "shares that folder with kernels; run `pip uninstall shardmill`, then reinstall kernels",
        ),
    ],
)
def test_an_older_installation_is_found(here, monkeypatch, owners, told):
    """Our packages of before, alone or merged with transformers' `kernels`, are an error that says what to run."""
    monkeypatch.setattr(preflight, "packages_distributions", lambda: {"kernels": owners})
    found = findings()[("error", "kernels")]
    assert told in found
    assert "shardmill, shardmill" not in found  # found twice, named once


@pytest.mark.parametrize("owners", [["kernels"], []])
def test_a_foreign_kernels_package_is_no_business_of_ours(here, monkeypatch, owners):
    """transformers' `kernels` beside shardmill.kernels harms nobody."""
    monkeypatch.setattr(preflight, "packages_distributions", lambda: {"kernels": owners})
    assert findings() == {}


def test_serve_runs_only_after_preflight(here, monkeypatch, tmp_path, capsys):
    """A finding stops the server; without one the preset's command runs in the preset's environment."""
    started = []
    monkeypatch.setattr(main.os, "execvpe", lambda *words: started.append(words))
    monkeypatch.setattr(main.os, "environ", {})
    assert main.main(["serve", "text-512k", "--model", str(tmp_path)]) == 1
    assert started == []
    write(tmp_path, {O_PROJ: ENTRY})
    main.main(["serve", "text-512k", "--model", str(tmp_path)])
    ((program, words, environ),) = started
    assert (program, words[:3]) == ("vllm", ["vllm", "serve", str(tmp_path)])
    assert environ["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    capsys.readouterr()


def test_an_unknown_preset_is_one_line(capsys):
    """A preset that does not exist is an error on stderr and exit code 2."""
    assert main.main(["serve", "nothing", "--model", "m"]) == 2
    assert "known presets" in capsys.readouterr().err


def test_works_without_the_pipeline():
    """The serving image carries neither pipeline nor verify nor click: nothing here imports them."""
    import subprocess

    program = (
        "import sys; sys.modules.update(dict.fromkeys(['shardmill.pipeline', 'shardmill.verify', 'click', 'torch'])); "
        "from shardmill.runtime_patch.__main__ import main; "
        "sys.exit(main(['serve', 'text-512k', '--model', 'm', '--print']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(main.__file__).parents[1], capture_output=True
    )
    assert done.returncode == 0, done.stderr


class Fp8Utils(types.SimpleNamespace):
    def get_device_name_as_file_name(self):
        return "NVIDIA_H200"


def test_tuned_configurations_are_found_before_vllms(tmp_path, monkeypatch):
    """A user's folder comes first, then vLLM's own lookup; keys are integers."""
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    module = Fp8Utils(get_w8a8_block_fp8_configs=lambda *shape: ("vLLM", shape))
    monkeypatch.setattr(tuned_configs, "_ours", [True])
    tuned_configs.wrap(module)
    (tmp_path / "N=64,K=32,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[32,32].json").write_text(
        '{"triton_version": "3.6.0", "1": {"num_warps": 4}}'
    )
    assert module.get_w8a8_block_fp8_configs(64, 32, 32, 32) == {1: {"num_warps": 4}}
    assert module.get_w8a8_block_fp8_configs(65, 32, 32, 32) == ("vLLM", (65, 32, 32, 32))


def test_tuned_configurations_change_no_other_model(tmp_path, monkeypatch):
    """In a process that serves none of our checkpoints a folder kept for other kernels is not looked at."""
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    monkeypatch.setattr(tuned_configs, "_ours", [])
    module = Fp8Utils(get_w8a8_block_fp8_configs=lambda *shape: ("vLLM", shape))
    tuned_configs.wrap(module)
    (tmp_path / tuned_configs.file_name(64, 32, "NVIDIA_H200", 128)).write_text("{}")
    assert module.get_w8a8_block_fp8_configs(64, 32, 128, 128) == ("vLLM", (64, 32, 128, 128))


def test_where_no_patch_is_applied_the_reason_comes_first(monkeypatch, capsys):
    """One reason for all of them is one line, not a table of ten."""
    monkeypatch.setattr(preflight, "_apply", lambda: "vLLM is not installed. Install it")
    monkeypatch.setattr(plugin, "_applied", {})
    assert main.run_preflight(None, None, as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"none of the {len(preflight.LEDGER)} patches is applied; --json lists them"
    assert lines[1] == "error: plugin: vLLM is not installed. Install it"


def test_without_vllm_the_advice_is_to_install_it(monkeypatch):
    """Serving on an unchecked vLLM is no way out where there is none."""
    monkeypatch.setattr(plugin, "vllm_problems", lambda: ["vLLM is not installed"])
    with pytest.raises(PatchError, match=r"Install vllm==") as refusal:
        plugin.check_vllm(preflight.settings.read({}))
    assert "UNCHECKED" not in str(refusal.value)
