"""When the plugin works and when it stays out: what `register` does in every process, and what makes it do more."""

import importlib
import logging
import pickle
import sys
import types

import pytest

from shardmill.runtime_patch import plugin, settings
from shardmill.runtime_patch.errors import PatchError
from shardmill.runtime_patch.ledger import LEDGER

OURS = {"quantized_layers": {"a": {"quant_algo": "FP8_BLOCK", "group_size": 32}}}
THEIRS = {"quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 16}}}
QUANT = "vllm.model_executor.layers.quantization"


@pytest.fixture
def process(monkeypatch):
    """A fresh process: nothing registered, nothing applied, no variable set; `applied` lists the patches in order."""
    for name in settings.NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugin, "_named", [])
    monkeypatch.setattr(plugin, "_applied", {})
    monkeypatch.setattr(plugin, "other_vllm", lambda: None)
    monkeypatch.setattr(plugin, "vllm_problems", list)
    monkeypatch.setattr(plugin, "_name_config", lambda: None)
    applied = []
    monkeypatch.setattr(
        plugin, "APPLY", {p.name: lambda _, n=p.name: applied.append(n) or "applied" for p in LEDGER}
    )
    return types.SimpleNamespace(applied=applied, patch=monkeypatch)


@pytest.fixture
def naming(process):
    """shardmill.runtime_patch.naming among stand-ins for vLLM's registry and its modelopt module."""
    registered = {}

    class Family:
        relatives = ()

        @classmethod
        def register(cls, relative):
            cls.relatives += (relative,)

    class Stock(Family):
        later = "what vLLM may ask one day"

        @classmethod
        def from_config(cls, config):
            return ("vLLM", config)

        @classmethod
        def override_quantization_method(cls, config, user, hf_config=None):
            return "modelopt_mixed"

        @classmethod
        def get_min_capability(cls):
            return 75

        @staticmethod
        def get_config_filenames():
            return ["hf_quant_config.json"]

    ours = types.SimpleNamespace(from_config=lambda config: ("ours", config))
    modules = {
        "vllm": {},
        QUANT: {"register_quantization_config": lambda name: lambda cls: registered.update({name: cls})},
        f"{QUANT}.base_config": {"QuantizationConfig": object},
        f"{QUANT}.modelopt": {"ModelOptMixedPrecisionConfig": Stock, "ModelOptQuantConfigBase": Family},
        "shardmill.runtime_patch.quant_config": {"MixedPrecisionConfig": ours},
    }
    for name, attributes in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        process.patch.setitem(sys.modules, name, module)
    process.patch.delitem(sys.modules, "shardmill.runtime_patch.naming", raising=False)
    module = importlib.import_module("shardmill.runtime_patch.naming")
    yield types.SimpleNamespace(module=module, registered=registered, family=Family, process=process)
    sys.modules.pop("shardmill.runtime_patch.naming", None)


def test_an_ordinary_process_is_left_alone(process, caplog):
    """Without a variable `register` applies nothing, checks no fingerprint and says nothing."""
    process.patch.setattr(plugin, "vllm_problems", lambda: pytest.fail("read vLLM's source"))
    plugin.register()
    plugin.register()
    assert process.applied == []
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("VLLM_KVQ_TILES", "6666"), ("VLLM_KVQ_INDEXER_MIB", "32"), ("VLLM_KVQ_DECODE_GEMM", "0")],
)
def test_a_variable_applies_the_ledger_at_once(process, name, value):
    """A variable of the plugin is a wish for every model of the process: all patches are applied, once, in order."""
    process.patch.setenv(name, value)
    plugin.register()
    plugin.register()
    assert process.applied == [patch.name for patch in LEDGER]
    assert set(plugin.applied().values()) == {"applied"}


@pytest.mark.parametrize("other", ["version 0.33.1, expected 0.33.0", "platform rocm, expected cuda"])
def test_another_vllm_is_one_line(process, caplog, other):
    """Another version or platform serves other models as before: one line in the log, and nothing is raised."""
    process.patch.setattr(plugin, "other_vllm", lambda: other)
    process.patch.setattr(plugin, "vllm_problems", lambda: [other])
    plugin.register()
    plugin.register()
    (line,) = caplog.messages
    assert line.startswith(f"shardmill stays out: {other}")
    assert process.applied == []


def test_a_patched_vllm_starts_other_models_without_a_word(process, caplog):
    """A changed source file is looked at only where our checkpoint or a layout is asked for."""
    process.patch.setattr(plugin, "vllm_problems", lambda: ["rows: x is gone"])
    plugin.register()
    assert caplog.messages == []


def test_another_vllm_refuses_a_layout(process):
    """A KV layout that cannot be had stops the server with what differs and what to do."""
    process.patch.setattr(
        plugin, "vllm_problems", lambda: ["version 0.34.0, expected 0.33.0", "rows: x is gone"]
    )
    process.patch.setenv("VLLM_KVQ_TILES", "6666")
    with pytest.raises(PatchError, match=r"version 0\.34\.0.*rows: x is gone.*VLLM_KVQ_UNCHECKED=1"):
        plugin.register()
    assert plugin.applied() == {}


