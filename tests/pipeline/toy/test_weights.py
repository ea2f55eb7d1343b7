"""The toy's numbers: what was FP8 is a copy of FP8, what is NVFP4 is valid, what is F32 is plausible."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shardmill.kernels.block_fp8 import decode, encoder
from shardmill.kernels.formats import E2M1_VALUES, E4M3_VALUES, bf16_to_f32, f32_to_bf16
from shardmill.pipeline.toy.weights import tensor_data
from shardmill.pipeline.types import TensorRef, tensor_bytes

Tensors = Callable[[str], np.ndarray]
LAYER = "model.language_model.layers."
BLOCK = (128, 128)
NATIVE = [
    f"{LAYER}3.self_attn.q_a_proj.weight",
    f"{LAYER}3.self_attn.q_b_proj.weight",
    f"{LAYER}45.self_attn.kv_a_proj_with_mqa.weight",
    f"{LAYER}0.mlp.down_proj.weight",
    f"{LAYER}44.mlp.shared_experts.gate_proj.weight",
]
FRESH = [
    f"{LAYER}0.self_attn.q_proj.weight",
    f"{LAYER}3.self_attn.o_proj.weight",
    "lm_head.weight",
    "model.visual.blocks.0.mlp.up_proj.weight",
]
EXPERTS = [f"{LAYER}{layer}.mlp.experts.{expert}." for layer in (3, 44, 45) for expert in (0, 1)]


def _made(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    ref = TensorRef(name, dtype, shape, "shard", 0, tensor_bytes(dtype, shape))
    return b"".join(tensor_data(ref))


def _scales_of(bits: np.ndarray, codes: np.ndarray) -> np.ndarray | None:
    """The f32 scale of a block if one exists with bf16(code * scale) == bits everywhere, else None.

    The codes come from amax / 448. Each element's BF16 rounding interval bounds the scale; whatever is left of
    the interval after all elements is tried in its middle.
    """
    magnitudes, values = bits.astype(np.int64) & 0x7FFF, np.abs(E4M3_VALUES[codes]).astype(np.float64)
    bits, codes, known = bits[values > 0], codes[values > 0], values > 0
    edges = [
        bf16_to_f32((magnitudes[known] + step).astype(np.uint16)).astype(np.float64) for step in (-1, 0, 1)
    ]
    low, high = (
        ((edges[1] + edges[0]) / 2 / values[known]).max(),
        ((edges[1] + edges[2]) / 2 / values[known]).min(),
    )
    scale = np.float32((low + high) / 2)
    return scale if low <= high and np.array_equal(f32_to_bf16(E4M3_VALUES[codes] * scale), bits) else None


def _requantized(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = (
        np.empty(bits.shape, np.uint8),
        np.empty(tuple(-(-side // 128) for side in bits.shape), np.float32),
    )
    encoder("amax/1", BLOCK, "numpy").encode(bits, codes, scales)
    return codes, scales


def _exact_blocks(bits: np.ndarray) -> list[bool]:
    codes, _ = _requantized(bits)
    return [
        _scales_of(bits[i : i + 128, j : j + 128], codes[i : i + 128, j : j + 128]) is not None
        for i in range(0, bits.shape[0], 128)
        for j in range(0, bits.shape[1], 128)
    ]


@pytest.mark.parametrize("name", NATIVE)
def test_bf16_of_mla_and_mlp_weights_is_an_exact_copy_of_block_fp8(tensor: Tensors, name: str) -> None:
    """For each [128,128] block there is a scale that gives the BF16 back from E4M3 codes, bit for bit."""
    assert all(_exact_blocks(tensor(name)))


@pytest.mark.parametrize("name", FRESH)
def test_fresh_weights_are_no_copies_of_fp8(tensor: Tensors, name: str) -> None:
    assert not any(_exact_blocks(tensor(name)[:256]))


def test_amax_finds_a_copys_codes_but_not_its_scales(tensor: Tensors) -> None:
    """Re-quantized, the copies err by 0.1 to 0.2 % all together, as the real parent's do: BF16 rounding moved amax."""
    names = [f"{LAYER}{n}.self_attn.{x}.weight" for n in range(3, 44, 4) for x in ("q_a_proj", "q_b_proj")]
    bits = np.concatenate([tensor(name) for name in names])
    source, decoded = bf16_to_f32(bits), decode(*_requantized(bits), BLOCK)
    assert 0.001 < np.linalg.norm(decoded - source) / np.linalg.norm(source) < 0.002


@pytest.mark.parametrize("name", FRESH)
def test_fresh_weights_lose_two_and_a_half_percent(tensor: Tensors, name: str) -> None:
    bits = tensor(name)
    source, decoded = bf16_to_f32(bits), decode(*_requantized(bits), BLOCK)
    assert 0.023 < np.linalg.norm(decoded - source) / np.linalg.norm(source) < 0.027


