"""Clean checkpoints of every tool and form, after published ones: names, dtypes, shapes and configs are theirs.

Small in all sizes. `parent` makes the BF16 floats that each was quantized from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.verify.zoo import encoders as e
from tests.verify.zoo.model import Blob, Model

HIDDEN, WIDE, VOCAB, LAYERS, EXPERTS, HEADS, KV = 128, 256, 256, 3, 2, 4, 2
OTHERS = {
    "tokenizer.json": b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
    "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}',
    "generation_config.json": b'{"eos_token_id": 2}',
}
Encode = Callable[[str, Any], dict[str, Blob]]


def weights(moe: bool) -> Iterator[tuple[str, tuple[int, int]]]:
    """The Linears of a decoder: module -> rows, columns."""
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        head = HIDDEN // HEADS
        for name, rows in (("q", HIDDEN), ("k", KV * head), ("v", KV * head), ("o", HIDDEN)):
            yield f"{prefix}self_attn.{name}_proj", (rows, HIDDEN)
        for bank in [f"{prefix}mlp.experts.{x}." for x in range(EXPERTS)] if moe else [f"{prefix}mlp."]:
            yield f"{bank}gate_proj", (WIDE, HIDDEN)
            yield f"{bank}up_proj", (WIDE, HIDDEN)
            yield f"{bank}down_proj", (HIDDEN, WIDE)


def around(moe: bool) -> dict[str, Blob]:
    """What no tool quantizes."""
    made = {"model.embed_tokens.weight": e.blob("BF16", e.matrix("embed", VOCAB, HIDDEN))}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}{norm}.weight"] = e.blob("BF16", 1 + e.matrix(f"{prefix}{norm}", 1, HIDDEN)[0])
        if moe:
            made[f"{prefix}mlp.gate.weight"] = e.blob("BF16", e.matrix(f"{prefix}gate", EXPERTS, HIDDEN))
    made["model.norm.weight"] = e.blob("BF16", 1 + e.matrix("norm", 1, HIDDEN)[0])
    made["lm_head.weight"] = e.blob("BF16", e.matrix("head", VOCAB, HIDDEN))
    return made


def config(moe: bool, quantization: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    value: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "LlamaForCausalLM"],
        "model_type": "qwen3_moe" if moe else "llama", "hidden_size": HIDDEN, "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV,
              "head_dim": HIDDEN // HEADS,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "vocab_size": VOCAB, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 2,
    }  # fmt: skip
    if moe:
        value |= {"num_experts": EXPERTS, "num_experts_per_tok": 1, "moe_intermediate_size": WIDE}
    return value | ({"quantization_config": dict(quantization)} if quantization else {}) | more


def parent(moe: bool) -> Model:
    made = around(moe)
    for name, shape in weights(moe):
        made[f"{name}.weight"] = e.blob("BF16", e.matrix(name, *shape))
    return Model({"model.safetensors": made}, config(moe, None), dict(OTHERS), indexed=False)


@dataclass(frozen=True)
class Published:
    """One clean checkpoint."""

    name: str
    after: str  # the repository or tool that writes such
    encode: Encode
    quantization: Mapping[str, Any] | None
    moe: bool = False
    only: str = ""  # modules that are quantized, by a part of their names; "" = all
    more: Mapping[str, Any] | None = None  # of the config
    change: Callable[[Model], None] | None = None

    def model(self) -> Model:
        made = around(self.moe)
        for name, shape in weights(self.moe):
            encode = self.encode if self.only in name else e.plain()
            made |= encode(name, e.matrix(name, *shape))
        model = Model(
            {"model.safetensors": made},
            config(self.moe, self.quantization, **(self.more or {})),
            dict(OTHERS),
            indexed=False,
        )
        if self.change is not None:
            self.change(model)
        return model


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8_128 = {**FP8, "weight_block_size": [128, 128]}


def ct(form: str, weights: Mapping[str, Any], inputs: Any = None, **more: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": inputs,
    }
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
              "ignore": ["lm_head"],
        "config_groups": {"group_0": {**group, "format": form}}, "kv_cache_scheme": None, **more,
    }  # fmt: skip


def floats(width: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": width, "type": "float", "strategy": strategy, **more}


def ints(width: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": width, "type": "int", "strategy": strategy, **more}


TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def modelopt(algo: str, *ignore: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head", *ignore], **more}


def _cache_scales(place: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for layer in range(LAYERS):
            for kv in "kv":
                name = f"model.layers.{layer}.self_attn.{place.format(kv=kv)}{kv}_scale"
                model.shards["model.safetensors"][name] = e.blob("F32", np.array([0.02 + 0.001 * layer]))

    return change


def _tied(model: Model) -> None:
    model.drop("lm_head.weight")
    assert model.config is not None
    model.config["tie_word_embeddings"] = True


def _legacy(model: Model) -> None:
    """The declaration in hf_quant_config.json alone."""
    assert model.config is not None
    said = model.config.pop("quantization_config")
    import json

    algo = {
        "quant_algo": said["quant_algo"],
        "exclude_modules": said["ignore"],
        "group_size": said.get("group_size"),
    }
    model.others["hf_quant_config.json"] = json.dumps(
        {"producer": {"name": "modelopt"}, "quantization": algo}
    ).encode()


def _zero_norms(model: Model) -> None:
    for name in model.names:
        if "norm" in name:
            blob = model[name]
            blob.data = bytes(len(blob.data))


def _odd_dtypes(model: Model) -> None:
    model.shards["model.safetensors"] |= {
        "model.buffer.mask": e.blob("F32", np.full((4, 4), -np.inf)),
        "model.buffer.table": Blob("F64", (4,), np.arange(4.0).tobytes()),
        "model.buffer.ids": e.blob("I64", np.arange(6)),
        "model.buffer.flags": Blob("BOOL", (3,), b"\1\0\1"),
        "model.buffer.empty": Blob("F32", (0, 4), b""),
        "logit_scale": e.blob("F32", np.array(4.6)),
    }


def _padded(model: Model) -> None:
    """A padding row in the vocabulary, and rows beyond it."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        blob = model[name]
        row = 2 * HIDDEN
        blob.data = bytes(row) + blob.data[row : len(blob.data) - 10 * row] + bytes(10 * row)


