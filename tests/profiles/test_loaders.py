"""Real loaders, not ours: what transformers holds in memory, or writes back, has the bits that were built.

Small random models of six architectures, saved by transformers, drafted by `init`, built, and loaded by transformers:
FineGrainedFP8 and compressed-tensors. Needs the extra `loaders`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import recipe as recipes
from pipeline import run
from pipeline.init.draft import draft
from pipeline.job import Checkpoint, Settings, Watch
from pipeline.stages.scan import scan

torch = pytest.importorskip("torch", reason="needs the extra `loaders`")
transformers = pytest.importorskip("transformers", reason="needs the extra `loaders`")
pytest.importorskip("compressed_tensors", reason="needs the extra `loaders`")
pytest.importorskip("accelerate", reason="needs the extra `loaders`")

pytestmark = pytest.mark.filterwarnings("ignore")

_BASE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_MOE = {"moe_intermediate_size": 128, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_MLA = {
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {**_MOE, "num_experts": 4},
    "deepseek_v3": {**_MOE, **_MLA, "n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": 128},
    "glm4_moe": {**_MOE, "n_routed_experts": 4, "first_k_dense_replace": 1, "attention_bias": True},
    "kimi_linear": {
        **_MOE,
        **_MLA,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "head_dim": 64,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
}
Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Architecture -> a folder as save_pretrained wrote it, each made once."""
    home, made = tmp_path_factory.mktemp("saved"), {}

    def of(name: str) -> Path:
        if name not in made:
            config = transformers.CONFIG_MAPPING[name](**{**_BASE, **MODELS[name]})
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            randoms = np.random.Generator(np.random.PCG64(len(made)))
            with torch.no_grad():
                for parameter in model.parameters():
                    values = randoms.standard_normal(tuple(parameter.shape)) / 16
                    parameter.copy_(torch.from_numpy(values))
            model.save_pretrained(home / name)
            made[name] = home / name
        return made[name]

    return of


def built(parent: Path, out: Path, profile: str) -> Path:
    """The child of `parent` by the recipe that init drafts for the profile."""
    made = draft(scan(Checkpoint(recipes.Recipe.model_construct(), parent)), "small", profile)
    assert made.unknown == ()
    out.with_suffix(".toml").write_text(made.text)
    run.build(run.prepare(recipes.load(out.with_suffix(".toml")), parent), out, Settings(), Watch())
    return out


def loaded(folder: Path, dtype: Any = None) -> Any:
    """The model as transformers loads it; nothing may be missing, left over or of another shape."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or torch.bfloat16, output_loading_info=True
    )
    assert {key: found for key, found in info.items() if found} == {}
    return model


def on_disk(folder: Path) -> Tensors:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def same_bits(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def bits(tensor: Any) -> bytes:
    return bytes(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())


@pytest.fixture
def gpu_check_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the one line by which FineGrainedFP8 asks for a GPU; all of its loading runs as it is."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)


@pytest.mark.parametrize("name", MODELS)
def test_fine_grained_fp8_writes_back_every_bit_that_it_loaded(
    saved: Any, tmp_path: Path, gpu_check_passed: None, name: str
) -> None:
    child = built(saved(name), tmp_path / name, "fp8")
    model = loaded(child)
    ours, convolutions = on_disk(child), {}
    if (
        name == "kimi_linear"
    ):  # its convolutions are fused in memory, and transformers 5.24 cuts them wrongly on saving
        convolutions = {key: ours.pop(key) for key in list(ours) if "_conv1d" in key}
    model.save_pretrained(tmp_path / "back")
    theirs = {key: value for key, value in on_disk(tmp_path / "back").items() if "_conv1d" not in key}
    assert theirs.keys() == ours.keys()
    assert [key for key in ours if not same_bits(ours[key], theirs[key])] == []
    assert sum(value.dtype == torch.float8_e4m3fn for value in ours.values()) > 10
    for layer in {key.partition(".self_attn")[0] for key in convolutions}:
        fused = torch.cat([convolutions[f"{layer}.self_attn.{x}_conv1d.weight"] for x in "qkv"])
        assert same_bits(fused, model.state_dict()[f"{layer}.self_attn.conv1d.weight"])


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_without_a_gpu_transformers_decodes_to_code_times_scale(
    saved: Any, tmp_path: Path, name: str
) -> None:
    child = built(saved(name), tmp_path / name, "fp8")
    model, ours = loaded(child), on_disk(child)
    state = model.state_dict()
    checked = 0
    for key, codes in ours.items():
        if codes.dtype == torch.float8_e4m3fn and key in state:
            scales = ours[f"{key}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            decoded = codes.float() * scales[: codes.shape[0], : codes.shape[1]]
            assert same_bits(decoded.bfloat16(), state[key])
            checked += 1
    assert checked >= 8


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_compressed_tensors_holds_the_codes_and_scales_that_were_built(
    saved: Any, tmp_path: Path, name: str
) -> None:
    """In float32, since compressed-tensors 0.20 keeps scales in the model's dtype and BF16 would round them."""
    child = built(saved(name), tmp_path / name, "compressed-tensors")
    state, ours = loaded(child, torch.float32).state_dict(), on_disk(child)
    assert state.keys() == ours.keys()
    for key, value in ours.items():
        kept = value if value.dtype == torch.float8_e4m3fn else value.float()
        assert same_bits(kept, state[key]), key


def test_both_profiles_differ_in_names_and_declaration_alone(saved: Any, tmp_path: Path) -> None:
    fp8 = on_disk(built(saved("qwen3_moe"), tmp_path / "a", "fp8"))
    compressed = on_disk(built(saved("qwen3_moe"), tmp_path / "b", "compressed-tensors"))
    renamed = {key.replace("_scale_inv", "_scale"): value for key, value in fp8.items()}
    assert renamed.keys() == compressed.keys()
    assert all(same_bits(value, compressed[key]) for key, value in renamed.items())
    ignored = [
        json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"][key]
        for folder, key in (("a", "modules_to_not_convert"), ("b", "ignore"))
    ]
    assert ignored[0] == ignored[1]
