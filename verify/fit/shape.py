"""What a model keeps in its KV cache, layer by layer, read from its config.json.

Four kinds of layer cover the models served today: grouped-query attention (`Gqa`), latent attention (`Mla`), latent
attention with a sparse indexer (`SparseMla`), and linear attention with a recurrent state (`Linear`). Sizes here are
those of the whole model; `layers` cuts them for a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardmill.verify.fit.cache_dtype import AUTO, declared_dtype
from shardmill.verify.fit.families import FAMILIES, WITHOUT_HEAD_DIM, why_unknown, with_defaults

Config = Mapping[str, Any]
LAYERS_MAX = 4096
SIZE_MAX = 1 << 40  # no width, count or length of a model comes near it


class ConfigError(ValueError):
    """config.json does not say what the planner needs. The message names the key and what was expected."""


@dataclass(frozen=True, slots=True)
class Gqa:
    """Keys and values of `kv_heads` heads; with a window only its last tokens stay."""

    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Mla:
    """One latent of `rank` values and a RoPE part of `rope` values per token, the same on every rank."""

    rank: int
    rope: int


@dataclass(frozen=True, slots=True)
class SparseMla:
    """Latent rows and, unless another layer's choice is shared, an index of `index_dim` FP8 values with f32 scales.

    `pool` tokens share one index entry; with a pool above 1 a ring of raw keys holds the open pool of each request.
    `heads` of the whole model, `nope` values of a head without RoPE and `topk` tokens decide which kernel reads it.
    """

    rank: int
    rope: int
    index_dim: int
    pool: int
    has_index: bool = True
    heads: int = 1
    nope: int = 128
    topk: int = 2048


@dataclass(frozen=True, slots=True)
class Linear:
    """A convolution window over `conv_channels` and a recurrent state [value_heads, value_dim, key_dim].

    `state_dtype` is what vLLM makes of `auto`; `bounded_gate`: FlashKDA's kernel takes the layer.
    """

    conv_channels: int
    conv_kernel: int
    value_heads: int
    value_dim: int
    key_dim: int
    kernel: Literal["kda", "delta net"]
    state_dtype: str
    bounded_gate: bool


Layer = Gqa | Mla | SparseMla | Linear


@dataclass(frozen=True, slots=True)
class Shape:
    """The cache-bearing layers of a model in order, its draft layers, and what else the estimate needs.

    cache_dtype: what the checkpoint declares of its cache, for a server whose flags leave it open.
    """

    model_type: str
    layers: tuple[Layer, ...]
    draft_layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    max_position: int
    experts_per_token: int
    moe_inter: int
    residual_streams: int
    cache_dtype: str = AUTO
    heads: int = 0  # of queries, of all ranks together; 0 where config.json does not say
    vision_heads: int = 0

    @property
    def is_hybrid(self) -> bool:
        """Whether recurrent states and attention pages share one pool."""
        return any(isinstance(layer, Linear) for layer in self.layers)

    @property
    def sparse(self) -> SparseMla | None:
        return next((layer for layer in self.layers if isinstance(layer, SparseMla)), None)

    @property
    def has_rungs(self) -> bool:
        """Whether the runtime patch serves this model with narrower rows: it refuses rotary parts."""
        return self.sparse is not None and (self.sparse.rank, self.sparse.rope) == (512, 0)


def read_shape(config: Config) -> Shape:
    """The shape that a config.json declares. Raises ConfigError where a key is missing or of an unknown kind."""
    try:
        return _read_shape(config)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"config.json: a key that lays out the cache has a value of the wrong kind: {error}"
        ) from None


def _read_shape(config: Config) -> Shape:
    config = with_defaults(config)
    text: Config = config.get("text_config") or config
    unknown = why_unknown(config, text)
    if unknown:
        raise ConfigError(f"config.json: {unknown}")
    kinds = layer_kinds(text)
    layers = tuple(_checked(_layer(text, kind, i)) for i, kind in enumerate(kinds))
    if all(isinstance(layer, Linear) for layer in layers):
        raise ConfigError("config.json: no attention layer; models of linear layers alone are not planned")
    drafts = _count(text, "num_nextn_predict_layers")
    full = [_layer(text, kind, 0) for kind in kinds if kind != "linear"]
    return Shape(
        model_type=str(text.get("model_type", config.get("model_type", "unknown"))),
        layers=layers,
        draft_layers=tuple(full[-1:] * drafts),
        hidden=_need(text, "hidden_size"),
        vocab=_need(text, "vocab_size"),
        max_position=_max_position(config, text),
        experts_per_token=_count(text, "num_experts_per_tok"),
        moe_inter=_count(text, "moe_intermediate_size") or _count(text, "intermediate_size"),
        residual_streams=_count(text, "hc_mult", 4) if text.get("mhc") else 1,
        cache_dtype=declared_dtype(config, text, text.get("kv_lora_rank") is not None),
        heads=_count(text, "num_attention_heads"),
        vision_heads=_vision_heads(config),
    )


def _vision_heads(config: Config) -> int:
    """Heads of the vision tower, 0 without one."""
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return 0
    return _count(vision, "num_heads") or _count(vision, "num_attention_heads")


# Kinds of RoPE scaling whose factor does not lengthen max_position_embeddings, which tells the scaled length already.
UNSCALED_ROPE = ("default", "llama3", "longrope", "su", "mrope", "proportional", "yarn", "deepseek_yarn")


def _max_position(config: Config, text: Config) -> int:
    """The longest context that vLLM 0.33.0 serves: max_position_embeddings, times a linear or dynamic factor.

    Gemma 3 tells the scaled length. Source: `config/model.py`, `_get_and_verify_max_len`.
    """
    limit = _count(text, "max_position_embeddings", _count(text, "model_max_length", 1 << 20))
    if "gemma3" in str(config.get("model_type")):
        return limit
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return limit
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor", 1.0)
    if kind in (None, *UNSCALED_ROPE) or not isinstance(factor, int | float) or not 1 <= factor < SIZE_MAX:
        return limit
    return int(limit * factor)


def _count(text: Config, key: str, default: int = 0) -> int:
    """A number that may be missing, null or 0."""
    value = text.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < SIZE_MAX:
        raise ConfigError(f"config.json: {key} must be a whole number, not negative, got {str(value)[:60]!r}")
    return value


Kind = Literal["full", "window", "linear"]
KIND_NAMES: Mapping[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "window",
    "linear_attention": "linear",
}


def layer_kinds(text: Config) -> list[Kind]:
    """The kind of each layer: `layer_types`, else Kimi's 1-based `kda_layers`, else an interval, else all full."""
    count = _need(text, "num_hidden_layers")
    if count + _count(text, "num_nextn_predict_layers") > LAYERS_MAX:
        raise ConfigError(f"config.json: {count:,} layers; at most {LAYERS_MAX:,} are read")
    names = text.get("layer_types")
    if names:
        unknown = sorted(set(names) - set(KIND_NAMES))
        if unknown:
            raise ConfigError(
                f"config.json: layer_types holds {unknown[0]!r}; known are {', '.join(KIND_NAMES)}"
            )
        if len(names) != count:
            raise ConfigError(
                f"config.json: layer_types names {len(names)} layers, num_hidden_layers says {count}"
            )
        return [KIND_NAMES[name] for name in names]
    linear = text.get("linear_attn_config") or {}
    if "kda_layers" in linear:
        return ["linear" if i + 1 in linear["kda_layers"] else "full" for i in range(count)]
    interval = text.get("full_attention_interval")
    if interval:
        return ["full" if (i + 1) % interval == 0 else "linear" for i in range(count)]
    return _windowed(text, count)


