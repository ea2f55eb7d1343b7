"""Searches the block-FP8 GEMM's parameters on this card: `python -m shardmill.kernels.tune --shape N,K --block 32`.

For each number of tokens every candidate is compiled (in parallel processes), its result is checked against an
exact product, and the right ones are timed over rotated weights in CUDA graphs. Two files come out: vLLM's JSON
for the stock-style kernel, usable in vLLM as it is, and a "decode," file for ours. A file is rewritten after each
number of tokens; numbers that it already holds are not measured again, so a search may be stopped and resumed.

BLOCK_SIZE_K of the stock-style kernel is always the scale block's: it decides the order of its sums. What else may
change bits is the tensor-core instruction, which follows the tile's rows: see `keep_bits`.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from shardmill.kernels import block_gemm, timing
from shardmill.kernels.block_gemm import CONFIGS, Block, Decode, Gemv, Stock

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ERROR_MAX = 2e-3  # relative to the exact product; bf16 rounding alone is 1.7e-3
COMPILE_SECONDS_MAX = 60

How = Stock | Decode | Gemv


@dataclass(frozen=True, slots=True)
class Best:
    """What a search found for a number of tokens, in seconds; `decode` is None above 8 tokens."""

    tokens: int
    limit: float  # the weights' bytes over the card's copy bandwidth
    default: float
    stock: Stock
    stock_seconds: float
    decode: Decode | Gemv | None
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class Problem:
    """One GEMM with weights enough to defeat the cache, and its exact product."""

    block: Block
    x: torch.Tensor
    x_scale: torch.Tensor
    weights: list[tuple[torch.Tensor, torch.Tensor]]
    out: torch.Tensor
    exact: torch.Tensor


def stock_candidates(tokens: int, block: Block, keep_bits: bool = False) -> list[Stock]:
    """The search space of the stock-style kernel. BLOCK_SIZE_K is the scale block's, always.

    keep_bits: tiles of 64 rows or more alone. On Hopper they run on another tensor-core instruction than smaller
    ones, with sums that differ in their last bits; so does the default config, which has 64.
    """
    rows = (64, 128) if keep_bits else tuple(m for m in (16, 32, 64, 128) if m <= max(16, 2 * tokens))[-2:]
    columns = (32, 64, 128) if tokens <= 64 else (64, 128, 256)
    pace = [(w, s) for w in (2, 4) for s in (3, 4, 6, 8)] if tokens <= 16 else _PACE
    grouped = {m: 1 if tokens <= m else 16 for m in rows}
    return [
        Stock(m, n, block[1], grouped[m], warps, stages)
        for m in rows
        for n in columns
        for warps, stages in pace
    ]


_PACE = [(warps, stages) for warps in (4, 8) for stages in (2, 3, 4, 6)]


def decode_candidates(tokens: int, block: Block) -> list[Decode | Gemv]:
    """The search space of the decode kernels; empty above 8 tokens."""
    if tokens > block_gemm.DECODE_TOKENS:
        return []
    rows = [Gemv(*how) for how in _GEMV] if tokens <= 4 else []
    tiles = [Decode(*how) for how in _DECODE if block_gemm.MMA_ROWS * how[0] <= block[0]]
    late: list[Decode | Gemv] = [*rows, *tiles]
    return [*late, *(replace(how, early=True) for how in late)]


_GEMV = (
    (1, 2048, 1),
    (1, 4096, 2),
    (2, 1024, 1),
    (2, 1024, 2),
    (2, 2048, 2),
    (4, 1024, 2),
    (4, 1024, 4),
    (4, 2048, 4),
    (2, 2048, 4),
    (2, 4096, 4),
    (4, 4096, 8),
    (8, 1024, 4),
)
_DECODE = (
    (1, 4, 4),
    (1, 8, 4),
    (1, 4, 8),
    (1, 8, 2),
    (2, 2, 4),
    (2, 4, 4),
    (2, 4, 2),
    (2, 8, 2),
    (2, 2, 8),
    (4, 2, 4),
)


def tune(
    N: int,
    K: int,
    block: Block,
    tokens: tuple[int, ...] = TOKENS,
    folder: Path = CONFIGS,
    say: Callable[[str, int, int], None] = lambda what, done, of: None,
    keep_bits: bool = False,
) -> Iterator[Best]:
    """Searches each number of tokens that the files in `folder` lack; writes the files after each.

    `say(what, done, of)` hears of progress.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    card = block_gemm.device_name(device)
    stock_file = folder / block_gemm.config_name(N, K, block, card)
    decode_file = folder / block_gemm.decode_config_name(N, K, block, card)
    missing = [m for m in tokens if str(m) not in _read(stock_file)]
    if not missing:
        return
    bandwidth = timing.copy_bandwidth(device)
    weights = random_weights(N, K, block, device)
    with multiprocessing.get_context("spawn").Pool(min(os.cpu_count() or 1, 16)) as pool:
        for m in missing:
            stocks, decodes = stock_candidates(m, block, keep_bits), decode_candidates(m, block)
            right = _compiled(pool, [*stocks, *decodes], m, K, block, say)
            case = problem(m, block, weights)
            times: dict[How, float] = {}
            for done, how in enumerate(right):
                say(f"timing {m} tokens", done, len(right))
                if error_of(case, how) <= ERROR_MAX:
                    times[how] = seconds(case, how)
            default = seconds(case, Stock.default(block))
            times.setdefault(Stock.default(block), default)  # so that no search ends slower than it began
            best = _best(m, N * K / bandwidth, default, times)
            if best.decode is not None:
                _write(decode_file, m, best.decode.to_json())
            _write(stock_file, m, best.stock.to_json())  # last: its entry says that this number is done
            yield best


