"""Every exactness test that needs a GPU, in one run: `python3 -m tests.kernels.gpu checks [--oracles FOLDER]`.

It needs python3 with torch, triton and numpy, nothing else. Zero tolerance everywhere but the GEMM. FOLDER may hold
the shared objects of the vLLM 0.33.0 wheel (or their .xz): then its writer, its quantizer and FlashMLA's sparse
decode are compared with ours.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import torch
import triton

from shardmill.kernels import block_gemm, kv_row, testing, torch_topk, triton_kv, triton_topk, tune
from shardmill.kernels.block_gemm import Decode, Gemv, Stock
from shardmill.kernels.formats import bf16_to_f32
from shardmill.kernels.kv_row import RUNGS, RowLayout
from tests.kernels.gpu import golden, oracles

DEVICE = torch.device("cuda")
PAGE_ROWS = 64
GAP = 48  # bytes between pages: nobody may write there


def bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).to(DEVICE).view(torch.bfloat16)


def poisoned_cache(layout: RowLayout, pages: int, gap: int = GAP) -> tuple[torch.Tensor, torch.Tensor]:
    """A paged cache full of poison, and the memory it lies in, gaps included."""
    size = PAGE_ROWS * layout.row_bytes
    memory = torch.full((pages, size + gap), testing.POISON, dtype=torch.uint8, device=DEVICE)
    return memory[:, :size].unflatten(1, (PAGE_ROWS, layout.row_bytes)), memory


def check_rung(tag: str) -> list[str]:
    """All hostile rows and enumerations of one tag through write, gather and pages, on both paths."""
    layout = RowLayout.parse(tag)
    named = [*testing.hostile_latents(), ("every quotient", testing.every_quotient())]
    named += [("every bf16", testing.every_bf16()), ("random", testing.random_rows(9, 2000))]
    bits = np.concatenate([rows for _, rows in named])
    expected = kv_row.encode(layout.rung, bf16_to_f32(bits), layout.scales)
    restaged = kv_row.restage(layout.rung, expected)
    pages = len(bits) // PAGE_ROWS + 2
    slots = np.random.default_rng(0).permutation(pages * PAGE_ROWS)[: len(bits)].astype(np.int64)
    slots[::97] = -1
    failures = []
    for ptx in (True, False):
        path = "PTX" if ptx else "portable"
        for size in (1, 2, 4):
            cache, memory = poisoned_cache(layout, pages)
            triton_kv.write(
                bf16(bits), cache, torch.from_numpy(slots).to(DEVICE), layout, ptx=ptx, rows_per_program=size
            )
            whole = np.full((pages * PAGE_ROWS, layout.row_bytes), testing.POISON, np.uint8)
            whole[slots[slots >= 0]] = expected[slots >= 0]
            got = cache.cpu().numpy().reshape(-1, layout.row_bytes)
            failures += _told(f"{tag} write {path} R={size}", testing.first_difference(whole, got, layout))
            if not bool((memory[:, PAGE_ROWS * layout.row_bytes :] == testing.POISON).all()):
                failures.append(f"{tag} write {path} R={size}: bytes between pages changed")
        index = np.concatenate([slots, slots[:77], slots[:1]]).astype(np.int32)  # duplicates, an odd size
        wanted = np.concatenate([restaged, restaged[:77], restaged[:1]])
        wanted[index < 0] = testing.POISON
        for source in (cache, cache.contiguous()):
            for size in (1, 2, 4):
                out = torch.full((len(index), 656), testing.POISON, dtype=torch.uint8, device=DEVICE)
                rows = torch.from_numpy(index).to(DEVICE)
                triton_kv.restage_gather(source, rows, out, layout, ptx=ptx, rows_per_program=size)
                failures += _told(
                    f"{tag} gather {path} R={size}", testing.first_difference(wanted, out.cpu().numpy())
                )
        failures += _check_pages(layout, expected, restaged, ptx)
    return failures


def _check_pages(layout: RowLayout, expected: np.ndarray, restaged: np.ndarray, ptx: bool) -> list[str]:
    pages = len(expected) // PAGE_ROWS
    cache, _ = poisoned_cache(layout, pages)
    whole = torch.from_numpy(expected[: pages * PAGE_ROWS]).to(DEVICE)
    cache.copy_(whole.view(pages, PAGE_ROWS, layout.row_bytes))
    order = np.random.default_rng(1).permutation(pages).astype(np.int32)
    order[3] = -1
    wanted = restaged[: pages * PAGE_ROWS].reshape(pages, PAGE_ROWS, 656)[order]
    wanted[order < 0] = testing.POISON
    out = torch.full((pages * PAGE_ROWS, 656), testing.POISON, dtype=torch.uint8, device=DEVICE)
    triton_kv.restage_pages(cache, torch.from_numpy(order).to(DEVICE), out, layout, ptx=ptx)
    return _told(f"{layout.tag} pages", testing.first_difference(wanted.reshape(-1, 656), out.cpu().numpy()))


def _told(what: str, difference: str | None) -> list[str]:
    return [] if difference is None else [f"{what}: {difference}"]


def check_rungs() -> list[str]:
    """Hostile rows and enumerations, every rung and scale policy, each in a process of its own."""
    tags = [f"{rung}-{policy}" for rung in RUNGS for policy in ("stock", "fine")]
    with concurrent.futures.ProcessPoolExecutor(6, multiprocessing.get_context("spawn")) as pool:
        return [failure for failures in pool.map(check_rung, tags) for failure in failures]


def check_million() -> list[str]:
    """A million random rows have the golden digests, and both decoders restage them alike."""
    failures = []
    record = golden.read()
    digests: dict[str, list[str]] = {tag: [] for tag in golden.TAGS}
    slots = torch.arange(golden.CHUNK_ROWS, device=DEVICE)
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        for bits in threads.map(golden.chunk_bits, range(golden.CHUNKS)):
            x = bf16(bits)
            for tag in golden.TAGS:
                layout = RowLayout.parse(tag)
                cache = torch.empty(
                    (1, golden.CHUNK_ROWS, layout.row_bytes), dtype=torch.uint8, device=DEVICE
                )
                triton_kv.write(x, cache, slots, layout)
                digests[tag].append(threads.submit(testing.digest_of_rows, cache[0].cpu().numpy()))
                outs = [
                    torch.empty((golden.CHUNK_ROWS, 656), dtype=torch.uint8, device=DEVICE) for _ in range(2)
                ]
                for out, ptx in zip(outs, (True, False), strict=True):
                    triton_kv.restage_gather(cache, slots.int(), out, layout, ptx=ptx)
                if not torch.equal(*outs):
                    failures.append(f"{tag}: the two decoders differ on random rows")
        for tag, found in digests.items():
            if golden.whole([job.result() for job in found]) != record[tag]["all"]:
                failures.append(f"{tag}: a million random rows differ from the golden digest")
    return failures


def check_big_pool() -> list[str]:
    """Rows beyond 2**31 bytes of a pool are written and read where they belong."""
    layout = RowLayout.parse("8666")
    pages = (1 << 31) // (PAGE_ROWS * layout.row_bytes) + 3000
    cache = torch.full((pages, PAGE_ROWS, layout.row_bytes), testing.POISON, dtype=torch.uint8, device=DEVICE)
    bits = testing.random_rows(11, 999)
    slots = torch.from_numpy(np.random.default_rng(2).permutation(2999 * PAGE_ROWS)[:999]).to(DEVICE)
    slots = slots + (pages - 3000) * PAGE_ROWS
    triton_kv.write(bf16(bits), cache, slots, layout)
    out = torch.empty((999, 656), dtype=torch.uint8, device=DEVICE)
    triton_kv.restage_gather(cache, slots.int(), out, layout)
    expected = kv_row.restage("8666", kv_row.encode("8666", bf16_to_f32(bits)))
    untouched = bool((cache[:1000] == testing.POISON).all())
    return _told("big pool", testing.first_difference(expected, out.cpu().numpy())) + (
        [] if untouched else ["big pool: rows at its beginning changed"]
    )


def check_spread() -> list[str]:
    """The write kernel with an order stores the row of the permuted latent."""
    bits = testing.random_rows(12, 500)
    order = np.random.default_rng(3).permutation(512).astype(np.int32)
    layout = RowLayout.parse("6666")
    expected = kv_row.encode("6666", bf16_to_f32(bits[:, order]))
    failures = []
    for ptx in (True, False):
        cache = torch.full((500, 1, 416), testing.POISON, dtype=torch.uint8, device=DEVICE)
        slots = torch.arange(500, device=DEVICE)
        triton_kv.write(bf16(bits), cache, slots, layout, order=torch.from_numpy(order).to(DEVICE), ptx=ptx)
        failures += _told("spread", testing.first_difference(expected, cache[:, 0].cpu().numpy(), layout))
    return failures


def check_graph() -> list[str]:
    """Write, restage, quantize and GEMM run in a CUDA graph, which replays to the same bytes on new data."""
    layout = RowLayout.parse("8666")
    x = bf16(testing.random_rows(13, 256))
    slots = torch.randperm(256, device=DEVICE)
    cache = torch.zeros((4, 64, 444), dtype=torch.uint8, device=DEVICE)
    out = torch.zeros((256, 656), dtype=torch.uint8, device=DEVICE)
    w = torch.randn((96, 512), device=DEVICE).to(torch.float8_e4m3fn)
    w_scale = torch.rand((3, 16), device=DEVICE)
    codes = torch.empty((4, 512), dtype=torch.float8_e4m3fn, device=DEVICE)
    scales, product = torch.empty((4, 16), device=DEVICE), torch.empty((4, 96), device=DEVICE).bfloat16()

    def step() -> None:
        triton_kv.write(x, cache, slots, layout)
        triton_kv.restage_gather(cache, slots.int(), out, layout)
        block_gemm.quantize(x[:4], 32, codes, scales)
        block_gemm.gemm(codes, scales, w, w_scale, (32, 32), out=product)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    bits = testing.random_rows(14, 256)
    x.copy_(bf16(bits))
    graph.replay()
    replayed = product.clone()
    expected = kv_row.restage("8666", kv_row.encode("8666", bf16_to_f32(bits)))
    failures = _told("graph", testing.first_difference(expected, out.cpu().numpy()))
    step()
    return failures + ([] if torch.equal(replayed, product) else ["graph: the GEMM replays to other bytes"])


def check_quantize() -> list[str]:
    """Activation quantization equals its definition, x * (1 / scale), on both paths and odd sizes."""
    failures = []
    for group in (32, 128):
        bits = np.concatenate([rows for name, rows in testing.hostile_latents() if "NaN" not in name])
        x = bf16_to_f32(bits).reshape(-1, group)
        scale = (np.maximum(np.abs(x).max(1), np.float32(1e-10)) / np.float32(448)).astype(np.float32)
        with np.errstate(over="ignore"):
            y = np.clip(x * (np.float32(1) / scale)[:, None], -448, 448).astype(np.float32)
        expected = kv_row.fp6.e4m3_nearest(y).reshape(len(bits), -1)
        for ptx in (True, False):
            codes, scales = block_gemm.quantize(bf16(bits), group, ptx=ptx)
            same = np.array_equal(scales.cpu().numpy().reshape(-1), scale)
            failures += [] if same else [f"quantize {group}: scales differ"]
            got = codes.view(torch.uint8).cpu().numpy()
            failures += _told(f"quantize {group} codes", testing.first_difference(expected, got))
    return failures


GEMM_SHAPES = ((100, 4096, 32), (416, 1536, 32), (130, 4096, 128))
GEMM_TOKENS = (1, 3, 8, 17)


def check_gemm() -> list[str]:
    """Each GEMM kernel lies within 2e-3 of the f64 product: ragged N, bias, one token to many."""
    cases = [(M, N, K, block) for N, K, block in GEMM_SHAPES for M in GEMM_TOKENS]
    with concurrent.futures.ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        return [
            failure for failures in pool.map(_check_gemm, *zip(*cases, strict=True)) for failure in failures
        ]


def _check_gemm(M: int, N: int, K: int, side: int) -> list[str]:
    block = (side, side)
    x, x_scale = block_gemm.quantize(torch.randn((M, K), device=DEVICE, dtype=torch.bfloat16), block[1])
    w = torch.randn((N, K), device=DEVICE).to(torch.float8_e4m3fn)
    w_scale = torch.rand((-(-N // block[0]), K // block[1]), device=DEVICE) + 0.01
    bias = torch.randn(N, device=DEVICE, dtype=torch.bfloat16)
    exact = tune.exact_product(x, x_scale, w, w_scale, block)
    hows: list[tune.How] = [Stock.default(block), Stock(16, 32, block[1], 1, 4, 4)]
    hows += [Gemv(4, 1024, 2)] if M <= 4 else []
    hows += [Decode(1, 4, 4), Decode(2, 2, 8)] if M <= 8 else []
    failures = []
    for how in hows:
        for added in (None, bias):
            out = torch.full((M + 1, N), float("nan"), device=DEVICE, dtype=torch.bfloat16)
            block_gemm.gemm(x, x_scale, w, w_scale, block, out=out[:M], how=how, bias=added)
            wanted = exact if added is None else exact + added.double()
            error = tune.relative_error(out[:M], wanted)
            if not error <= tune.ERROR_MAX or not bool(out[M].isnan().all()):
                failures.append(f"GEMM M={M} N={N} K={K} {how}: relative error {error:.2e} or a row too many")
    return failures


def check_e8m0() -> list[str]:
    """E8M0 scales of either side give the bits of the f32 of the same powers of two, in every GEMM kernel."""
    failures = []
    for M, N, K in ((1, 100, 4096), (3, 416, 1536), (8, 96, 1024), (17, 130, 512)):
        x, _ = block_gemm.quantize(torch.randn((M, K), device=DEVICE, dtype=torch.bfloat16), 32)
        w = torch.randn((N, K), device=DEVICE).to(torch.float8_e4m3fn)
        of_x = torch.randint(100, 140, (M, K // 32), device=DEVICE, dtype=torch.uint8)
        of_w = torch.randint(0, 255, (-(-N // 32), K // 32), device=DEVICE, dtype=torch.uint8)
        wide = [torch.exp2(scale.double() - 127).float() for scale in (of_x, of_w)]
        hows: list[tune.How] = [Stock.default((32, 32)), Stock(16, 32, 32, 1, 4, 4)]
        hows += [Gemv(4, 1024, 2), Gemv(2, 2048, 4, early=True)] if M <= 4 else []
        hows += [Decode(1, 4, 4), Decode(2, 4, 2, early=True)] if M <= 8 else []
        for how in hows:
            plain = block_gemm.gemm(x, wide[0], w, wide[1], (32, 32), how=how)
            for x_scale, w_scale in (
                (wide[0], of_w),
                (of_x, wide[1]),
                (of_x, of_w.view(torch.float8_e8m0fnu)),
            ):
                out = block_gemm.gemm(x, x_scale, w, w_scale, (32, 32), how=how)
                if not torch.equal(out.view(torch.int16), plain.view(torch.int16)):
                    failures.append(f"E8M0 GEMM M={M} N={N} K={K} {how}: other bits than with f32 scales")
    return failures


def check_early() -> list[str]:
    """A GEMM that asks for its weights before the kernel in front of it is done gives the bits of one that waits."""
    x = torch.randn((1, 4096), device=DEVICE, dtype=torch.bfloat16)
    w = [torch.randn((4096, 4096), device=DEVICE).to(torch.float8_e4m3fn) for _ in range(4)]
    scale = torch.rand((128, 128), device=DEVICE) * 0.027  # products neither grow nor die out
    results = []
    for early in (False, True):
        y, how = x, Gemv(4, 1024, 2, early)
        for _ in range(25):
            for weight in w:  # each reads what the one in front of it has written
                codes, scales = block_gemm.quantize(y, 32)
                y = block_gemm.gemm(codes, scales, weight, scale, (32, 32), how=how)
        results.append(y.view(torch.int16))
    alive = bool(y.isfinite().all()) and bool(y.any())
    return [] if torch.equal(*results) and alive else ["early launch: other bits after 100 products in a row"]


def check_topk() -> list[str]:
    """Of equal scores the lower index, rising: any choice of the k best becomes the reference's."""
    failures = []
    for rows, columns, k in ((64, 8640, 512), (16, 2048, 512), (16, 700, 512), (8, 300, 512)):
        scores = torch.randint(-40, 40, (rows, columns), device=DEVICE).float()
        lengths = torch.randint(1, columns + 1, (rows,), device=DEVICE, dtype=torch.int32)
        noisy = scores.double() + torch.rand_like(scores, dtype=torch.float64) * 0.5  # equals in any order
        outside = torch.arange(columns, device=DEVICE) >= lengths[:, None]
        best = noisy.masked_fill(outside, float("-inf")).topk(min(k, columns), 1)
        chosen = torch.where(best.values.isinf(), -1, best.indices).int()
        chosen = torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=-1).contiguous()
        got = triton_topk.lowest_of_equals(scores, lengths, chosen).cpu().numpy()
        wanted = torch_topk.reference(scores.cpu().numpy(), lengths.cpu().numpy().astype(np.int64), k)
        for row in range(rows):
            rising = np.sort(wanted[row][wanted[row] >= 0])
            if not np.array_equal(got[row], np.pad(rising, (0, k - len(rising)), constant_values=-1)):
                failures.append(f"top-k of {columns} columns, row {row}: not the lowest of equals, rising")
    return failures