def _windowed(text: Config, count: int) -> list[Kind]:
    """The layers of a config that names no layer_types, by its family's habit."""
    habit = FAMILIES.get(str(text.get("model_type")), FAMILIES["llama"])
    every = _count(text, habit.pattern_key, habit.every) if habit.pattern_key else habit.every
    window = text.get("sliding_window", habit.window)
    if every == 1 or window is None:
        return ["full"] * count
    return ["full" if every and (i + 1) % every == 0 else "window" for i in range(count)]


def _layer(text: Config, kind: Kind, index: int) -> Layer:
    if kind == "linear":
        return _linear(text)
    if text.get("kv_lora_rank") is not None:
        return _latent(text, index)
    heads = _need(text, "num_attention_heads")
    said = 0 if text.get("model_type") in WITHOUT_HEAD_DIM else _count(text, "head_dim")
    head_dim = said or _need(text, "hidden_size") // heads
    window = _window(text) if kind == "window" else None
    return Gqa(_count(text, "num_key_value_heads") or heads, head_dim, window)


def _window(text: Config) -> int:
    habit = FAMILIES.get(str(text.get("model_type")), FAMILIES["llama"])
    if text.get("sliding_window") is None and habit.window is not None:
        return habit.window
    return _need(text, "sliding_window")


