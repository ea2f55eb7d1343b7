"""vLLM's MIXED_PRECISION config under its own name, until a checkpoint shows that it is ours.

`register_quantization_config` wants a class at once, and ours needs vLLM's modelopt module, which an ordinary model
never imports. The class below stands for it: it answers every question with vLLM's own class, and makes ours only
for a config with FP8_BLOCK entries. Any other MIXED_PRECISION checkpoint gets an object of vLLM's class itself.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from shardmill.runtime_patch.entries import BLOCK_FP8

NAME = "modelopt_mixed"
MODELOPT = "vllm.model_executor.layers.quantization.modelopt"


def put_in_place() -> None:
    """Registers the class below once; vLLM overwrites a name without complaint."""
    register_quantization_config(NAME)(MixedPrecision)
    if MODELOPT in sys.modules:
        stock()


def stock() -> type:
    """vLLM's class. It also learns that ours is one of its family, which it asks before it passes arguments on."""
    module = import_module(MODELOPT)
    module.ModelOptQuantConfigBase.register(MixedPrecision)
    return module.ModelOptMixedPrecisionConfig


def has_blocks(config: Mapping[str, Any]) -> bool:
    """Whether a quantization config, in either of ModelOpt's two shapes, has FP8_BLOCK entries."""
    inner = config.get("quantization")
    layers = (inner if isinstance(inner, Mapping) else config).get("quantized_layers") or {}
    return any(str(fields.get("quant_algo", "")).upper() == BLOCK_FP8 for fields in layers.values())


class _AnswersAsStock(ABCMeta):
    """Class attributes that vLLM may ask for beyond the interface are the stock class's."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):  # Python's own questions, and those of abc
            raise AttributeError(name)
        return getattr(stock(), name)


class MixedPrecision(QuantizationConfig, metaclass=_AnswersAsStock):
    """Never instantiated: `from_config` makes vLLM's object, or ours."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """Raises PatchError where the checkpoint is ours and this vLLM is not the one that was tried."""
        if not has_blocks(config):
            return stock().from_config(config)  # type: ignore[attr-defined]
        from shardmill.runtime_patch import plugin

        plugin.activate()
        from shardmill.runtime_patch.quant_config import MixedPrecisionConfig

        return MixedPrecisionConfig.from_config(config)

    @classmethod
    def override_quantization_method(cls, *args: Any, **kwargs: Any) -> Any:
        return stock().override_quantization_method(*args, **kwargs)  # type: ignore[attr-defined]

    @classmethod
    def get_min_capability(cls) -> int:
        return stock().get_min_capability()  # type: ignore[attr-defined]

    @staticmethod
    def get_config_filenames() -> list[str]:
        return stock().get_config_filenames()  # type: ignore[attr-defined]
