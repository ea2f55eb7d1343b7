"""Real loaders, not ours: what transformers holds in memory, or writes back, has the bits that were built.

Small random models of six architectures, saved by transformers, drafted by `init`, built, and loaded by transformers:
FineGrainedFP8 and compressed-tensors. Needs the extra `loaders`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.profiles.small import MODELS, child, published, save

torch = pytest.importorskip("torch", reason="needs the extra `loaders`")
transformers = pytest.importorskip("transformers", reason="needs the extra `loaders`")
pytest.importorskip("compressed_tensors", reason="needs the extra `loaders`")
pytest.importorskip("accelerate", reason="needs the extra `loaders`")

pytestmark = pytest.mark.filterwarnings("ignore")

Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Architecture -> a folder as save_pretrained wrote it, each made once."""
    home = tmp_path_factory.mktemp("saved")
    return lambda name: home / name if (home / name).exists() else save(name, home / name)


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
    made = child(saved(name), tmp_path / name, "fp8")
    model = loaded(made)
    ours, convolutions = on_disk(made), {}
    if (
        name == "kimi_linear"
    ):  # its convolutions are fused in memory, and transformers 5.24 cuts them wrongly on saving
        convolutions = {key: ours.pop(key) for key in list(ours) if "_conv1d" in key}
    model.save_pretrained(tmp_path / "back")
    back = {published(key): value for key, value in on_disk(tmp_path / "back").items()}
    theirs = back if not convolutions else {key: back[key] for key in back if "_conv1d" not in key}
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
    made = child(saved(name), tmp_path / name, "fp8")
    model, ours = loaded(made), on_disk(made)
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
def test_compressed_tensors_holds_the_codes_and_scales_that_were_child(
    saved: Any, tmp_path: Path, name: str
) -> None:
    """In float32, since compressed-tensors 0.20 keeps scales in the model's dtype and BF16 would round them."""
    made = child(saved(name), tmp_path / name, "compressed-tensors")
    state, ours = loaded(made, torch.float32).state_dict(), on_disk(made)
    assert state.keys() == ours.keys()
    for key, value in ours.items():
        kept = value if value.dtype == torch.float8_e4m3fn else value.float()
        assert same_bits(kept, state[key]), key


def test_both_profiles_differ_in_names_and_declaration_alone(saved: Any, tmp_path: Path) -> None:
    """By the same numerics; init's drafts for compressed-tensors round scales to BF16."""
    fp8 = on_disk(child(saved("qwen3_moe"), tmp_path / "a", "fp8"))
    compressed = on_disk(child(saved("qwen3_moe"), tmp_path / "b", "compressed-tensors", "amax/1"))
    renamed = {key.replace("_scale_inv", "_scale"): value for key, value in fp8.items()}
    assert renamed.keys() == compressed.keys()
    assert all(same_bits(value, compressed[key]) for key, value in renamed.items())
    ignored = [
        json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"][key]
        for folder, key in (("a", "modules_to_not_convert"), ("b", "ignore"))
    ]
    assert ignored[0] == ignored[1]