@pytest.mark.parametrize("expert", EXPERTS)
def test_every_nvfp4_group_uses_its_range_and_every_scale_is_sound(tensor: Tensors, expert: str) -> None:
    """Each group of 16 holds a code of size 6; scales are positive and finite; the largest of w13 and of w2 is 448."""
    largest = {}
    for part in ("gate", "up", "down"):
        packed = tensor(f"{expert}{part}_proj.weight")
        codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(packed.shape[0], -1, 16)
        assert (np.abs(E2M1_VALUES[codes]).max(axis=-1) == 6).all()
        scales = E4M3_VALUES[tensor(f"{expert}{part}_proj.weight_scale")]
        assert (scales > 0).all()
        assert scales.shape == codes.shape[:2]
        largest[part] = scales.max()
    assert (max(largest["gate"], largest["up"]), largest["down"]) == (448, 448)


def test_nvfp4_values_are_bell_shaped(tensor: Tensors) -> None:
    """Decoded, an expert's weights have mean 0 and the standard deviation that a bell with this amax has."""
    expert = f"{EXPERTS[0]}down_proj.weight"
    packed, scales = tensor(expert), E4M3_VALUES[tensor(f"{expert}_scale")]
    codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(packed.shape[0], -1, 16)
    weights = E2M1_VALUES[codes] * scales[..., None] / (6 * 448)
    assert abs(weights.mean()) < 0.02 * weights.std() * 3
    assert 1 / 6 < weights.std() < 1 / 3.5


def test_gate_and_up_of_an_expert_share_their_global_scale_and_their_input_scale(tensor: Tensors) -> None:
    """The fused w13 kernel knows one of each; down's differ from them."""
    for expert in EXPERTS:
        for scale in ("weight_scale_2", "input_scale"):
            gate, up, down = (
                tensor(f"{expert}{part}_proj.{scale}").item() for part in ("gate", "up", "down")
            )
            assert gate == up != down


def test_input_scales_and_global_scales_differ_from_expert_to_expert_and_stay_within_bounds(
    tensor: Tensors,
) -> None:
    for scale, low, high in (("input_scale", 2**-9, 2**-6), ("weight_scale_2", 2**-14, 2**-13)):
        found = [tensor(f"{expert}down_proj.{scale}").item() for expert in EXPERTS]
        assert len(set(found)) == len(EXPERTS)
        assert all(low <= value < high for value in found)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("input_layernorm.weight", 0.9, 1.15),
        ("post_attention_layernorm.weight", 0.9, 1.15),
        ("self_attn.o_norm.weight", 0.9, 1.15),
        ("self_attn.A_log", 0, 2),
        ("self_attn.dt_bias", -6, -2),
        ("hc_attn_base", -1, 1),
        ("hc_ffn_scale", 0.5, 1.5),
    ],
)
def test_norms_and_gates_hold_plausible_numbers(tensor: Tensors, name: str, low: float, high: float) -> None:
    found = tensor(f"{LAYER}0.{name}")
    numbers = bf16_to_f32(found) if found.dtype == np.uint16 else found
    assert low <= numbers.min() < numbers.max() < high


def test_no_two_tensors_of_one_shape_are_equal(tensor: Tensors) -> None:
    """A tensor follows from its name, so that a swap of two is seen."""
    names = [f"{LAYER}{layer}.self_attn.{x}_proj.weight" for layer in (0, 1) for x in "qkv"]
    assert len({tensor(name).tobytes() for name in names}) == len(names)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (f"{LAYER}0.self_attn.q_proj.weight", "BF16"),
        (f"{LAYER}0.input_layernorm.weight", "BF16"),
        (f"{LAYER}0.mlp.gate_proj.weight", "BF16"),
        (f"{LAYER}3.mlp.experts.0.up_proj.weight", "U8"),
        (f"{LAYER}3.mlp.experts.0.up_proj.weight_scale", "F8_E4M3"),
        (f"{LAYER}0.self_attn.A_log", "F32"),
    ],
)
@pytest.mark.parametrize("shape", [(200, 136), (1024, 1040), (1, 16)])
def test_a_tensor_has_as_many_bytes_as_its_header_says(name: str, dtype: str, shape: tuple[int, int]) -> None:
    """Whether it is made in one run or in several, and where blocks are cut at the edge."""
    assert len(_made(name, dtype, shape)) == tensor_bytes(dtype, shape)


@pytest.mark.parametrize(
    "name", ["input_layernorm.weight", "self_attn.q_proj.weight", "mlp.gate_proj.weight"]
)
def test_a_tensor_need_not_fill_its_last_random_word(name: str) -> None:
    assert len(_made(f"{LAYER}0.{name}", "BF16", (5, 7))) == 70


def test_the_runs_in_which_a_tensor_is_made_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing 64 random words at a time gives the bytes that drawing 32,768 gives."""
    cases = [("lm_head.weight", "BF16"), (f"{LAYER}3.mlp.experts.0.down_proj.weight", "U8")]
    expected = [_made(name, dtype, (96, 128)) for name, dtype in cases]
    monkeypatch.setattr("shardmill.pipeline.toy.weights._WORDS_AT_ONCE", 64)
    assert [_made(name, dtype, (96, 128)) for name, dtype in cases] == expected
