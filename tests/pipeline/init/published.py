"""Forty published layouts at their true size: names, dtypes and shapes by rule from public configs.

`python -m tests.pipeline.init.published` prints what `init` makes of each. Dimensions of those marked (a) are from the
config.json files that github.com/ai-dynamo/aiconfigurator keeps (commit 095f58a), the others from the models' own cards
and from the defaults of transformers' classes. A name's rule is that of the model's published index file.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from shardmill.pipeline.init.draft import RecipeDraft, default_profile, draft
from tests.pipeline.init.layouts import parent_of
from tests.pipeline.init.published_parts import (
    QWEN_VISION,
    SIGLIP,
    Layout,
    Shapes,
    Size,
    also,
    awq,
    bank,
    block_fp8,
    channel_fp8,
    coded,
    decoder,
    deepseek_v4,
    dense,
    every_fourth,
    gated,
    gpt_oss,
    gptq_8bit,
    int4_pack,
    kin,
    linear_attention,
    longcat,
    mla,
    moe,
    nemotron,
    neox,
    nvfp4,
    qkvo,
    qwen_moe,
    tensor_fp8,
    tower,
    under,
)


def config(model_type: str, layers: int, heads: int = 0, kv: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads or None,
        "num_key_value_heads": kv or None,
        **more,
    }


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
CT = {"quant_method": "compressed-tensors"}
_LLAMA_70B = decoder(8192, 80, 128256, dense(8192, 64, 8, 128, 28672))
_QWEN3_32B = decoder(5120, 64, 151936, dense(5120, 64, 8, 128, 25600, norm=True))
_QWEN3_235B = decoder(4096, 94, 151936, moe(qkvo(4096, 64, 4, 128, norm=True), 4096, 1536, 128))
_V3_MLA = mla(7168, 128, 1536, 512, 128, 64, 128)
_V3 = decoder(7168, 61, 129280, moe(_V3_MLA, 7168, 2048, 256, 3, 18432, 2048))
_DSA = {"indexer.wq_b": (4096, 2048), "indexer.wk": (128, 6144), "indexer.weights_proj": (32, 6144)}
_K2 = decoder(
    7168,
    61,
    163840,
    moe(mla(7168, 64, 1536, 512, 128, 64, 128), 7168, 2048, 384, 1, 18432, 2048),
    "language_model.model.",
    "language_model.lm_head",
)
_M2 = decoder(3072, 62, 200064, moe(qkvo(3072, 48, 8, 128), 3072, 1536, 256, ours="block_sparse_moe"))
_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_H56 = "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"
_VL = {"text_config": {"num_hidden_layers": 36}}


def _gemma4(number: int, size: Size) -> Shapes:
    few = min(128, size.experts)
    return {
        **under("self_attn", qkvo(2816, 16, 8, 256)),
        **under("mlp", gated(2816, 2112)),
        "router.proj": (128, 2816),
        "experts.gate_up_proj!": (few, 1408, 2816),
        "experts.down_proj!": (few, 2816, 704),
    }


def _scout(number: int, size: Size) -> Shapes:
    few = min(16, size.experts)
    return {
        **under("self_attn", qkvo(5120, 40, 8, 128)),
        "feed_forward.router": (16, 5120),
        **under("feed_forward.shared_expert", gated(5120, 8192)),
        "feed_forward.experts.gate_up_proj!": (few, 5120, 16384),
        "feed_forward.experts.down_proj!": (few, 8192, 5120),
    }


def _step(number: int, size: Size) -> Shapes:
    few = min(288, size.experts)
    own = under("self_attn", qkvo(4096, 64, 8, 128, norm=True))
    if number < 3:
        return own | under("mlp", gated(4096, 11264))
    return {
        **own,
        "moe.gate": (288, 4096),
        "moe.up_proj": (few, 1280, 4096),
        "moe.gate_proj": (few, 1280, 4096),
        "moe.down_proj": (few, 4096, 1280),
        **under("share_expert", gated(4096, 1280)),
    }


LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "Llama-3.1-405B (a)",
        config("llama", 126, 128, 8),
        decoder(16384, 126, 128256, dense(16384, 128, 8, 128, 53248)),
    ),
    Layout(
        "Mistral-Large-2411",
        config("mistral", 88, 96, 8),
        decoder(12288, 88, 32768, dense(12288, 96, 8, 128, 28672)),
    ),
    Layout(
        "Phi-3-medium",
        config("phi3", 40, 40, 10),
        decoder(
            5120,
            40,
            32064,
            lambda n, s: {
                "self_attn.qkv_proj": (7680, 5120),
                "self_attn.o_proj": (5120, 5120),
                "mlp.gate_up_proj": (35840, 5120),
                "mlp.down_proj": (5120, 17920),
            },
        ),
    ),
    Layout(
        "Gemma-2-27B",
        config("gemma2", 46, 32, 16, tie_word_embeddings=True),
        decoder(4608, 46, 256000, dense(4608, 32, 16, 128, 36864), head=""),
    ),
    Layout(
        "MedGemma-27B",
        config("gemma3", 62, 32, 16),
        also(
            decoder(
                5376, 62, 262208, dense(5376, 32, 16, 128, 21504, norm=True), "language_model.model.", ""
            ),
            tower("vision_tower.vision_model.encoder.layers", 27, SIGLIP),
        ),
    ),
    Layout(
        "olmOCR (Qwen2-VL-7B)",
        config("qwen2_vl", 28, 28, 4),
        also(
            decoder(3584, 28, 152064, dense(3584, 28, 4, 128, 18944)),
            tower(
                "visual.blocks",
                32,
                {
                    "attn.qkv": (3840, 1280),
                    "attn.proj": (1280, 1280),
                    "mlp.fc1": (5120, 1280),
                    "mlp.fc2": (1280, 5120),
                },
            ),
        ),
    ),
    Layout(
        "Qwen3-VL-8B (a)",
        {"model_type": "qwen3_vl", **_VL},
        also(
            decoder(4096, 36, 151936, dense(4096, 32, 8, 128, 12288, norm=True), "model.language_model."),
            tower("model.visual.blocks", 27, QWEN_VISION),
        ),
    ),
    Layout(
        "Mixtral-8x22B (a)",
        config("mixtral", 56, 48, 8),
        decoder(6144, 56, 32000, moe(qkvo(6144, 48, 8, 128), 6144, 16384, 8, ours="block_sparse_moe")),
    ),
    Layout("Qwen3-235B-A22B (a)", config("qwen3_moe", 94, 64, 4), _QWEN3_235B),
    Layout(
        "GLM-4.6",
        config("glm4_moe", 92, 96, 8),
        decoder(5120, 92, 151552, moe(qkvo(5120, 96, 8, 128, norm=True), 5120, 1536, 160, 3, 12288, 1536)),
    ),
    Layout(
        "GLM-5 (a)",
        config("glm_moe_dsa", 78, 64, 64),
        decoder(
            6144,
            78,
            154880,
            moe({**mla(6144, 64, 2048, 512, 192, 64, 256), **_DSA}, 6144, 2048, 256, 3, 12288, 2048),
        ),
    ),
    Layout(
        "Qwen3-Next-80B",
        config("qwen3_next", 48, 16, 2),
        decoder(
            2048,
            48,
            151936,
            every_fourth(
                2048,
                qkvo(2048, 16, 2, 256, gate=2),
                linear_attention(2048, 16, 32, True),
                qwen_moe(2048, 512, 512, 512),
            ),
        ),
    ),
    Layout(
        "Qwen3.5-27B (a)",
        {"model_type": "qwen3_5", "text_config": config("qwen3_5_text", 64, 24, 4)},
        decoder(
            5120,
            64,
            248320,
            every_fourth(
                5120,
                qkvo(5120, 24, 4, 256, gate=2),
                linear_attention(5120, 16, 48, False),
                lambda s: under("mlp", gated(5120, 17408)),
            ),
            "model.language_model.",
        ),
    ),
    Layout(
        "Qwen3.5-397B (a)",
        {"model_type": "qwen3_5_moe", "text_config": config("qwen3_5_moe_text", 60, 32, 2)},
        decoder(
            4096,
            60,
            248320,
            every_fourth(
                4096,
                qkvo(4096, 32, 2, 256, gate=2),
                linear_attention(4096, 16, 64, False),
                qwen_moe(4096, 1024, 512, 1024, stacked=True),
            ),
            "model.language_model.",
        ),
    ),
    Layout(
        "MiMo-7B (a)",
        config("mimo", 36, 32, 8),
        also(
            decoder(4096, 36, 151680, dense(4096, 32, 8, 128, 11008)),
            tower(
                "model.mtp_layers",
                1,
                {"input_proj": (4096, 8192), **dense(4096, 32, 8, 128, 11008)(0, Size())},
            ),
        ),
    ),
    Layout(
        "Llama-4-Scout (a)",
        {"model_type": "llama4", "text_config": config("llama4_text", 48, 40, 8)},
        decoder(5120, 48, 202048, _scout, "language_model.model.", "language_model.lm_head"),
    ),
    Layout(
        "Qwen3-VL-235B (a)",
        {"model_type": "qwen3_vl_moe", "text_config": config("qwen3_vl_moe_text", 94, 64, 4)},
        also(
            decoder(
                4096,
                94,
                151936,
                lambda n, s: {
                    **under("self_attn", qkvo(4096, 64, 4, 128, norm=True)),
                    "mlp.gate": (128, 4096),
                    "mlp.experts.gate_up_proj!": (min(128, s.experts), 4096, 3072),
                    "mlp.experts.down_proj!": (min(128, s.experts), 1536, 4096),
                },
                "model.language_model.",
            ),
            tower("model.visual.blocks", 27, QWEN_VISION),
        ),
    ),
    Layout(
        "Step-3.7-Flash (a)",
        config("step3p7", 45, 64, 8),
        decoder(4096, 45, 128896, _step),
        left="moe.{gate,up,down}_proj: stacks of three matrices with names of their own, 93 % of the bytes",
    ),
    Layout(
        "Gemma-4-26B-A4B (a)",
        {"model_type": "gemma4", "text_config": config("gemma4_text", 30, 16, 8)},
        decoder(2816, 30, 262144, _gemma4, "model.language_model.", ""),
        left="experts of 704 columns and an MLP of 2,112 end inside a block: FP8 per channel (--to fp8-channel)",
    ),
    Layout(
        "Nemotron-3-Nano-30B (a)",
        config("nemotron_h", 52, 32, 2),
        decoder(
            2688,
            52,
            131072,
            nemotron(_NANO, 2688, 10304, 4096, 32, 2, 1856, 128),
            "backbone.",
            norms=("norm",),
        ),
        left="experts of 1,856 columns end inside a block: FP8 per channel (--to fp8-channel)",
    ),
    Layout(
        "Nemotron-H-56B (a)",
        config("nemotron_h", 118, 64, 8),
        decoder(
            8192, 118, 131072, nemotron(_H56, 8192, 37120, 16384, 64, 8, 32768), "backbone.", norms=("norm",)
        ),
    ),
    Layout(
        "Hunyuan-A13B",
        config("hunyuan_v1_moe", 32, 32, 8),
        decoder(
            4096,
            32,
            128167,
            lambda n, s: {
                **under("self_attn", qkvo(4096, 32, 8, 128)),
                "mlp.gate.wg": (64, 4096),
                **under("mlp", bank(min(64, s.experts), gated(4096, 3072))),
                **under("mlp.shared_mlp", gated(4096, 3072)),
            },
            head="",
        ),
    ),
    Layout(
        "LongCat-Flash",
        config("longcat_flash", 28, 64),
        decoder(6144, 28, 131072, longcat(6144, 12288, 2048, 512)),
    ),
    Layout(
        "Falcon-180B",
        config("falcon", 80, 232, 8),
        kin(
            "transformer.h",
            80,
            neox(14848, "self_attention", 512),
            {
                "transformer.word_embeddings": (65024, 14848),
                "lm_head": (65024, 14848),
                "transformer.ln_f": (14848,),
            },
        ),
    ),
    Layout(
        "BLOOM-176B",
        config("bloom", 70, 112),
        kin("h", 70, neox(14336, "self_attention"), {"word_embeddings": (250880, 14336), "ln_f": (14336,)}),
    ),
    Layout(
        "GPT-NeoX-20B",
        config("gpt_neox", 44, 64),
        kin(
            "gpt_neox.layers",
            44,
            neox(6144),
            {"gpt_neox.embed_in": (50432, 6144), "embed_out": (50432, 6144)},
        ),
    ),
    Layout(
        "GPT-J-6B",
        config("gptj", 28, 16),
        kin(
            "transformer.h",
            28,
            {
                **under("attn", dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), (4096, 4096))),
                "mlp.fc_in": (16384, 4096),
                "mlp.fc_out": (4096, 16384),
            },
            {"transformer.wte": (50400, 4096), "lm_head": (50400, 4096)},
        ),
    ),
    Layout(
        "OPT-66B",
        config("opt", 64, 72),
        kin(
            "model.decoder.layers",
            64,
            {
                **under("self_attn", dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), (9216, 9216))),
                "fc1": (36864, 9216),
                "fc2": (9216, 36864),
            },
            {"model.decoder.embed_tokens": (50272, 9216)},
        ),
    ),
    Layout(
        "MPT-30B",
        config("mpt", 48, 64),
        kin(
            "transformer.blocks",
            48,
            {
                "attn.Wqkv": (21504, 7168),
                "attn.out_proj": (7168, 7168),
                "ffn.up_proj": (28672, 7168),
                "ffn.down_proj": (7168, 28672),
            },
            {"transformer.wte": (50432, 7168)},
        ),
    ),
    Layout(
        "Qwen-72B (the first)",
        config("qwen", 80, 64),
        kin(
            "transformer.h",
            80,
            {
                "attn.c_attn": (24576, 8192),
                "attn.c_proj": (8192, 8192),
                "mlp.w1": (24576, 8192),
                "mlp.w2": (24576, 8192),
                "mlp.c_proj": (8192, 24576),
            },
            {"transformer.wte": (152064, 8192), "lm_head": (152064, 8192)},
        ),
    ),
    Layout(
        "DeepSeek-V3 (a)",
        config("deepseek_v3", 61, 128, 128),
        coded(_V3, block_fp8),
        "bf16",
        quantization=FP8,
    ),
    Layout(
        "Kimi-K2.5 (a)",
        {"model_type": "kimi_k25", "text_config": config("kimi_k2", 61, 64, 64)},
        coded(_K2, int4_pack, ("self_attn", "shared_experts", "layers.0.")),
        "bf16",
        quantization=CT,
    ),
    Layout(
        "MiniMax-M2.5 (a)", config("minimax_m2", 62, 48, 8), coded(_M2, block_fp8), "bf16", quantization=FP8
    ),
    Layout(
        "gpt-oss-120b (a)",
        config("gpt_oss", 36, 64, 8),
        gpt_oss,
        "bf16",
        quantization={"quant_method": "mxfp4"},
    ),
    Layout(
        "DeepSeek-V4-Flash (a)",
        config("deepseek_v4", 43, 64, 1),
        deepseek_v4,
        "bf16",
        quantization={**FP8, "scale_fmt": "ue8m0"},
    ),
    Layout(
        "Qwen3-32B-FP8 per tensor (a)",
        config("qwen3", 64, 64, 8),
        coded(_QWEN3_32B, tensor_fp8),
        "bf16",
        quantization={"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
    Layout(
        "Llama-3.1-70B-FP8-dynamic",
        config("llama", 80, 64, 8),
        coded(_LLAMA_70B, channel_fp8),
        "bf16",
        quantization=CT,
    ),
    Layout(
        "Llama-3.1-70B-AWQ",
        config("llama", 80, 64, 8),
        coded(_LLAMA_70B, awq),
        "bf16",
        quantization={"quant_method": "awq", "bits": 4, "group_size": 128},
    ),
    Layout(
        "Qwen3-235B-NVFP4 (a)",
        config("qwen3_moe", 94, 64, 4),
        coded(_QWEN3_235B, nvfp4),
        "bf16",
        quantization={"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    Layout(
        "Qwen3-32B-GPTQ-Int8",
        config("qwen3", 64, 64, 8),
        coded(_QWEN3_32B, gptq_8bit),
        "bf16",
        quantization={"quant_method": "gptq", "bits": 8},
    ),
)


def drafted(layout: Layout, size: Size) -> RecipeDraft:
    """What init makes of it. Raises where it can't."""
    stated = {"quantization_config": layout.quantization} if layout.quantization else {}
    parent = parent_of(layout.name, {**layout.config, **stated}, layout.build(size))
    return draft(parent, f"x-{layout.aim}", default_profile(parent, layout.aim), layout.aim)


def row(layout: Layout, made: RecipeDraft) -> str:
    before = sum(family.bytes_before for family in made.plan.families)
    kept = [family for family in made.plan.families if family.action == "keep"]
    largest = max(kept, key=lambda family: family.bytes_before, default=None)
    most = f"{largest.name} {largest.bytes_before / before:.0%}" if largest else "nothing"
    tensors = sum(family.tensors for family in made.plan.families)
    unknown = ", ".join(made.unknown) or "-"
    return (
        f"| {layout.name} | {tensors:,} | {before / 1e9:,.0f} GB | {layout.aim} | {made.share:.0%} | {most} | "
        f"{unknown} | {layout.left or '-'} |"
    )


def main() -> None:
    begun, changed = time.monotonic(), 0
    print(
        "| layout | tensors | before | --to | converts | largest part left | not known | an expert would change |"
    )
    print("|---|---:|---:|---|---:|---|---|---|")
    for layout in LAYOUTS:
        print(row(layout, drafted(layout, Size())), flush=True)
        changed += bool(layout.left)
    print(
        f"{len(LAYOUTS)} layouts in {math.ceil(time.monotonic() - begun)} s; {changed} that an expert would change"
    )
    sys.exit(0)


if __name__ == "__main__":
    main()