MAY_BE_ZERO = ("rope",)


def _checked(layer: Layer) -> Layer:
    """The layer, its sizes found to be those of a model. Raises ConfigError."""
    for name, value in asdict(layer).items():
        if value is None or isinstance(value, bool | str):
            continue
        if not (0 if name in MAY_BE_ZERO else 1) <= value < SIZE_MAX:
            raise ConfigError(
                f"config.json: {name.replace('_', ' ')} of {type(layer).__name__} layers is {value}"
            )
    return layer


def _latent(text: Config, index: int) -> Mla | SparseMla:
    rank, rope = _need(text, "kv_lora_rank"), _count(text, "qk_rope_head_dim")
    if not text.get("index_topk"):
        return Mla(rank, rope)
    pool = int(text.get("index_kpool", 1) or 1)
    return SparseMla(
        rank,
        rope,
        _need(text, "index_head_dim"),
        pool,
        _has_index(text, index),
        _count(text, "num_attention_heads", 64),
        _count(text, "qk_nope_head_dim", 128),
        _need(text, "index_topk"),
    )


def _has_index(text: Config, index: int) -> bool:
    """Whether a layer chooses its own tokens rather than those of the layer before (vLLM's deepseek_v32 rule)."""
    pattern = text.get("index_topk_pattern")
    if pattern is not None:
        return bool(pattern[index] != "S")
    offset = int(text.get("index_skip_topk_offset", 2))
    return max(index - offset + 1, 0) % int(text.get("index_topk_freq", 1) or 1) == 0


def _linear(text: Config) -> Linear:
    kda = text.get("linear_attn_config")
    if kda:
        heads, dim = int(kda["num_heads"]), int(kda["head_dim"])
        kernel = int(kda.get("short_conv_kernel_size", 4))
        bounded = kda.get("gate_lower_bound") is not None or str(text.get("model_type")).startswith(
            "glm5_next"
        )
        return Linear(3 * heads * dim, kernel, heads, dim, dim, "kda", "float32", bounded)
    keys, key_dim = _need(text, "linear_num_key_heads"), _need(text, "linear_key_head_dim")
    values, value_dim = _need(text, "linear_num_value_heads"), _need(text, "linear_value_head_dim")
    channels, kernel = 2 * keys * key_dim + values * value_dim, _count(text, "linear_conv_kernel_dim", 4)
    return Linear(channels, kernel, values, value_dim, key_dim, "delta net", "bfloat16", False)


def _need(text: Config, key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < SIZE_MAX:
        raise ConfigError(f"config.json: {key} must be a positive integer, got {str(value)[:60]!r}")
    return value
