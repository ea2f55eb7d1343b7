"""The whole table of what the kernels must reach, in one run: `python3 -m tests.kernels.gpu bench [--json FILE]`.

It needs python3 with torch, triton and numpy. C is the bandwidth of a Triton copy of 1 GiB in the same process,
read plus written. Data are fresh and random, outputs poisoned, times medians of CUDA-graph replays; whatever fits
the cache is rotated over four times its size.
"""

import argparse
import json
import math
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from shardmill.kernels import block_gemm, testing, timing, triton_kv, tune
from shardmill.kernels.block_gemm import Stock
from shardmill.kernels.kv_row import RowLayout

DEVICE = torch.device("cuda")
ROWS = 128 * 2048  # rows of a gather, and tokens of a write
POOL = 1 << 20  # rows of the cache
PAGE_ROWS = 64
TOP_K = 2048


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of the table. `must` and `stretch` are lower bounds, or upper ones where `at_most`."""

    item: str
    got: float
    unit: str
    must: float
    stretch: float
    microseconds: float
    at_most: bool = False

    def verdict(self) -> str:
        sign = -1 if self.at_most else 1
        if sign * self.got >= sign * self.stretch:
            return "stretch"
        return "must" if sign * self.got >= sign * self.must else "MISSED"


@triton.jit
def gather_kernel(source, index, target, rows, R: tl.constexpr):
    """The plain gather of 656-byte rows that restaging competes with."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    at = tl.load(index + row, mask=row < rows, other=0).to(tl.int64)[:, None] * 164
    k = tl.arange(0, 256)[None, :]
    live = (row < rows)[:, None] & (k < 164)
    tl.store(target + row.to(tl.int64)[:, None] * 164 + k, tl.load(source + at + k, mask=live), mask=live)


def latents(rows: int) -> torch.Tensor:
    """bf16 [rows, 512], rows of different loudness."""
    loud = torch.exp(torch.randn((rows, 1), device=DEVICE))
    return (torch.randn((rows, 512), device=DEVICE) * loud).bfloat16()


