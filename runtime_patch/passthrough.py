"""Three constructors that hide the quantization config from their layers, given it back.

vLLM's GLM-5.3 builds attention and vision as if they were always BF16. Each wrap hands the model's own config
through, and only where that config says that its checkpoint has block-FP8 weights.
"""

from __future__ import annotations

import functools
from typing import Any

from shardmill.runtime_patch.quant_config import serves_blocks


def wrap_mla(cls: type) -> None:
    """Glm5NextMLAAttention: its caller passes quant_config=None. A rung that its backend would ignore is refused."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    from shardmill.runtime_patch.rows import require_compact

    original = cls.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if serves_blocks(vllm_config.quant_config):
            kwargs["quant_config"] = vllm_config.quant_config
        original(self, vllm_config, *args, **kwargs)
        for module in self.modules():
            if isinstance(module, MLAAttention):
                require_compact(module)

    cls.__init__ = init  # type: ignore[misc]


def wrap_kda(cls: type) -> None:
    """Glm5NextLinearAttention: it sets vllm_config.quant_config to None while its base class stores it.

    A property in the class's place of the stored attribute answers with the config as it was before. Setting
    it does nothing for our checkpoints and stores the value for all others.
    """
    original = cls.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(self: Any, config: Any, vllm_config: Any, prefix: str = "") -> None:
        self.__dict__["_kept_quant_config"] = vllm_config.quant_config
        original(self, config, vllm_config, prefix)

    def get(self: Any) -> Any:
        return self.__dict__["_kept_quant_config"]

    def set_(self: Any, value: Any) -> None:
        if not serves_blocks(self.__dict__["_kept_quant_config"]):
            self.__dict__["_kept_quant_config"] = value

    cls.__init__ = init  # type: ignore[misc]
    cls.quant_config = property(get, set_)  # type: ignore[attr-defined]


def wrap_vision(cls: type) -> None:
    """Glm5NextVisionTransformer: its caller passes quant_config=None."""
    from vllm.config import get_current_vllm_config

    original = cls.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        quant_config = get_current_vllm_config().quant_config
        if serves_blocks(quant_config):
            kwargs["quant_config"] = quant_config
        original(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[misc]
