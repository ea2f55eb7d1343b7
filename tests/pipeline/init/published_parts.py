"""Parts of published models, by rule: attention, experts, towers, and how publishers quantize them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardmill.pipeline.types import Shape
from tests.pipeline.init.layouts import Tensor

Shapes = Mapping[str, Shape]
Build = Callable[["Size"], Iterator[Tensor]]
ALL = 1 << 20


@dataclass(frozen=True)
class Size:
    """How much of a model is laid out: names repeat, so a test takes few layers and experts."""

    layers: int = ALL
    experts: int = ALL


@dataclass(frozen=True)
class Layout:
    """A published checkpoint. aim: what init is asked for; left: what an expert would convert beside, if anything."""

    name: str
    config: dict[str, Any]
    build: Build
    aim: str = "fp8"
    left: str = ""
    quantization: dict[str, Any] = field(default_factory=dict)


def weights(prefix: str, shapes: Shapes) -> Iterator[Tensor]:
    """`.weight` of each name; one that ends in a bang is a parameter of its own."""
    for name, shape in shapes.items():
        yield f"{prefix}{name[:-1]}" if name.endswith("!") else f"{prefix}{name}.weight", "BF16", shape


def qkvo(h: int, heads: int, kv: int, d: int, norm: bool = False, gate: int = 1) -> dict[str, Shape]:
    made: dict[str, Shape] = {
        "q_proj": (heads * d * gate, h),
        "k_proj": (kv * d, h),
        "v_proj": (kv * d, h),
        "o_proj": (h, heads * d),
    }
    return made | ({"q_norm": (d,), "k_norm": (d,)} if norm else {})


def under(prefix: str, shapes: Shapes) -> dict[str, Shape]:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def gated(h: int, w: int) -> dict[str, Shape]:
    return {"gate_proj": (w, h), "up_proj": (w, h), "down_proj": (h, w)}


def w123(h: int, w: int) -> dict[str, Shape]:
    return {"w1": (w, h), "w3": (w, h), "w2": (h, w)}


def bank(count: int, shapes: Shapes) -> dict[str, Shape]:
    return {f"experts.{e}.{name}": shape for e in range(count) for name, shape in shapes.items()}


def mla(h: int, heads: int, q: int, kv: int, nope: int, rope: int, v: int) -> dict[str, Shape]:
    return {
        "q_a_proj": (q, h),
        "q_a_layernorm": (q,),
        "q_b_proj": (heads * (nope + rope), q),
        "kv_a_proj_with_mqa": (kv + rope, h),
        "kv_a_layernorm": (kv,),
        "kv_b_proj": (heads * (nope + v), kv),
        "o_proj": (h, heads * v),
    }


NORMS = ("input_layernorm", "post_attention_layernorm")


def decoder(
    h: int,
    layers: int,
    vocab: int,
    layer: Callable[[int, Size], Shapes],
    prefix: str = "model.",
    head: str = "lm_head",
    norms: Iterable[str] = NORMS,
) -> Build:
    """Embeddings, layers of what `layer` gives, a norm and a head ("" where it is tied)."""

    def build(size: Size) -> Iterator[Tensor]:
        yield from weights(prefix, {"embed_tokens": (vocab, h), "norm": (h,)})
        yield from weights("", {head: (vocab, h)} if head else {})
        for number in range(min(layers, size.layers)):
            at = f"{prefix}layers.{number}."
            yield from weights(at, {**dict.fromkeys(norms, (h,)), **layer(number, size)})

    return build


def dense(h: int, heads: int, kv: int, d: int, w: int, norm: bool = False) -> Callable[[int, Size], Shapes]:
    return lambda number, size: under("self_attn", qkvo(h, heads, kv, d, norm)) | under("mlp", gated(h, w))


def moe(
    attention: Shapes,
    h: int,
    w: int,
    count: int,
    first: int = 0,
    dense_w: int = 0,
    shared: int = 0,
    ours: str = "mlp",
) -> Callable[[int, Size], Shapes]:
    """Layers of routed experts behind `first` dense ones."""

    def layer(number: int, size: Size) -> Shapes:
        made = dict(under("self_attn", attention))
        if number < first:
            return made | under(ours, gated(h, dense_w))
        few = min(count, size.experts)
        matrices = w123(h, w) if ours == "block_sparse_moe" else gated(h, w)
        made |= under(ours, {"gate": (count, h), **bank(few, matrices)})
        return made | (under(f"{ours}.shared_experts", gated(h, shared)) if shared else {})

    return layer


def also(first: Build, *more: Build) -> Build:
    return lambda size: (tensor for build in (first, *more) for tensor in build(size))


def fixed(shapes: Shapes, prefix: str = "") -> Build:
    return lambda size: weights(prefix, shapes)


def tower(prefix: str, layers: int, shapes: Shapes) -> Build:
    return lambda size: (
        tensor for n in range(min(layers, size.layers)) for tensor in weights(f"{prefix}.{n}.", shapes)
    )


# How a publisher has quantized what `chosen` says: (name, shape) -> tensors.
def coded(build: Build, form: Callable[[str, Shape], Iterator[Tensor]], kept: Iterable[str] = ()) -> Build:
    skip = ("embed", "lm_head", "norm", ".gate.weight", "visual", "vision", *kept)

    def made(size: Size) -> Iterator[Tensor]:
        for name, dtype, shape in build(size):
            if len(shape) != 2 or any(word in name for word in skip):
                yield name, dtype, shape
            else:
                yield from form(name.removesuffix(".weight"), shape)

    return made


def block_fp8(at: str, shape: Shape) -> Iterator[Tensor]:
    yield f"{at}.weight", "F8_E4M3", shape
    yield f"{at}.weight_scale_inv", "F32", (-(-shape[0] // 128), -(-shape[1] // 128))


def channel_fp8(at: str, shape: Shape) -> Iterator[Tensor]:
    yield f"{at}.weight", "F8_E4M3", shape
    yield f"{at}.weight_scale", "BF16", (shape[0], 1)


def tensor_fp8(at: str, shape: Shape) -> Iterator[Tensor]:
    yield f"{at}.weight", "F8_E4M3", shape
    yield f"{at}.weight_scale", "F32", ()
    yield f"{at}.input_scale", "F32", ()


def nvfp4(at: str, shape: Shape) -> Iterator[Tensor]:
    yield f"{at}.weight", "U8", (shape[0], shape[1] // 2)
    yield f"{at}.weight_scale", "F8_E4M3", (shape[0], shape[1] // 16)
    yield f"{at}.weight_scale_2", "F32", ()
    yield f"{at}.input_scale", "F32", ()


def int4_pack(at: str, shape: Shape) -> Iterator[Tensor]:
    yield f"{at}.weight_packed", "I32", (shape[0], shape[1] // 8)
    yield f"{at}.weight_scale", "BF16", (shape[0], shape[1] // 32)
    yield f"{at}.weight_shape", "I64", (2,)


def awq(at: str, shape: Shape) -> Iterator[Tensor]:
    R, C = shape
    yield f"{at}.qweight", "I32", (C, R // 8)
    yield f"{at}.scales", "F16", (C // 128, R)
    yield f"{at}.qzeros", "I32", (C // 128, R // 8)


def gptq_8bit(at: str, shape: Shape) -> Iterator[Tensor]:
    R, C = shape
    yield f"{at}.qweight", "I32", (C // 4, R)
    yield f"{at}.scales", "F16", (C // 128, R)
    yield f"{at}.qzeros", "I32", (C // 128, R // 4)
    yield f"{at}.g_idx", "I32", (C,)


def int8(at: str, shape: Shape) -> Iterator[Tensor]:
    yield f"{at}.weight", "I8", shape
    yield f"{at}.weight_scale", "F32", (shape[0], 1)


SIGLIP = under("self_attn", dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), (1152, 1152))) | {
    "mlp.fc1": (4304, 1152),
    "mlp.fc2": (1152, 4304),
    "layer_norm1": (1152,),
}
QWEN_VISION = {
    "attn.qkv": (3456, 1152),
    "attn.proj": (1152, 1152),
    "mlp.linear_fc1": (4304, 1152),
    "mlp.linear_fc2": (1152, 4304),
    "norm1": (1152,),
}


def linear_attention(h: int, keys: int, values: int, fused: bool) -> dict[str, Shape]:
    """Of Qwen3-Next (fused) and Qwen3.5: heads of 128."""
    k, v = 128 * keys, 128 * values
    parts: dict[str, Shape] = (
        {"in_proj_qkvz": (2 * k + 2 * v, h), "in_proj_ba": (2 * values, h)}
        if fused
        else {
            "in_proj_qkv": (2 * k + v, h),
            "in_proj_z": (v, h),
            "in_proj_a": (values, h),
            "in_proj_b": (values, h),
        }
    )
    return parts | {"out_proj": (h, v), "conv1d": (2 * k + v, 1, 4), "norm": (128,), "A_log!": (values,)}


def every_fourth(
    h: int, attention: Shapes, linear: Shapes, ffn: Callable[[Size], Shapes]
) -> Callable[[int, Size], Shapes]:
    def layer(number: int, size: Size) -> Shapes:
        own = under("self_attn", attention) if number % 4 == 3 else under("linear_attn", linear)
        return {**own, **ffn(size)}

    return layer


def qwen_moe(h: int, w: int, count: int, shared: int, stacked: bool = False) -> Callable[[Size], Shapes]:
    def ffn(size: Size) -> Shapes:
        few = min(count, size.experts)
        experts: dict[str, Shape] = (
            {"mlp.experts.gate_up_proj!": (few, 2 * w, h), "mlp.experts.down_proj!": (few, h, w)}
            if stacked
            else under("mlp", bank(few, gated(h, w)))
        )
        more = (
            under("mlp.shared_expert", gated(h, shared)) | {"mlp.shared_expert_gate": (1, h)}
            if shared
            else {}
        )
        return {"mlp.gate": (count, h), **experts, **more}

    return ffn


def nemotron(
    pattern: str, h: int, mamba_in: int, mamba: int, heads: int, kv: int, w: int, experts: int = 0
) -> Callable[[int, Size], Shapes]:
    def layer(number: int, size: Size) -> Shapes:
        kind = pattern[number]
        if kind == "M":
            return under(
                "mixer",
                {
                    "in_proj": (mamba_in, h),
                    "out_proj": (h, mamba),
                    "conv1d": (mamba, 1, 4),
                    "A_log!": (64,),
                    "norm": (mamba,),
                },
            )
        if kind == "*":
            return under("mixer", qkvo(h, heads, kv, 128))
        up = {"up_proj": (w, h), "down_proj": (h, w)}
        if kind == "-":
            return under("mixer", up)
        shared = under("mixer.shared_experts", {"up_proj": (2 * w, h), "down_proj": (h, 2 * w)})
        return under("mixer", {"gate": (experts, h), **bank(min(experts, size.experts), up)}) | shared

    return layer


def kin(prefix: str, layers: int, shapes: Shapes, top: Shapes) -> Build:
    """GPT's kin: numbered blocks under `prefix`, and what stands beside them."""
    return also(fixed(top), tower(prefix, layers, shapes))