def seconds(case: Problem, how: How) -> float:
    """Median seconds of a call over the rotated weights."""
    calls = [lambda w=w, s=s: _call(case, w, s, how) for w, s in case.weights]
    return timing.graph_seconds(calls * (2 if len(calls) > 4 else 6), replays=5)


def _best(tokens: int, limit: float, default: float, times: dict[How, float]) -> Best:
    stock = min((how for how in times if isinstance(how, Stock)), key=times.__getitem__)
    decodes = [how for how in times if not isinstance(how, Stock)]
    decode = min(decodes, key=times.__getitem__) if decodes else None
    return Best(
        tokens, limit, default, stock, times[stock], decode, times[decode] if decode else float("nan")
    )


def _compiled(
    pool: Any, hows: list[How], tokens: int, K: int, block: Block, say: Callable[[str, int, int], None]
) -> list[How]:
    """Those candidates that compile and run on this card. The compiled code stays in Triton's own cache."""
    jobs = [pool.apply_async(_compiles, (how, tokens, K, block)) for how in hows]
    good = []
    for done, (how, job) in enumerate(zip(hows, jobs, strict=True)):
        say(f"compiling for {tokens} tokens", done, len(hows))
        try:
            if job.get(COMPILE_SECONDS_MAX):
                good.append(how)
        except multiprocessing.TimeoutError:
            continue
    return good


