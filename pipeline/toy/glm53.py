"""The tensors of GLM-5.3-Flash's checkpoint: every name, dtype, shape and file, computed from its dimensions.

Two checkpoints are described. The *source* is the BF16 release, whose files were cut by one rule: names in
byte order, greedily filled to 5 GiB of data. The *parent* is its NVFP4 form, made shard by shard: each routed
expert's matrix became packed codes and two levels of scales beside it, and all input scales went to a file of
their own. So the source's cut decides the parent's files. `REAL` reproduces the published parent to the byte;
other dimensions give the same structure in other sizes.

Nothing here opens a file. Shapes are [out, in].
Sources: the public headers of zai-org/GLM-5.3-Flash-BF16 and LibertAIDAI/GLM-5.3-Flash-NVFP4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardmill.pipeline.types import Shape, tensor_bytes

Tensor = tuple[str, str, Shape]  # name, dtype, shape: what `container.lay_out` takes
Shapes = Mapping[str, Shape]

GROUP = 16  # NVFP4 elements that share one E4M3 scale
SOURCE_SHARD_BYTES = 5 << 30
INPUT_SCALES_FILE = "model-input-scales.safetensors"
METADATA: Mapping[str, str] = {"format": "pt"}
_TEXT = "model.language_model."
_VISION = "model.visual."

EXPERT = re.compile(r"model\.language_model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight")
# What the base model stores as block FP8 [128,128]; the BF16 of these is a decoded copy, so its values are few.
NATIVE_FP8 = re.compile(
    r"model\.language_model\.layers\.\d+\."
    r"(self_attn\.(q_a_proj|kv_a_proj_with_mqa|q_b_proj)|mlp\.(shared_experts\.)?(gate|up|down)_proj)\.weight"
)


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The model's sizes; the defaults are the real ones. Widths count elements."""

    vocabulary: int = 154_880
    hidden: int = 4096
    layers: int = 45  # of the trunk; the MTP block is layer number `layers`
    dense_layers: int = 3
    dense_width: int = 12_288
    experts: int = 288
    experts_per_token: int = 8
    expert_width: int = 2048
    shared_experts: int = 1
    kda_heads: int = 64
    kda_head: int = 128
    convolution: int = 4
    heads: int = 64
    q_rank: int = 1536
    kv_rank: int = 512
    qk_head: int = 256
    v_head: int = 256
    index_heads: int = 32
    index_head: int = 128
    index_pool: int = 4
    streams: int = 4  # of the hyper-connections
    vision_blocks: int = 24
    vision_hidden: int = 1024
    vision_heads: int = 16
    vision_width: int = 4096
    vision_out: int = 4096
    vision_merger_width: int = 10_240
    vision_patch: int = 14
    vision_frames: int = 2
    vision_merge: int = 2

    @property
    def shared_width(self) -> int:
        return self.expert_width * self.shared_experts

    def attends(self, layer: int) -> bool:
        """Whether `layer` is MLA with an indexer (each fourth, and the MTP block) rather than KDA."""
        return layer % 4 == 3 or layer == self.layers


REAL = Dimensions()


def source_tensors(d: Dimensions) -> Iterator[Tensor]:
    """Every tensor of the BF16 source."""
    yield from _bf16(
        {
            "lm_head.weight": (d.vocabulary, d.hidden),
            f"{_TEXT}embed_tokens.weight": (d.vocabulary, d.hidden),
            f"{_TEXT}norm.weight": (d.hidden,),
        }
    )
    for layer in range(d.layers + 1):
        yield from _layer(d, layer)
    yield from _bf16(_vision(d), _VISION)


def _bf16(shapes: Shapes, prefix: str = "") -> Iterator[Tensor]:
    return ((prefix + name, "BF16", shape) for name, shape in shapes.items())


def _f32(shapes: Shapes, prefix: str) -> Iterator[Tensor]:
    return ((prefix + name, "F32", shape) for name, shape in shapes.items())


