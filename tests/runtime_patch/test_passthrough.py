"""The three constructors that hide the quantization config, on stand-ins of the classes that do it."""

import importlib
import sys
import types

import pytest

pytest.importorskip("torch")


@pytest.fixture
def passthrough(monkeypatch):
    """shardmill.runtime_patch.passthrough where "ours" is the one config with block-FP8 weights."""
    quant = types.ModuleType("shardmill.runtime_patch.quant_config")
    quant.serves_blocks = lambda config: config == "ours"
    attention = types.ModuleType("vllm.model_executor.layers.attention.mla_attention")
    attention.MLAAttention = Inner
    config = types.ModuleType("vllm.config")
    config.get_current_vllm_config = lambda: Config.current
    for module in (types.ModuleType("vllm"), quant, attention, config):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "shardmill.runtime_patch.passthrough", raising=False)
    yield importlib.import_module("shardmill.runtime_patch.passthrough")
    sys.modules.pop("shardmill.runtime_patch.passthrough", None)


class Config:
    current = None

    def __init__(self, quant_config):
        self.quant_config = quant_config
        Config.current = self


class Inner:
    class attn_backend:  # noqa: N801  the attribute's name in vLLM
        @staticmethod
        def get_name():
            return "STOCK"


@pytest.mark.parametrize(("config", "expected"), [("ours", "ours"), ("nvfp4", None), (None, None)])
def test_mla_gets_our_config_alone(passthrough, config, expected):
    """MLA layers see the config of our checkpoints, and None as before for all others."""

    class Mla:
        def __init__(self, vllm_config, *, quant_config=None):
            self.seen = quant_config

        def modules(self):
            return [Inner()]

    passthrough.wrap_mla(Mla)
    assert Mla(vllm_config=Config(config), quant_config=None).seen == expected


def test_mla_refuses_a_backend_without_rows(passthrough, monkeypatch):
    """With a rung set, a layer whose backend stores vLLM's own rows is not built."""
    from shardmill.runtime_patch.errors import PatchError

    class Mla:
        def __init__(self, vllm_config, *, quant_config=None):
            pass

        def modules(self):
            return [Inner()]

    passthrough.wrap_mla(Mla)
    monkeypatch.setenv("VLLM_KVQ_TILES", "8666")
    with pytest.raises(PatchError, match="STOCK"):
        Mla(Config("ours"))


@pytest.mark.parametrize(("config", "expected"), [("ours", "ours"), ("nvfp4", None), (None, None)])
def test_kda_keeps_our_config_through_the_window(passthrough, config, expected):
    """KDA hides the config while its base stores it, and restores it; ours is seen all the while."""

    class Base:
        def __init__(self, vllm_config):
            self.quant_config = vllm_config.quant_config

    class Kda(Base):
        def __init__(self, config, vllm_config, prefix=""):
            saved = vllm_config.quant_config
            try:
                vllm_config.quant_config = None
                super().__init__(vllm_config)
            finally:
                vllm_config.quant_config = saved
            self.built_with = self.quant_config

    passthrough.wrap_kda(Kda)
    given = Config(config)
    layer = Kda("text", given, prefix="model.layers.0")
    assert layer.built_with == layer.quant_config == expected
    assert given.quant_config == config


@pytest.mark.parametrize(("config", "expected"), [("ours", "ours"), ("nvfp4", None)])
def test_vision_gets_our_config_alone(passthrough, config, expected):
    """The vision tower sees the current model's config where it is one of ours."""

    class Tower:
        def __init__(self, text, vision, *, quant_config=None):
            self.seen = quant_config

    passthrough.wrap_vision(Tower)
    Config(config)
    assert Tower(1, 2, quant_config=None).seen == expected