def _compiles(how: How, tokens: int, K: int, block: Block) -> bool:
    """In a worker: runs a candidate on a small matrix of the same K."""
    device = torch.device("cuda", 0)
    N = 2 * max(block[0], 64)
    x = torch.zeros((tokens, K), device=device).to(torch.float8_e4m3fn)
    w = torch.zeros((N, K), device=device).to(torch.float8_e4m3fn)
    x_scale = torch.ones((tokens, -(-K // block[1])), device=device)
    w_scale = torch.ones((-(-N // block[0]), -(-K // block[1])), device=device)
    try:
        block_gemm.gemm(x, x_scale, w, w_scale, block, how=how)
        torch.cuda.synchronize()
    except (RuntimeError, triton.errors.TritonError):
        return False
    return True


def random_weights(
    N: int, K: int, block: Block, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights and scales, as many pairs as exceed four times the L2 cache."""
    grid = (-(-N // block[0]), -(-K // block[1]))
    return [
        (
            torch.randn((N, K), device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn),
            torch.rand(grid, device=device) * 0.01 + 0.001,
        )
        for _ in range(timing.rotations(N * K, device))
    ]


def problem(tokens: int, block: Block, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> Problem:
    w, w_scale = weights[0]
    N, K = w.shape
    x, x_scale = block_gemm.quantize(
        torch.randn((tokens, K), device=w.device, dtype=torch.bfloat16), block[1]
    )
    out = torch.empty((tokens, N), device=w.device, dtype=torch.bfloat16)
    return Problem(block, x, x_scale, weights, out, exact_product(x, x_scale, w, w_scale, block))


def exact_product(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, block: Block
) -> torch.Tensor:
    """The product in f64, [M, N]."""
    N, K = w.shape
    w64 = (
        w.double() * w_scale.double().repeat_interleave(block[0], 0)[:N].repeat_interleave(block[1], 1)[:, :K]
    )
    return (x.double() * x_scale.double().repeat_interleave(block[1], 1)[:, :K]) @ w64.T


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def error_of(case: Problem, how: How) -> float:
    """Relative error of a candidate on the first weights; NaN where it leaves part of the output unwritten."""
    case.out.fill_(float("nan"))
    _call(case, *case.weights[0], how)
    return relative_error(case.out, case.exact)


def _call(case: Problem, w: torch.Tensor, w_scale: torch.Tensor, how: How) -> None:
    block_gemm.gemm(case.x, case.x_scale, w, w_scale, case.block, out=case.out, how=how)


def _read(path: Path) -> dict[str, dict[str, int]]:
    known: dict[str, dict[str, int]] = json.loads(path.read_text()) if path.exists() else {}
    return known


def _write(path: Path, tokens: int, entry: dict[str, int]) -> None:
    """Adds an entry to a file, which is replaced whole."""
    known = _read(path) | {str(tokens): entry}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps({m: known[m] for m in sorted(known, key=int)}, indent=4) + "\n")
    draft.replace(path)


HEADING = "tokens   default     tuned  decode kernel      limit   of the limit"


def line(best: Best) -> str:
    """One row of the summary, in microseconds."""
    decode = f"{best.decode_seconds * 1e6:9.1f} us" if best.decode else " " * 11 + "-"
    fastest = min(best.stock_seconds, best.decode_seconds) if best.decode else best.stock_seconds
    return (
        f"{best.tokens:6d} {best.default * 1e6:9.1f} {best.stock_seconds * 1e6:9.1f}   {decode} "
        f"{best.limit * 1e6:10.1f} {best.limit / fastest:14.2f}"
    )


def parse_shape(text: str) -> tuple[int, int]:
    """ "12576,4096" -> (12576, 4096): rows per rank and columns of the weight."""
    rows, _, columns = text.partition(",")
    if not (rows.isdigit() and columns.isdigit() and int(rows) and int(columns)):
        raise ValueError(
            f"shape {text!r}: expected N,K, the weight's rows and columns per rank, as in 12576,4096"
        )
    return int(rows), int(columns)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tune the block-FP8 GEMM on this card.")
    parser.add_argument("--shape", required=True, type=parse_shape, help="N,K of the weight per rank")
    parser.add_argument("--block", type=int, default=32, help="scale block, 32 or 128")
    parser.add_argument("--m", default=",".join(map(str, TOKENS)), help="numbers of tokens")
    parser.add_argument("--out", type=Path, default=CONFIGS, help="folder of the JSON files")
    parser.add_argument("--keep-bits", action="store_true", help="only tiles whose sums equal the default's")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("no GPU found: a configuration is measured on the card that will use it\n")
        return 1
    tokens = tuple(int(m) for m in options.m.split(","))
    N, K = options.shape
    sys.stdout.write(HEADING + "\n")
    for best in tune(N, K, (options.block, options.block), tokens, options.out, keep_bits=options.keep_bits):
        sys.stdout.write(line(best) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