def _layer(d: Dimensions, layer: int) -> Iterator[Tensor]:
    prefix, hidden = f"{_TEXT}layers.{layer}.", (d.hidden,)
    yield from _bf16({"input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden}, prefix)
    if layer == d.layers:
        yield from _bf16({"eh_proj.weight": (d.hidden, 2 * d.hidden)}, prefix)
        yield from _bf16(
            {f"{norm}.weight": hidden for norm in ("enorm", "hnorm", "shared_head.norm")}, prefix
        )
    else:
        yield from _hyper_connections(d, prefix)
    if d.attends(layer):
        yield from _bf16(_mla(d), prefix + "self_attn.")
    else:
        yield from _bf16(_kda(d), prefix + "self_attn.")
        yield from _f32(
            {"A_log": (d.kda_heads,), "dt_bias": (d.kda_heads * d.kda_head,)}, prefix + "self_attn."
        )
    if layer < d.dense_layers:
        yield from _bf16(_gated(d.hidden, d.dense_width), prefix + "mlp.")
    else:
        yield from _experts(d, prefix + "mlp.")


def _hyper_connections(d: Dimensions, prefix: str) -> Iterator[Tensor]:
    mixes = (2 + d.streams) * d.streams
    for place in ("attn", "ffn"):
        yield from _bf16({f"hc_{place}_fn": (mixes, d.streams * d.hidden)}, prefix)
        yield from _f32({f"hc_{place}_base": (mixes,), f"hc_{place}_scale": (3,)}, prefix)


def _kda(d: Dimensions) -> Shapes:
    width = d.kda_heads * d.kda_head
    return {
        **{f"{x}_proj.weight": (width, d.hidden) for x in "qkv"},
        **{f"{x}_conv1d.weight": (width, 1, d.convolution) for x in "qkv"},
        **{f"{x}_a_proj.weight": (d.kda_head, d.hidden) for x in "fg"},
        **{f"{x}_b_proj.weight": (width, d.kda_head) for x in "fg"},
        "b_proj.weight": (d.kda_heads, d.hidden),
        "o_proj.weight": (d.hidden, width),
        "o_norm.weight": (d.kda_head,),
    }


def _mla(d: Dimensions) -> Shapes:
    return {
        "q_a_proj.weight": (d.q_rank, d.hidden),
        "q_a_layernorm.weight": (d.q_rank,),
        "q_b_proj.weight": (d.heads * d.qk_head, d.q_rank),
        "kv_a_proj_with_mqa.weight": (d.kv_rank, d.hidden),
        "kv_a_layernorm.weight": (d.kv_rank,),
        "kv_b_proj.weight": (d.heads * (d.qk_head + d.v_head), d.kv_rank),
        "o_proj.weight": (d.hidden, d.heads * d.v_head),
        "indexer.wq_b.weight": (d.index_heads * d.index_head, d.q_rank),
        "indexer.wk.weight": (d.index_head, d.hidden),
        "indexer.weights_proj.weight": (d.index_heads, d.hidden),
        "indexer.k_norm.weight": (d.index_head,),
        "indexer.k_norm.bias": (d.index_head,),
        "indexer.index_kpool_compress_gate": (d.index_head, d.hidden),
        "indexer.index_kpool_compress_ape": (d.index_pool, d.index_head),
    }


def _gated(hidden: int, width: int, ends: str = "weight") -> Shapes:
    """A gated MLP's three matrices."""
    return {
        f"gate_proj.{ends}": (width, hidden),
        f"up_proj.{ends}": (width, hidden),
        f"down_proj.{ends}": (hidden, width),
    }


def _experts(d: Dimensions, prefix: str) -> Iterator[Tensor]:
    yield from _bf16({"gate.weight": (d.experts, d.hidden)}, prefix)
    yield from _f32({"gate.e_score_correction_bias": (d.experts,)}, prefix)
    yield from _bf16(_gated(d.hidden, d.shared_width), prefix + "shared_experts.")
    for expert in range(d.experts):
        yield from _bf16(_gated(d.hidden, d.expert_width), f"{prefix}experts.{expert}.")


def _vision(d: Dimensions) -> Shapes:
    hidden, out = d.vision_hidden, d.vision_out
    shapes: dict[str, Shape] = {
        "patch_embed.proj.weight": (hidden, 3, d.vision_frames, d.vision_patch, d.vision_patch),
        "patch_embed.proj.bias": (hidden,),
        "post_layernorm.weight": (hidden,),
        "downsample.weight": (out, hidden, d.vision_merge, d.vision_merge),
        "downsample.bias": (out,),
        "merger.proj.weight": (out, out),
        "merger.post_projection_norm.weight": (out,),
        "merger.post_projection_norm.bias": (out,),
    }
    shapes |= {f"merger.{name}": shape for name, shape in _gated(out, d.vision_merger_width).items()}
    linears: dict[str, Shape] = {"attn.qkv": (3 * hidden, hidden), "attn.proj": (hidden, hidden)}
    linears |= {f"mlp.{name[:-1]}": shape for name, shape in _gated(hidden, d.vision_width, "").items()}
    for block in range(d.vision_blocks):
        prefix = f"blocks.{block}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in linears.items()}
        shapes |= {f"{prefix}{name}.bias": shape[:1] for name, shape in linears.items()}
        shapes |= {f"{prefix}attn.{x}_norm.weight": (hidden // d.vision_heads,) for x in "qk"}
        shapes |= {f"{prefix}norm{n}.weight": (hidden,) for n in (1, 2)}
    return shapes


def parent_form(tensor: Tensor) -> list[Tensor]:
    """What the parent holds in place of the source's `tensor`, in the same file."""
    name, _, shape = tensor
    if not EXPERT.fullmatch(name):
        return [tensor]
    out, width = shape
    return [
        (name, "U8", (out, width // 2)),
        (f"{name}_scale", "F8_E4M3", (out, width // GROUP)),
        (f"{name}_scale_2", "F32", ()),
    ]


def source_bytes(tensor: Tensor) -> int:
    return tensor_bytes(tensor[1], tensor[2])


def parent_bytes(tensor: Tensor) -> int:
    return sum(map(source_bytes, parent_form(tensor)))


Cut = Sequence[Sequence[str]]  # for each shard, the source's names in it


def cut(d: Dimensions, shard_bytes: int, measure: Callable[[Tensor], int] = source_bytes) -> Cut:
    """The names of each shard: in byte order, a shard closed before it would pass `shard_bytes` of `measure`."""
    shards: list[list[str]] = []
    room = -1
    for tensor in sorted(source_tensors(d)):
        size = measure(tensor)
        if size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor[0])
        room -= size
    return shards


def parent_files(d: Dimensions, shards: Cut) -> dict[str, list[Tensor]]:
    """File name -> the tensors of the parent in it, for the cut `shards`; the input scales come last."""
    source = {tensor[0]: tensor for tensor in source_tensors(d)}
    files = {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": _in_parent(source[name] for name in names)
        for number, names in enumerate(shards, 1)
    }
    experts = (name.removesuffix(".weight") for name in source if EXPERT.fullmatch(name))
    files[INPUT_SCALES_FILE] = [(f"{module}.input_scale", "F32", ()) for module in experts]
    return files


def _in_parent(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [form for tensor in tensors for form in parent_form(tensor)]