def _deepseek_v4(model: Model) -> None:
    """Attention in block FP8 with `.scale`, experts in FP4 as I8."""
    assert model.config is not None
    model.config |= {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}
    shard = model.shards["model.safetensors"]
    encode = e.mxfp4("weight", "I8", "scale", "F8_E8M0")
    for name, shape in weights(True):
        if "experts" in name:
            del shard[f"{name}.weight"], shard[f"{name}.scale"]
            shard |= encode(name, e.matrix(name, *shape))


def _folded(model: Model) -> None:
    """AWQ as AutoAWQ leaves it: factors of inputs, which norms and the rows of `up` and `v` lost."""
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        _fold_norm(model, prefix, "input_layernorm", [f"self_attn.{x}_proj" for x in "qkv"])
        _fold_norm(model, prefix, "post_attention_layernorm", ["mlp.gate_proj", "mlp.up_proj"])
        given = _factors(f"{prefix}down", WIDE)
        _write(model, f"{prefix}mlp.down_proj", lambda w, c=given: w * c)
        norm = _factors(f"{prefix}post_attention_layernorm", HIDDEN)
        _write(model, f"{prefix}mlp.up_proj", lambda w, c=norm, r=given: w * c / r[:, None])


def _factors(name: str, count: int) -> e.Array:
    """About 1/4 to 4, with as much above one as below."""
    return np.exp2(e.bits(f"{name}.fold", count).astype("<f4") / 64 - 2).astype("<f4")


def _write(model: Model, module: str, change: Callable[[e.Array], e.Array]) -> None:
    rows, cols = dict(weights(False))[module]
    for name, blob in e.awq(module, change(e.matrix(module, rows, cols))).items():
        model.find(name)[name] = blob


def _fold_norm(model: Model, prefix: str, norm: str, modules: list[str]) -> None:
    factors = _factors(prefix + norm, HIDDEN)
    blob = model[f"{prefix}{norm}.weight"]
    values = (np.frombuffer(blob.data, "<u2").astype("<u4") << 16).view("<f4")
    blob.data = e.blob("BF16", values / factors).data
    for module in modules:
        _write(model, prefix + module, lambda w: w * factors)


def _gpt_oss(model: Model) -> None:
    assert model.config is not None
    model.config |= {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 2}
    shard = model.shards["model.safetensors"]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp."
        for name in [name for name in shard if name.startswith(prefix)]:
            del shard[name]
        shard[f"{prefix}router.weight"] = e.blob("BF16", e.matrix(f"{prefix}router", 2, HIDDEN))
        for bank, rows in (("gate_up_proj", WIDE), ("down_proj", HIDDEN)):
            shard |= e.gpt_oss(f"{prefix}experts.{bank}", e.matrix(f"{prefix}{bank}", rows, HIDDEN))


OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                         "model.embed_tokens", "lm_head"]}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NV = {"group_size": 16, "config_groups": {"group_0": {"targets": ["Linear"],
                                                      "weights": floats(4, "group", group_size=16),
                                                        "input_activations": floats(4, "group",
              group_size=16)}}}  # fmt: skip
GATES = tuple(f"model.layers.{n}.mlp.gate" for n in range(LAYERS))