def test_another_vllm_ignores_a_lesser_wish(process, caplog):
    """A scratch size left in the environment is no reason to stop another model's server."""
    process.patch.setattr(plugin, "vllm_problems", lambda: ["rows: x is gone"])
    process.patch.setenv("VLLM_KVQ_INDEXER_MIB", "32")
    plugin.register()
    assert "variables are ignored: rows: x is gone" in caplog.text


def test_unchecked_patches_anyway(process, caplog):
    """VLLM_KVQ_UNCHECKED=1 makes the refusal a warning."""
    process.patch.setattr(plugin, "vllm_problems", lambda: ["version 0.34.0, expected 0.33.0"])
    process.patch.setenv("VLLM_KVQ_UNCHECKED", "1")
    plugin.register()
    assert "was not checked: version 0.34.0" in caplog.text
    assert process.applied == [patch.name for patch in LEDGER]


@pytest.mark.parametrize("name", ["VLLM_KVQ_TILE", "VLLM_KVQ_LAYOUT", "VLLM_KVQ_"])
def test_a_misspelt_variable_stops_every_start(process, name):
    """A VLLM_KVQ_ name that the plugin does not read would be ignored silently, so it is an error at start."""
    process.patch.setenv(name, "6666")
    with pytest.raises(PatchError, match=f"{name} unknown; the plugin reads VLLM_KVQ_TILES"):
        plugin.register()


def test_other_checkpoints_get_vllms_own_object(naming):
    """A MIXED_PRECISION config without FP8_BLOCK is made by vLLM's class itself, and nothing is applied."""
    naming.module.put_in_place()
    cls = naming.registered["modelopt_mixed"]
    assert cls.from_config(THEIRS) == ("vLLM", THEIRS)
    assert cls.override_quantization_method({}, None, hf_config=None) == "modelopt_mixed"
    assert (cls.get_min_capability(), cls.get_config_filenames()) == (75, ["hf_quant_config.json"])
    assert cls.later == "what vLLM may ask one day"
    assert (
        cls in naming.family.relatives
    )  # vLLM asks whether it is of the family before it passes arguments on
    assert naming.process.applied == []


@pytest.mark.parametrize("config", [OURS, {"quantization": OURS}])
def test_our_checkpoint_applies_the_ledger(naming, config):
    """A config with FP8_BLOCK entries, in either shape that ModelOpt writes, brings the whole ledger."""
    assert naming.module.MixedPrecision.from_config(config) == ("ours", config)
    assert naming.process.applied == [patch.name for patch in LEDGER]


def test_our_checkpoint_is_refused_on_another_vllm(naming):
    """Where the patches do not fit, our checkpoint is an error and another one is not."""
    naming.process.patch.setattr(plugin, "vllm_problems", lambda: ["version 0.33.1, expected 0.33.0"])
    with pytest.raises(PatchError, match=r"version 0\.33\.1"):
        naming.module.MixedPrecision.from_config(OURS)
    assert naming.module.MixedPrecision.from_config(THEIRS) == ("vLLM", THEIRS)


def test_a_vllm_without_the_hook_is_one_line(process, caplog, monkeypatch):
    """Where vLLM has no such registry any more, other models start and one line says that the plugin stays out."""
    monkeypatch.undo()
    monkeypatch.setattr(plugin, "_named", [])
    monkeypatch.setattr(plugin, "other_vllm", lambda: None)
    monkeypatch.setitem(sys.modules, "shardmill.runtime_patch.naming", None)
    monkeypatch.delattr(importlib.import_module("shardmill.runtime_patch"), "naming", raising=False)
    plugin.register()
    assert "its config has no place here" in caplog.text


def test_the_worker_applies_what_it_receives(monkeypatch, tmp_path):
    """A config that arrives by pickle applies the ledger before the worker builds a layer."""
    pytest.importorskip("torch", reason="needs the extra `torch`")
    applied = []
    monkeypatch.setattr(plugin, "activate", lambda: applied.append(True))
    for name, attributes in {
        "vllm": {},
        "vllm.model_executor.layers.linear": {"LinearBase": object},
        f"{QUANT}.base_config": {"QuantizeMethodBase": object},
        f"{QUANT}.modelopt": {"ModelOptMixedPrecisionConfig": object},
        "vllm.model_executor.layers.vocab_parallel_embedding": {"ParallelLMHead": object},
        "shardmill.runtime_patch.block_linear": {"BlockLinearMethod": object},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "shardmill.runtime_patch.quant_config", raising=False)
    module = importlib.import_module("shardmill.runtime_patch.quant_config")
    config = module.MixedPrecisionConfig()
    config.quantized_layers = OURS["quantized_layers"]
    assert applied == []
    assert pickle.loads(pickle.dumps(config)).quantized_layers == OURS["quantized_layers"]
    assert applied == [True]
    sys.modules.pop("shardmill.runtime_patch.quant_config", None)


def test_the_log_is_vllms(caplog):
    """Lines go to a child of vLLM's logger, which its own settings show."""
    assert plugin.log.name.startswith("vllm.")
    assert plugin.log.getEffectiveLevel() <= logging.WARNING
