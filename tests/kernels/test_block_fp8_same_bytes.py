"""What must not change a byte: strips, groups, threads, flags, processors, days."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardmill.kernels.block_fp8 as block_fp8
from shardmill.kernels.block_fp8 import RECIPES, encoder, grid
from shardmill.kernels.block_fp8_numpy import CHUNK_ELEMENTS
from tests.kernels.conftest import assert_same_bits, bell, encode, native_copy, subnormals_flushed, words

GOLDEN = Path(__file__).parent / "golden" / "block_fp8.json"
BLOCKS = [(128, 128), (32, 32), (5, 3)]


def mixed(rows: int = 390, C: int = 300):
    """BF16 bits with ordinary, tiny, subnormal, once-FP8 and zero blocks side by side."""
    source = bell(21, rows, C)
    source[:, 60:130] = words(22, rows, 70) & 0x83FF  # below 2^-118
    source[:, 130:180] = words(23, rows, 50) & 0x807F  # subnormal
    source[:, 180:230] = words(26, rows, 50) & 0x80FF  # below 2^-125, but for an amax whose scale is normal
    source[::3, 180:230:5] = 0x0700 + 2 * np.arange(0, rows, 3)[:, None]  # from 2^-113 to 2^-107
    source[:, 256:] = native_copy(27, (32, 32), rows, C)[:, 256:]
    source[100:140, :] = words(24, 40, C) & 0x8000  # zeros of both signs
    return source


def digest(codes, scales) -> str:
    return hashlib.sha256(codes.tobytes() + scales.tobytes()).hexdigest()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(heights=st.lists(st.integers(1, 4), min_size=1, max_size=12), recipe=st.sampled_from(sorted(RECIPES)))
def test_strip_height_changes_nothing(kernel, heights, recipe):
    """A matrix encoded in strips of any number of block rows, by one encoder, is the matrix encoded at once."""
    source, block = mixed(), (32, 32)
    expected_codes, expected_scales, expected_counts = encode(recipe, source, block, kernel)
    codes, scales = np.empty_like(expected_codes), np.empty_like(expected_scales)
    encoding, begin, counts = encoder(recipe, block, kernel), 0, {}
    while begin < len(source):
        end = min(begin + 32 * heights[begin % len(heights)], len(source))
        at = slice(begin // 32, -(-end // 32))
        found = encoding.encode(source[begin:end], codes[begin:end], scales[at])
        counts = {key: counts.get(key, 0) + count for key, count in found.items()}
        begin = end
    assert_same_bits(expected_scales, scales, "scales")
    assert_same_bits(expected_codes, codes, "codes")
    assert expected_counts == counts


@pytest.mark.parametrize("recipe", RECIPES)
def test_group_size_changes_nothing(kernel, recipe, monkeypatch):
    """How many block rows an encoder takes at a time inside does not show."""
    expected = encode(recipe, mixed(), (32, 32), kernel)
    monkeypatch.setattr(block_fp8, "GROUP_BYTES", 1)
    got = encode(recipe, mixed(), (32, 32), kernel)
    assert digest(*expected[:2]) == digest(*got[:2])
    assert expected[2] == got[2]


def test_a_used_encoder_is_as_good_as_a_new_one(kernel):
    """Matrices of other widths and dtypes in between leave nothing behind in the buffers."""
    encoding = encoder("amax/1", (32, 32), kernel)
    for source in (
        bell(1, 64, 40_000),
        bell(2, 33, 5),
        mixed().astype(np.float16),
        mixed().astype(np.float32),
        mixed(),
    ):
        codes = np.empty(source.shape, np.uint8)
        scales = np.empty(grid(source.shape, (32, 32)), np.float32)
        encoding.encode(source, codes, scales)
        expected = encode("amax/1", source, (32, 32), kernel)
        assert_same_bits(expected[1], scales, f"scales {source.dtype}")
        assert_same_bits(expected[0], codes, f"codes {source.dtype}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_threads_change_nothing(kernel, recipe):
    """Four encoders at work in four threads at once write what one writes alone."""
    expected = digest(*encode(recipe, mixed(), (32, 32), kernel)[:2])
    with ThreadPoolExecutor(4) as pool:
        made = pool.map(lambda _: digest(*encode(recipe, mixed(), (32, 32), kernel)[:2]), range(16))
    assert set(made) == {expected}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_flushing_subnormals_changes_nothing(kernel, recipe, block, dtype):
    """With flush-to-zero and denormals-are-zero set, blocks of every size still give the same bytes."""
    source = (
        mixed() if dtype == np.uint16 else (mixed().astype(np.uint32) << 16 | words(25, 390, 300) & 0xFFFF)
    )
    source = source if dtype == np.uint16 else source.view(np.float32)
    expected = encode(recipe, source, block, kernel)
    with subnormals_flushed():
        got = encode(recipe, source, block, kernel)
    assert_same_bits(expected[1], got[1], "scales")
    assert_same_bits(expected[0], got[0], "codes")
    assert expected[2] == got[2]


@pytest.mark.torch
def test_torchs_flag_changes_nothing(kernel):
    """Nor does torch.set_flush_denormal."""
    torch = pytest.importorskip("torch", reason="sets the flag")
    expected = encode("amax/1", mixed(), (32, 32), kernel)
    assert torch.set_flush_denormal(True)
    try:
        got = encode("amax/1", mixed(), (32, 32), kernel)
    finally:
        torch.set_flush_denormal(False)
    assert digest(*expected[:2]) == digest(*got[:2])


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_agree(recipe):
    """numpy and numba write the same bytes and count the same."""
    pytest.importorskip("numba", reason="needs the extra `fast`")
    for block in BLOCKS:
        expected, got = (encode(recipe, mixed(), block, kernel) for kernel in ("numpy", "numba"))
        assert_same_bits(expected[1], got[1], f"scales {block}")
        assert_same_bits(expected[0], got[0], f"codes {block}")
        assert expected[2] == got[2]


@pytest.mark.numba
def test_the_processor_changes_nothing(tmp_path):
    """Machine code for a plain x86-64 gives numpy's bytes, as this processor's does in test_kernels_agree."""
    pytest.importorskip("numba", reason="needs the extra `fast`")
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    program = "from tests.kernels.test_block_fp8_same_bytes import *; print(*digests('numba'))"
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | plain, cwd=root
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == digests("numpy")


def digests(kernel: str) -> list[str]:
    """One digest for each recipe, of two dtypes."""
    sources = [mixed(), (mixed().astype(np.uint32) << 16 | 0x5555).view(np.float32)]
    return [digest(*encode(recipe, source, (32, 32), kernel)[:2]) for recipe in RECIPES for source in sources]


def test_golden_bits(kernel):
    """Today's bits are the bits of the file, which was written once for each recipe's name."""
    golden = json.loads(GOLDEN.read_text())
    assert golden == golden_bits(kernel), (
        "a changed bit needs a new recipe name, and a new file beside this one"
    )


def golden_bits(kernel: str) -> dict[str, dict[str, str]]:
    """For each recipe a small matrix in full, as hex, and a large one as a digest."""
    made = {}
    for recipe in sorted(RECIPES):
        codes, scales, _ = encode(recipe, bell(31, 3, 10), (2, 4), kernel)
        large = digest(*encode(recipe, mixed(), (32, 32), kernel)[:2])
        made[recipe] = {
            "codes": codes.tobytes().hex(),
            "scales": scales.tobytes().hex(),
            "mixed sha256": large,
        }
    return made


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("native", [False, True])
def test_memory_does_not_grow_with_the_strip(kernel, recipe, native):
    """Encoding 4 MiB or 16 MiB at once takes the same room beside source and result: 64 bytes for each element of a
    chunk at most."""
    few = native_copy(1, (128, 128), 128, 4096) if native else bell(1, 128, 4096)
    peaks = []
    for rows in (512, 2048):
        source, codes = np.tile(few, (rows // 128, 1)), np.empty((rows, 4096), np.uint8)
        scales = np.empty((rows // 128, 32), np.float32)
        encoder(recipe, (128, 128), kernel).encode(
            few, codes[:128], scales[:1]
        )  # fills the caches of all threads
        tracemalloc.start()
        encoder(recipe, (128, 128), kernel).encode(source, codes, scales)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 64 * CHUNK_ELEMENTS
    assert abs(peaks[0] - peaks[1]) < 1 << 17
