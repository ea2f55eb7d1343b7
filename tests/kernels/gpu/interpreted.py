"""Runs the row kernels in Triton's CPU interpreter: `TRITON_INTERPRET=1 python -m tests.kernels.gpu.interpreted`.

A process of its own, since the interpreter must be chosen before triton is imported. Prints "exact" at the end.
"""

import numpy as np
import torch

from shardmill.kernels import block_gemm, fp6, kv_row, testing, torch_topk, triton_kv, triton_topk
from shardmill.kernels.block_gemm import Gemv
from shardmill.kernels.formats import E2M3_VALUES, E4M3_VALUES, bf16_to_f32
from shardmill.kernels.kv_row import RUNGS, RowLayout

ROWS = 8
PAGE_ROWS = 4
GAP = 16


def latents() -> np.ndarray:
    """One row of each of the last hostile cases: extremes, outliers, ties, NaN."""
    return np.concatenate([rows[:1] for _, rows in testing.hostile_latents()])[-ROWS:]


def check_write(layout: RowLayout, bits: np.ndarray) -> np.ndarray:
    """Paged rows by shuffled slots, two skipped, gaps between pages; returns the rows."""
    x = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    expected = kv_row.encode(layout.rung, bf16_to_f32(bits), layout.scales)
    slots = np.random.default_rng(0).permutation(3 * PAGE_ROWS)[:ROWS].astype(np.int64)
    slots[[2, 5]] = -1
    memory = torch.full((3, PAGE_ROWS * layout.row_bytes + GAP), testing.POISON, dtype=torch.uint8)
    cache = memory[:, : PAGE_ROWS * layout.row_bytes].unflatten(1, (PAGE_ROWS, layout.row_bytes))
    triton_kv.write(x, cache, torch.from_numpy(slots), layout)
    whole = np.full((3 * PAGE_ROWS, layout.row_bytes), testing.POISON, np.uint8)
    whole[slots[slots >= 0]] = expected[slots >= 0]
    same(whole, cache.reshape(-1, layout.row_bytes).numpy(), layout)
    assert bool((memory[:, PAGE_ROWS * layout.row_bytes :] == testing.POISON).all()), (
        "bytes between pages changed"
    )
    return expected


def check_restage(layout: RowLayout, rows: np.ndarray) -> None:
    """Gathered rows with duplicates and a skipped one, and whole pages with a skipped one."""
    cache = torch.from_numpy(rows).view(-1, PAGE_ROWS, layout.row_bytes)
    wanted = kv_row.restage(layout.rung, rows)
    index = np.array([5, 0, -1, 5], np.int32)
    out = torch.full((4, 656), testing.POISON, dtype=torch.uint8)
    triton_kv.restage_gather(cache, torch.from_numpy(index), out, layout, rows_per_program=2)
    numbers = torch.full((2, 2), 7, dtype=torch.int32)
    triton_kv.number_rows(torch.from_numpy(index).view(2, 2), numbers)
    assert numbers.tolist() == [[0, 1], [-1, 3]]
    expected = wanted[index]
    expected[index < 0] = testing.POISON
    same(expected, out.numpy())
    out = torch.full((2 * PAGE_ROWS, 656), testing.POISON, dtype=torch.uint8)
    triton_kv.restage_pages(cache, torch.tensor([-1, 1], dtype=torch.int32), out, layout)
    assert bool((out[:PAGE_ROWS] == testing.POISON).all())
    same(wanted[PAGE_ROWS : 2 * PAGE_ROWS], out[PAGE_ROWS:].numpy())


def check_every_code() -> None:
    """The integer decoder, for each of the 64 codes under each of the four drops."""
    code = np.tile(np.arange(64), 8).astype(np.uint8).reshape(1, 4, 128)
    drop = np.repeat(np.arange(4), 16).astype(np.uint8).reshape(1, 4, 16)  # tile t drops t
    code[:, 0][(code[:, 0] & 0x1F) == 0x1F] = 0  # 7.5 without a drop has no byte
    nibbles, exponents = kv_row.pack_codes(code)
    rows = np.concatenate([part.reshape(1, -1) for part in (nibbles, exponents)], axis=1)
    rows = np.concatenate([rows, np.zeros((1, 16), np.uint8), kv_row.pack_drops(drop).reshape(1, -1)], axis=1)
    out = torch.empty((1, 656), dtype=torch.uint8)
    cache = torch.from_numpy(rows).view(1, 1, 416)
    triton_kv.restage_gather(cache, torch.zeros(1, dtype=torch.int32), out, RowLayout.parse("6666"))
    byte = out[0, :512].numpy().reshape(4, 128)
    value = np.ldexp(E2M3_VALUES[code[0]], 6 - np.arange(4)[:, None])
    assert np.array_equal(E4M3_VALUES[byte], value), "a code does not restage to its value"
    assert np.array_equal(np.signbit(E4M3_VALUES[byte]), code[0] >= 32), "a sign was lost"