def check_bits() -> list[str]:
    """Tuned parameters that keep the tensor-core instruction keep every bit of the stock-style kernel."""
    N, K, block = 192, 4096, (32, 32)
    x, x_scale = block_gemm.quantize(torch.randn((8, K), device=DEVICE, dtype=torch.bfloat16), 32)
    w = torch.randn((N, K), device=DEVICE).to(torch.float8_e4m3fn)
    w_scale = torch.rand((6, K // 32), device=DEVICE) + 0.01
    results: dict[int, set[bytes]] = {}
    for rows in (16, 32, 64, 128):
        for columns, warps, stages in ((32, 4, 2), (64, 4, 4)):
            how = Stock(rows, columns, 32, 1, warps, stages)
            out = block_gemm.gemm(x, x_scale, w, w_scale, block, how=how)
            results.setdefault(rows, set()).add(out.view(torch.int16).cpu().numpy().tobytes())
    for rows, found in results.items():
        print(f"      BLOCK_SIZE_M {rows}: {len(found)} different result(s) over 2 tilings")
    together = [set.union(*(results[m] for m in group)) for group in ((16, 32), (64, 128))]
    print(f"      16 and 32 together: {len(together[0])}; 64 and 128 together: {len(together[1])}")
    return (
        []
        if all(len(found) == 1 for found in together)
        else ["tilings of one instruction differ in their bits"]
    )


CHECKS = (
    check_rungs,
    check_million,
    check_big_pool,
    check_spread,
    check_graph,
    check_quantize,
    check_gemm,
    check_e8m0,
    check_early,
    check_topk,
    check_bits,
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--oracles", type=Path, default=os.environ.get("SHARDMILL_ORACLES"))
    parser.add_argument(
        "--only", metavar="WORD,...", help="only the checks whose name has one of these words"
    )
    options = parser.parse_args(arguments)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    failures = 0
    checks = [*CHECKS, *(oracles.checks(Path(options.oracles)) if options.oracles else [])]
    words = options.only.split(",") if options.only else [""]
    for check in checks:
        if not any(word in check.__name__ for word in words):
            continue
        begin = time.monotonic()
        found = check()
        state = "ok  " if not found else "FAIL"
        print(
            f"{state}  {(check.__doc__ or check.__name__).splitlines()[0]} ({time.monotonic() - begin:.1f} s)",
            flush=True,
        )
        for failure in found[:5]:
            print(f"      {failure}")
        failures += len(found)
    if not options.oracles:
        print("skipped: comparison with vLLM's own kernels (give --oracles FOLDER)")
    print("all exact" if not failures else f"{failures} failures")
    return 1 if failures else 0
