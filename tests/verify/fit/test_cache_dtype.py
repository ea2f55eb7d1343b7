"""What the cache holds under `auto`: the checkpoint's own declaration, else its family's habit on a card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shardmill.verify.fit.cache_dtype import declared_dtype
from shardmill.verify.fit.commands import fit
from shardmill.verify.fit.layers import check_planned, plan_layers, served
from shardmill.verify.fit.planner import plan_blocks
from shardmill.verify.fit.preset import Preset
from shardmill.verify.fit.shape import ConfigError, read_shape
from tests.runtime_patch.vllm.fit_dtypes import DECLARED

GQA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 8192,
}
SPARSE = {
    **GQA,
    "model_type": "glm_moe_dsa",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "index_head_dim": 128,
    "index_topk": 2048,
}
AUTO = Preset("auto", max_model_len=4096)


def block_bytes(config: dict, preset: Preset) -> int:
    return plan_blocks(plan_layers(read_shape(config), preset)).block_bytes


@pytest.mark.parametrize("name", DECLARED)
def test_a_declared_cache_is_planned_as_fp8_unless_a_flag_says_otherwise(name):
    declared = {**GQA, "quantization_config": DECLARED[name]}
    assert block_bytes(declared, AUTO) == block_bytes(GQA, AUTO) // 2
    assert block_bytes(declared, replace(AUTO, kv_dtype="bfloat16")) == block_bytes(GQA, AUTO)


def test_latent_attention_does_not_ask_for_the_scheme_of_compressed_tensors():
    scheme = {"quantization_config": DECLARED["compressed-tensors"]}
    assert read_shape(SPARSE | scheme).cache_dtype == "auto"
    assert (
        read_shape(SPARSE | {"quantization_config": DECLARED["modelopt, a scheme"]}).cache_dtype == "fp8_e4m3"
    )


def test_an_nvfp4_cache_is_refused_by_name_unless_a_flag_says_otherwise():
    shape = read_shape(
        {**GQA, "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}}
    )
    with pytest.raises(ConfigError, match="declares a KV cache of nvfp4, which is not planned"):
        check_planned(shape, AUTO)
    check_planned(shape, replace(AUTO, kv_dtype="fp8"))


@pytest.mark.parametrize(("sm", "dtype"), [(90, "auto"), (100, "fp8"), (120, "auto")])
def test_glm_moe_dsa_is_served_with_fp8_on_sm100_alone(sm, dtype):
    assert served(read_shape(SPARSE), replace(AUTO, sm=sm)).kv_dtype == dtype


@pytest.mark.parametrize(
    ("config", "flags", "why"),
    [
        (SPARSE, {"sm": 120, "kv_dtype": "bfloat16"}, "no attention backend"),
        (SPARSE, {"sm": 90, "kv_dtype": "fp8_e5m2"}, "no attention backend"),
        (SPARSE | {"index_topk": 512}, {"sm": 120}, "index_topk 512 on SM120"),
        (SPARSE | {"kv_lora_rank": 256}, {"sm": 100}, "sparse layers of 256 [+] 64 values"),
        (SPARSE | {"index_topk": None}, {"kv_dtype": "fp8_e5m2"}, "no backend for it"),
        (SPARSE, {"rung": "8666"}, "without a rotary part alone"),
        (GQA, {"kv_dtype": "fp8_ds_mla"}, "for sparse latent attention alone"),
        (GQA, {"draft_tokens": 1}, "drafts of llama are not planned"),
        (SPARSE, {"draft_tokens": 1}, "must name num_nextn_predict_layers"),
        (
            GQA | {"model_type": "glm4_moe", "num_nextn_predict_layers": 1},
            {"draft_tokens": 1},
            "drafts of glm4_moe",
        ),
    ],
)
def test_what_is_not_planned_is_refused_by_name(config, flags, why):
    shape, preset = read_shape(config), replace(AUTO, **flags)
    with pytest.raises(ConfigError, match=why):
        check_planned(shape, preset)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "quant_method",
                    "quantization",
                    "kv_cache_scheme",
                    "kv_cache_quant_algo",
                    "num_bits",
                    "type",
                    "dynamic",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    declaration=_json, method=st.sampled_from(["modelopt", "modelopt_fp4", "compressed-tensors", "fp8", 5])
)
def test_any_declaration_gives_a_dtype(declaration, method):
    config = {
        "quantization_config": {**declaration, "quant_method": method}
        if isinstance(declaration, dict)
        else declaration
    }
    assert declared_dtype(config, config, latent=False) in ("auto", "fp8", "fp8_e4m3", "nvfp4")


def test_hf_quant_config_speaks_where_config_json_declares_nothing(tmp_path: Path):
    """ModelOpt wrote its declaration there before it wrote it into config.json."""
    place = tmp_path / "plain"
    place.mkdir()
    save_file({"model.embed_tokens.weight": np.zeros((256, 256), np.float16)}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(GQA))
    (tmp_path / "p.toml").write_text('name = "p"\n[serve]\nmax_model_len = 4096\n')

    def need() -> int:
        asked = CliRunner().invoke(fit, [str(place), "--preset", str(tmp_path / "p.toml"), "--json"])
        return json.loads(asked.stdout)["kv"]["need_bytes"]

    before = need()
    (place / "hf_quant_config.json").write_text(
        json.dumps(
            {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": []}}
        )
    )
    assert need() * 2 == before