def check_spread(bits: np.ndarray) -> None:
    """The write kernel with an order stores the row of the permuted latent."""
    layout = RowLayout.parse("6666")
    order = np.random.default_rng(1).permutation(512).astype(np.int32)
    x = torch.from_numpy(bits[:3].view(np.int16)).view(torch.bfloat16)
    cache = torch.zeros((1, 3, 416), dtype=torch.uint8)
    triton_kv.write(x, cache, torch.arange(3), layout, order=torch.from_numpy(order))
    same(kv_row.encode("6666", bf16_to_f32(bits[:3][:, order])), cache[0].numpy(), layout)


def check_quantize() -> None:
    """Activation quantization equals its definition."""
    bits = testing.random_rows(2, 2)
    codes, scales = block_gemm.quantize(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), 32)
    x = bf16_to_f32(bits).reshape(-1, 32)
    scale = (np.maximum(np.abs(x).max(1), np.float32(1e-10)) / np.float32(448)).astype(np.float32)
    y = np.clip(x * (np.float32(1) / scale)[:, None], -448, 448)
    assert np.array_equal(scales.numpy().reshape(-1), scale)
    same(fp6.e4m3_nearest(y).reshape(2, -1), codes.view(torch.uint8).numpy())


def check_e8m0() -> None:
    """E8M0 scales, the least, the largest and NaN among them, become the f32 of the same value; equal bits."""
    x, x_scale = block_gemm.quantize(
        torch.from_numpy(bf16_to_f32(testing.random_rows(3, 2))[:, :96]).clamp(-9, 9), 32
    )
    w = torch.from_numpy(np.random.default_rng(2).integers(0, 0x70, (34, 96), np.uint8)).view(
        torch.float8_e4m3fn
    )
    byte = torch.tensor([[0, 1, 127], [130, 200, 120]], dtype=torch.uint8)
    wide = torch.from_numpy(np.ldexp(np.float32(1), byte.numpy().astype(np.int32) - 127))
    how = Gemv(2, 64, 2)
    plain = block_gemm.gemm(x, x_scale, w, wide, (32, 32), how=how, out=torch.empty(2, 34))
    for scale in (byte, byte.view(torch.float8_e8m0fnu)):
        out = block_gemm.gemm(x, x_scale, w, scale, (32, 32), how=how, out=torch.empty(2, 34))
        assert torch.equal(out.view(torch.int32), plain.view(torch.int32)), "E8M0 scales give other bits"
    byte[0, 2] = 255
    out = block_gemm.gemm(x, x_scale, w, byte, (32, 32), how=how, out=torch.empty(2, 34))
    assert bool(out[:, :32].isnan().all()), "byte 255 is NaN"
    assert not bool(out[:, 32:].isnan().any()), "byte 255 of another block is NaN here"


def check_topk() -> None:
    """Any choice of the k best becomes that of the lowest of equals, in rising order."""
    draw = np.random.default_rng(3)
    for columns, k in ((40, 8), (1500, 64), (30, 64)):
        scores = draw.integers(-3, 4, (3, columns)).astype(np.float32)
        scores[0, :5] = -np.inf
        lengths = np.array([columns, columns // 2, min(k, columns)])
        chosen, wanted = np.full((3, k), -1, np.int32), np.full((3, k), -1, np.int32)
        for row, length in enumerate(lengths):
            best = np.lexsort((draw.random(length), -scores[row, :length]))[:k]
            chosen[row, : len(best)] = draw.permutation(best)
            lowest = torch_topk.reference(scores[row : row + 1], lengths[row : row + 1], k)[0]
            wanted[row, : len(best)] = np.sort(lowest[lowest >= 0])
        got = triton_topk.lowest_of_equals(
            torch.from_numpy(scores), torch.from_numpy(lengths.astype(np.int32)), torch.from_numpy(chosen)
        )
        assert np.array_equal(got.numpy(), wanted), f"top-k of {columns} columns"


def same(expected: np.ndarray, got: np.ndarray, layout: RowLayout | None = None) -> None:
    difference = testing.first_difference(expected, got, layout)
    assert difference is None, difference


def main() -> None:
    assert triton_kv.INTERPRETED, "set TRITON_INTERPRET=1"
    bits = latents()
    for rung in RUNGS:
        layout = RowLayout.parse(rung)
        check_restage(layout, check_write(layout, bits))
    check_every_code()
    check_spread(bits)
    check_quantize()
    check_e8m0()
    check_topk()
    print("exact")


if __name__ == "__main__":
    main()