PUBLISHED: tuple[Published, ...] = (
    Published("bf16", "Llama", e.plain(), None),
    Published("f16", "Vicuna", e.plain("F16"), None, more={"torch_dtype": "float16"}),
    Published("f32", "BERT's kind", e.plain("F32"), None, more={"torch_dtype": "float32"}),
    Published("bf16 moe", "Qwen3-MoE", e.plain(), None, True),
    Published("bf16 tied", "Llama-3.2-1B", e.plain(), None, change=_tied),
    Published("bf16 zero-centred norms", "Gemma", e.plain(), None, change=_zero_norms),
    Published("bf16 padded vocabulary", "OPT, Qwen2", e.plain(), None, change=_padded),
    Published("odd dtypes and a mask of infinities", "GPT-2's buffers, CLIP's logit_scale", e.plain(), None,
              change=_odd_dtypes),
    Published("block fp8", "DeepSeek-V3", e.block_fp8(), FP8_128),
    Published("block fp8 moe", "Qwen3-MoE-FP8", e.block_fp8(), {**FP8_128, "modules_to_not_convert": ["lm_head",
              *GATES]}, True),
    Published("block fp8 bf16 scales", "Qwen3-8B-FP8", e.block_fp8(dtype="BF16"), FP8_128),
    Published("block fp8 f32 powers of two", "DeepSeek-V3.1", e.block_fp8(dtype="F8_E8M0"), {**FP8_128,
              "scale_fmt": "ue8m0"}),
    Published("block fp8 u8 exponents", "vLLM's raw UE8M0", e.block_fp8(dtype="U8"), FP8_128),
    Published("block fp8 of 64", "transformers", e.block_fp8(64), {**FP8, "weight_block_size": [64, 64]}),
    Published("block fp8 .scale", "DeepSeek-V4", e.block_fp8(leaf="scale", dtype="F8_E8M0"), {**FP8_128,
              "scale_fmt": "ue8m0"}, more={"model_type": "deepseek_v4"}),
    Published("block fp8 .scale of 32", "DeepSeek-V4.1", e.block_fp8(32, "scale", "F8_E8M0"),
              {**FP8, "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}, more={"model_type": "deepseek_v4"}),
    Published("deepseek v4", "DeepSeek-V4-Flash", e.block_fp8(leaf="scale", dtype="F8_E8M0"),
              {**FP8_128, "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head", *GATES]}, True,
              change=_deepseek_v4),
    Published("ct block", "llm-compressor FP8_BLOCK", e.block_fp8(leaf="weight_scale", dtype="BF16"),
              ct("float-quantized", floats(8, "block", block_structure=[128, 128]), TOKEN)),
    Published("modelopt pb_wo", "ModelOpt FP8_PB_WO", e.block_of_rank_4, modelopt("FP8_PB_WO")),
    Published("fp8 static", "neuralmagic Llama-3-FP8", e.tensor_fp8(inputs="input_scale"),
              {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}),
    Published("fp8 static [1]", "llm-compressor FP8", e.tensor_fp8(shape=(1,), inputs="input_scale"),
              ct("float-quantized", floats(8, "tensor"), floats(8, "tensor", dynamic=False))),
    Published("fp8 modelopt", "nvidia Llama-3.1-8B-FP8", e.tensor_fp8(inputs="input_scale"), modelopt("FP8")),
    Published("fp8 modelopt legacy", "nvidia, hf_quant_config.json alone", e.tensor_fp8(inputs="input_scale"),
              modelopt("FP8"), change=_legacy),
    Published("fp8 scalar scale_inv", "Ministral-3, Devstral-2",
              e.tensor_fp8("weight_scale_inv", "BF16", inputs="activation_scale"),
              {**FP8, "activation_scheme": "static", "weight_block_size": None, "modules_to_not_convert": ["lm_head"]}),
    Published("fp8 [1, 1] scale_inv", "transformers, weight_block_size None", e.tensor_fp8("weight_scale_inv",
              shape=(1, 1)),
              {**FP8, "weight_block_size": None, "modules_to_not_convert": ["lm_head"]}),
    Published("fp8 channel", "llm-compressor FP8_DYNAMIC", e.channel_fp8("BF16"),
              ct("float-quantized", floats(8, "channel"), TOKEN)),
    Published("fp8 channel tied", "llm-compressor on Llama-3.2-1B", e.channel_fp8("BF16"),
              ct("float-quantized", floats(8, "channel"), TOKEN), change=_tied),
    Published("fp8 channel [R]", "ModelOpt per channel", e.channel_fp8(flat=True),
              modelopt("FP8_PER_CHANNEL_PER_TOKEN")),
    Published("fbgemm", "Llama-3.1-405B-FP8", e.channel_fp8(bound=True),
              {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}),
    Published("quark fp8", "AMD Quark", e.tensor_fp8(inputs="input_scale"),
              {"quant_method": "quark", "exclude": ["lm_head"],
              "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}),
    Published("mxfp8 u8", "ModelOpt MXFP8", e.mxfp8("U8"), modelopt("MXFP8")),
    Published("mxfp8 tied", "ModelOpt MXFP8, tied", e.mxfp8("U8"), modelopt("MXFP8"), change=_tied),
    Published("mxfp8 e8m0", "llm-compressor MXFP8", e.mxfp8("F8_E8M0"),
              ct("mxfp8-quantized", floats(8, "group", group_size=32), TOKEN)),
    Published("mxfp4 packed", "llm-compressor MXFP4", e.mxfp4("weight_packed", "U8", "weight_scale", "U8"),
              ct("mxfp4-pack-quantized", floats(4, "group", group_size=32))),
    Published("mxfp4 quark", "AMD Quark", e.mxfp4("weight", "U8", "weight_scale", "U8"),
              {"quant_method": "quark", "exclude": ["lm_head"], "global_quant_config": {"weight": {"dtype": "fp4"}}}),
    Published("gpt-oss", "gpt-oss-20b", e.plain(), OSS, True, change=_gpt_oss),
    Published("nvfp4", "nvidia NVFP4", e.nvfp4(False, True), modelopt("NVFP4", **NV)),
    Published("nvfp4 moe legacy", "nvidia Qwen3-235B-NVFP4", e.nvfp4(False, True),
              modelopt("NVFP4", "*self_attn*", "*.mlp.gate", group_size=16), True, only="experts", change=_legacy),
    Published("nvfp4 kv", "nvidia NVFP4 with an FP8 cache", e.nvfp4(False, True),
              modelopt("NVFP4", kv_cache_scheme=KV_SCHEME, **NV), change=_cache_scales("{kv}_proj.")),
    Published("ct nvfp4", "llm-compressor NVFP4A16", e.nvfp4(True, False),
              ct("nvfp4-pack-quantized", floats(4, "tensor_group", group_size=16))),
    Published("ct nvfp4 w4a4", "llm-compressor NVFP4", e.nvfp4(True, True),
              ct("nvfp4-pack-quantized", floats(4, "tensor_group", group_size=16),
                 floats(4, "tensor_group", group_size=16, dynamic="local"))),
    Published("int8", "llm-compressor W8A8", e.int8(), ct("int-quantized", ints(8, "channel"), {**TOKEN,
              "type": "int"})),
    Published("int8 tensor", "llm-compressor INT8", e.int8("tensor"), ct("int-quantized", ints(8, "tensor"))),
    Published("int4 of 32", "Kimi-K2-Thinking", e.packed(32), ct("pack-quantized", ints(4, "group", group_size=32))),
    Published("int4 of 128", "llm-compressor W4A16", e.packed(128), ct("pack-quantized", ints(4, "group",
              group_size=128))),
    Published("int4 channel", "llm-compressor W4A16 per channel", e.packed(0), ct("pack-quantized", ints(4,
              "channel"))),
    Published("int8 packed", "llm-compressor W8A16", e.packed(0, 8), ct("pack-quantized", ints(8, "channel"))),
    Published("gptq", "TheBloke's GPTQ", e.gptq(), GPTQ, more={"torch_dtype": "float16"}),
    Published("gptq act order", "GPTQModel", e.gptq(shuffled=True), {**GPTQ, "desc_act": True}),
    Published("gptq 8 bit", "GPTQModel", e.gptq(width=8), {**GPTQ, "bits": 8}),
    Published("gptq negative scales", "AutoRound", e.gptq(negative=True), GPTQ),
    Published("gptq v2", "GPTQModel", e.gptq(less=0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    Published("gptq v2 8 bit act order", "GPTQModel", e.gptq(width=8, shuffled=True, less=0),
              {**GPTQ, "bits": 8, "desc_act": True, "checkpoint_format": "gptq_v2"}),
    Published("gptq without g_idx", "AutoRound", e.gptq(indexed=False), GPTQ),
    Published("awq", "AutoAWQ", e.awq, AWQ),
    Published("awq folded", "AutoAWQ, factors moved into norms and rows", e.awq, AWQ, change=_folded),
    Published("kv alone", "llm-compressor's cache alone", e.plain(),
              {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": ["lm_head"],
               "kv_cache_scheme": KV_SCHEME}, change=_cache_scales("")),
    Published("nf4", "bitsandbytes", e.bnb(), BNB),
    Published("nf4 absmax in f32", "bitsandbytes", e.bnb(nested=False), BNB),
    Published("bnb fp4", "bitsandbytes", e.bnb("fp4"), {**BNB, "bnb_4bit_quant_type": "fp4"}),
    Published("bnb fp4 absmax in f32", "bitsandbytes", e.bnb("fp4", False), {**BNB, "bnb_4bit_quant_type": "fp4"}),
)  # fmt: skip