def empty_cache(layout: RowLayout, rows: int) -> torch.Tensor:
    shape = (rows // PAGE_ROWS, PAGE_ROWS, layout.row_bytes)
    return torch.full(shape, testing.POISON, dtype=torch.uint8, device=DEVICE)


def write_rows(C: float) -> Iterator[Row]:
    """262,144 rows in the order of a prefill, pages shuffled; then each row to a place of its own."""
    x = latents(ROWS)
    pages = torch.randperm(ROWS // PAGE_ROWS, device=DEVICE)[:, None] * PAGE_ROWS
    by_page = (pages + torch.arange(PAGE_ROWS, device=DEVICE)).flatten()
    shuffled = torch.randperm(ROWS, device=DEVICE)
    for tag, must, stretch in (
        ("8888-stock", 0.85, 0.92),
        ("6666-fine", 0.72, 0.85),
        ("8666-fine", 0.64, 0.80),
        ("8666p-fine", 0.64, 0.80),
    ):
        layout = RowLayout.parse(tag)
        cache = empty_cache(layout, ROWS)
        size = ROWS * (1024 + 8 + layout.row_bytes)
        for order, slots in (("in page order", by_page), ("each row elsewhere", shuffled)):
            seconds = timing.graph_seconds(
                [lambda c=cache, s=slots, f=layout: triton_kv.write(x, c, s, f)] * 2
            )
            yield Row(f"write {tag}, {order}", size / seconds / C, "C", must, stretch, seconds * 1e6)


def restage_rows(C: float) -> Iterator[Row]:
    """Gathers of 128 requests x 2048 rows, whole pages, and single requests."""
    x, slots = latents(POOL), torch.arange(POOL, device=DEVICE)
    index = torch.randint(0, POOL, (ROWS,), device=DEVICE, dtype=torch.int32)
    out = torch.full((ROWS, 656), testing.POISON, dtype=torch.uint8, device=DEVICE)
    pages = torch.randperm(POOL // PAGE_ROWS, device=DEVICE)[: ROWS // PAGE_ROWS].int()
    select, gather = plain_gathers(index, out)
    yield Row("torch.index_select of 656-byte rows", ROWS * 1312 / select / C, "C", 0, 0, select * 1e6)
    yield Row("best Triton gather of 656-byte rows", ROWS * 1312 / gather / C, "C", 0, 0, gather * 1e6)
    for tag, musts, stretches in (
        ("6666-fine", (0.85, 0.85), (0.92, 0.92)),
        ("8888-stock", (0.84, 0.88), (0.93, 0.93)),
        ("8666-fine", (0.75, 0.75), (0.85, 0.85)),
        ("8666p-fine", (0.75, 0.75), (0.85, 0.85)),
    ):
        layout = RowLayout.parse(tag)
        cache = empty_cache(layout, POOL)
        triton_kv.write(x, cache, slots, layout)
        size = ROWS * (layout.row_bytes + 656)
        t = timing.graph_seconds([lambda c=cache, f=layout: triton_kv.restage_gather(c, index, out, f)] * 2)
        yield Row(f"restage {tag}, gather", size / t / C, "C", musts[0], stretches[0], t * 1e6)
        yield Row(f"restage {tag}, gather, to index_select", t / select, "x", 0.60, 0.50, t * 1e6, True)
        if tag == "6666-fine":
            yield Row(
                f"restage {tag}, gather, to the Triton gather", t / gather, "x", 0.90, 0.90, t * 1e6, True
            )
        p = timing.graph_seconds([lambda c=cache, f=layout: triton_kv.restage_pages(c, pages, out, f)] * 2)
        yield Row(f"restage {tag}, page", size / p / C, "C", musts[1], stretches[1], p * 1e6)
        for requests, must, stretch in ((1, 4.0, 3.0), (8, 10.0, 7.5)):
            t = small_restage(cache, index, out, layout, requests * TOP_K) * 1e6
            yield Row(f"restage {tag}, {requests} request(s)", t, "us", must, stretch, t, True)


def plain_gathers(index: torch.Tensor, out: torch.Tensor) -> tuple[float, float]:
    """Seconds of torch.index_select and of the best plain Triton gather over 656-byte rows."""
    stock = torch.randint(0, 256, (POOL, 656), dtype=torch.uint8, device=DEVICE)
    long = index.long()
    select = timing.graph_seconds([lambda: torch.index_select(stock, 0, long, out=out)])
    source, target = stock.view(torch.int32), out.view(torch.int32)
    gather = min(
        timing.graph_seconds(
            [lambda r=r, w=w: gather_kernel[(ROWS // r,)](source, index, target, ROWS, R=r, num_warps=w)] * 2
        )
        for r, w in ((2, 2), (4, 4), (8, 4))
    )
    return select, gather


def small_restage(
    cache: torch.Tensor, index: torch.Tensor, out: torch.Tensor, layout: RowLayout, rows: int
) -> float:
    """Seconds of one launch of few rows, over rows and outputs that no other launch of the graph touches."""
    calls: list[Callable[[], None]] = []
    for begin in range(0, ROWS, rows):
        part = slice(begin, begin + rows)
        calls.append(lambda p=part: triton_kv.restage_gather(cache, index[p], out[p], layout))
    return timing.graph_seconds(calls)


def gemm_rows(C: float) -> Iterator[Row]:
    """Decode with the shipped parameters, against the weights' bytes at C, and the stock-style kernel's tuning."""
    N, K, block = 12576, 4096, (32, 32)
    weights = tune.random_weights(N, K, block, DEVICE)
    for tokens, must, stretch in ((1, 0.78, 0.88), (2, 0.66, 0.80), (4, 0.50, 0.75), (8, 0.50, 0.75)):
        yield from gemm_row(C, tokens, block, weights, must, stretch)
    for tokens, must, stretch in ((1, 8.0, 10.5), (8, 3.3, 3.8)):
        problem = tune.problem(tokens, block, weights)
        tuned = block_gemm.stock_config(tokens, N, K, block, DEVICE)
        seconds, default = tune.seconds(problem, tuned), tune.seconds(problem, Stock.default(block))
        item = f"GEMM [32,32] M={tokens}, stock-style kernel: default / tuned"
        yield Row(item, default / seconds, "x", must, stretch, seconds * 1e6)
    block = (128, 128)
    weights = tune.random_weights(4096, 4096, block, DEVICE)
    yield from gemm_row(C, 1, block, weights, 0.58, 0.75)


def gemm_row(
    C: float, tokens: int, block: tuple[int, int], weights: list, must: float, stretch: float
) -> Iterator[Row]:
    N, K = weights[0][0].shape
    problem = tune.problem(tokens, block, weights)
    how = block_gemm.choose(tokens, N, K, block, DEVICE)
    error = tune.error_of(problem, how)
    seconds = tune.seconds(problem, how)
    name = f"GEMM [{block[0]},{block[1]}] N={N} K={K} M={tokens}"
    yield Row(f"{name}, {type(how).__name__}", N * K / C / seconds, "of N*K/C", must, stretch, seconds * 1e6)
    yield Row(f"{name}, error", error, "relative", 2e-3, 1.7e-3, math.nan, True)


# The linear-attention projection at 2 ranks and at 1, and two of DeepSeek-V4's (transformers' class defaults).
E8M0_SHAPES = ((12576, 4096), (24896, 4096), (32768, 1024), (4096, 8192))


def e8m0_rows(C: float) -> Iterator[Row]:
    """[32,32] with E8M0 scales: the best parameters of a search, the share of the weights' bytes at C, equal bits."""
    block = (32, 32)
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        for N, K in E8M0_SHAPES:
            weights = powers_of_two(tune.random_weights(N, K, block, DEVICE))
            for tokens, must, stretch in ((1, 0.85, 0.92), (2, 0.66, 0.80), (4, 0.50, 0.75), (8, 0.50, 0.75)):
                if tokens > 1 and E8M0_SHAPES[0] != (N, K):
                    continue
                yield from e8m0_row(C, pool, tokens, block, weights, must, stretch)


def powers_of_two(weights: list) -> list:
    """The same weights under scales of 2**-17 to 2**-5."""
    drawn = [torch.randint(110, 122, s.shape, device=DEVICE, dtype=torch.uint8) for _, s in weights]
    return [(w, torch.exp2(byte.float() - 127)) for (w, _), byte in zip(weights, drawn, strict=True)]


def e8m0_row(
    C: float, pool: Any, tokens: int, block: tuple[int, int], weights: list, must: float, stretch: float
) -> Iterator[Row]:
    N, K = weights[0][0].shape
    hows = tune._compiled(pool, tune.decode_candidates(tokens, block), tokens, K, block, lambda *_: None)
    plain = tune.problem(tokens, block, weights)
    times = {how: tune.seconds(plain, how) for how in hows if tune.error_of(plain, how) <= tune.ERROR_MAX}
    late = [how for how in times if not how.early]
    kept = [*sorted(times, key=times.__getitem__)[:3], min(late, key=times.__getitem__)]
    as_bytes = [(w, (torch.log2(s) + 127).to(torch.uint8)) for w, s in weights]
    bytewise = replace(plain, weights=as_bytes)
    equal = True
    for how in kept:
        tune._call(plain, *weights[0], how)
        wanted = plain.out.clone()
        plain.out.fill_(float("nan"))
        tune._call(bytewise, *as_bytes[0], how)
        equal = equal and torch.equal(wanted.view(torch.int16), plain.out.view(torch.int16))
    found = {how: tune.seconds(bytewise, how) for how in kept}
    name = f"GEMM [32,32] N={N} K={K} M={tokens}"
    for label, rows in (("E8M0 scales", found), ("f32 scales", times)):
        for early in (False, True):
            best = min((how for how in rows if how.early == early), key=rows.__getitem__, default=None)
            if best is not None:
                item = f"{name}, {label}, {best.to_json()}"
                got = N * K / C / rows[best]
                yield Row(item, got, "of N*K/C", must if early else 0, stretch * early, rows[best] * 1e6)
    yield Row(f"{name}, E8M0 against f32 scales: equal bits", float(equal), "(1: equal)", 1, 1, math.nan)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--only", metavar="WORD,...", help="only these parts: write, restage, gemm, e8m0")
    options = parser.parse_args(arguments)
    card = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    C = timing.copy_bandwidth(DEVICE)
    print(f"{card}; C = {C / 1e12:.3f} TB/s\n")
    print("| item | reached | must | stretch | us | |\n|---|---|---|---|---|---|")
    rows = []
    words = options.only.split(",") if options.only else [""]
    for part in (write_rows, restage_rows, gemm_rows, e8m0_rows):
        if not any(word in part.__name__ for word in words):
            continue
        for row in part(C):
            rows.append(row)
            bounds = f"{row.must:g} | {row.stretch:g}" if row.must else "- | -"
            verdict = row.verdict() if row.must else ""
            print(
                f"| {row.item} | {row.got:.4g} {row.unit} | {bounds} | {row.microseconds:.2f} | {verdict} |",
                flush=True,
            )
        torch.cuda.empty_cache()
    if options.json:
        figures = {"card": card, "C": C, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0