def neox(h: int, ours: str = "attention", kv: int = 0) -> dict[str, Shape]:
    return {
        f"{ours}.query_key_value": ((h + 2 * kv) if kv else 3 * h, h),
        f"{ours}.dense": (h, h),
        "mlp.dense_h_to_4h": (4 * h, h),
        "mlp.dense_4h_to_h": (h, 4 * h),
        "input_layernorm": (h,),
    }


def longcat(h: int, w: int, expert: int, count: int) -> Callable[[int, Size], Shapes]:
    def layer(number: int, size: Size) -> Shapes:
        two: dict[str, Shape] = {}
        for n in range(2):
            two |= under(f"self_attn.{n}", mla(h, 64, 1536, 512, 128, 64, 128)) | under(
                f"mlps.{n}", gated(h, w)
            )
        return two | under(
            "mlp", {"router.classifier": (768, h), **bank(min(count, size.experts), gated(h, expert))}
        )

    return layer


def deepseek_v4(size: Size) -> Iterator[Tensor]:
    h, w = 4096, 2048
    yield from weights("", {"embed": (129280, h), "head": (129280, h), "norm": (h,)})
    fp8 = under(
        "attn",
        {"wq_a": (1024, h), "wq_b": (32768, 1024), "wkv": (512, h), "wo_a": (8192, 4096), "wo_b": (h, 8192)},
    ) | under("ffn.shared_experts", w123(h, w))
    for n in range(min(43, size.layers)):
        at = f"layers.{n}."
        yield from weights(at, {"attn_norm": (h,), "ffn_norm": (h,), "ffn.gate": (256, h)})
        for name, (r, c) in fp8.items():
            yield f"{at}{name}.weight", "F8_E4M3", (r, c)
            yield f"{at}{name}.scale", "F8_E8M0", (-(-r // 128), -(-c // 128))
        for name, (r, c) in bank(min(256, size.experts), w123(h, w)).items():
            yield f"{at}ffn.{name}.weight", "I8", (r, c // 2)
            yield f"{at}ffn.{name}.scale", "F8_E8M0", (r, c // 32)


def gpt_oss(size: Size) -> Iterator[Tensor]:
    h, few = 2880, min(128, size.experts)
    yield from decoder(h, 36, 201088, lambda n, s: under("self_attn", qkvo(h, 64, 8, 64)))(size)
    for n in range(min(36, size.layers)):
        at = f"model.layers.{n}.mlp."
        yield f"{at}router.weight", "BF16", (128, h)
        for own, rows in (("gate_up_proj", 5760), ("down_proj", h)):
            yield f"{at}experts.{own}_blocks", "U8", (few, rows, 90, 16)
            yield f"{at}experts.{own}_scales", "U8", (few, rows, 90)
            yield f"{at}experts.{own}_bias", "BF16", (few, rows)
