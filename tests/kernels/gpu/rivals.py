"""What rows of other systems lose beside ours: `python -m tests.kernels.gpu.rivals [--latents FILE] [--costs FILE]`.

Error of the attention's output against unrounded latents, relative to the stock 656 B row: mean and Student's 95 %
interval, over seeds of five kinds of synthetic latents, and over the layers of a served model where FILE is the .npz
that `make gpu-forward` keeps (its case `child, audited`). `--costs` takes the JSON of `make gpu-bench`: what restaging
a request's 2,048 rows takes on that card.

NVFP4 rows hold E2M1 codes with an E4M3 scale a group of 16: 256 + 32 bytes, and 16 (304 B, for GLM-5.3-Flash on
SM120) or 64 (352 B, vLLM's nvfp4_fp8_ds_mla) that hold no latent. So all of them lose the same. Their cards attend
them natively; ours are restaged. Rows of five bits do not exist: E2M2 or integer codes with the same scales take
320 + 32 bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from scipy.linalg import hadamard
from scipy.stats import t

from shardmill.kernels import kv_row
from shardmill.kernels.formats import bf16_to_f32, f32_to_bf16
from tests.kernels.gpu import distributions

SEEDS, ROWS, QUERIES, GROUP = range(5), 192, 16, 16
SCALE = 256**-0.5  # of the model's 256 query dimensions
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
INT5 = np.arange(16) + 0.5
SHRINKS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8)
E2M2 = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7])
Stored = Callable[[np.ndarray], np.ndarray]


def nearest(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Each value's nearest number of the grid, with its sign."""
    edges = (grid[1:] + grid[:-1]) / 2
    return np.copysign(grid[np.searchsorted(edges, np.abs(values))], values)


def grouped(x: np.ndarray, grid: np.ndarray, shrink: float = 1.0) -> np.ndarray:
    """f32 [rows, 512] as `grid` codes under E4M3 scales of 16, beneath one f32 scale of the tensor."""
    groups = x.reshape(len(x), -1, GROUP).astype(np.float64)
    amax = np.abs(groups).max(-1, keepdims=True)
    tensor = max(amax.max() / (grid[-1] * 448), 1e-30)
    scale = (amax * shrink / grid[-1] / tensor).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * tensor
    codes = nearest(np.divide(groups, scale, out=np.zeros_like(groups), where=scale > 0), grid)
    return (codes * scale).reshape(x.shape).astype(np.float32)


def turned(x: np.ndarray, stored: Stored) -> np.ndarray:
    """What `stored` makes of the rows after a Hadamard rotation of all 512 elements, turned back."""
    turn = hadamard(512) / np.sqrt(512)
    return (stored((x @ turn).astype(np.float32)) @ turn.T).astype(np.float32)


def searched(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """`grouped` with the scale, among seven below the largest element's, whose squared error is least."""
    tries = [grouped(x, grid, shrink) for shrink in SHRINKS]
    losses = [np.square(t - x).reshape(len(x), -1, GROUP).sum(-1) for t in tries]
    best = np.argmin(losses, axis=0)
    groups = np.stack([t.reshape(len(x), -1, GROUP) for t in tries])
    return np.take_along_axis(groups, best[None, :, :, None], 0)[0].reshape(x.shape)


def integers(x: np.ndarray) -> np.ndarray:
    """Five-bit integers under searched scales, of rotated rows."""
    return turned(x, lambda y: searched(y, INT5))


def restaged(x: np.ndarray) -> np.ndarray:
    """The same as FlashMLA's FP8 rows could hold them: rounded once more, to E4M3 under fine scales."""
    return ours("8888-fine")(f32_of_bf16(integers(x)))


def f32_of_bf16(x: np.ndarray) -> np.ndarray:
    return bf16_to_f32(f32_to_bf16(x.astype(np.float32)))


def ours(tag: str) -> Stored:
    rung, _, policy = tag.partition("-")
    return lambda x: kv_row.decode(rung, kv_row.encode(rung, x, policy or None))


RESTAGED, NATIVE, NONE = "restaged", "native (SM100, SM120)", "none exists"
ROWS_OF: dict[str, tuple[int, str, Stored]] = {
    "8888-fine": (528, RESTAGED, ours("8888-fine")),
    "8666-fine": (444, RESTAGED, ours("8666-fine")),
    "6666f-fine": (432, RESTAGED, ours("6666f-fine")),
    "6666-fine": (416, RESTAGED, ours("6666-fine")),
    "5-bit integers, rotated, restaged to BF16": (352, NONE, integers),
    "5-bit integers, rotated, restaged to E4M3": (352, NONE, restaged),
    "5-bit E2M2": (352, NONE, lambda x: grouped(x, E2M2)),
    "NVFP4 of 288, 304, 352 B": (288, NATIVE, lambda x: grouped(x, E2M1)),
    "NVFP4, rotated": (288, NONE, lambda x: turned(x, lambda y: grouped(y, E2M1))),
}


def ratios(stored: Stored, kind: str) -> np.ndarray:
    """Attention's error relative to the stock row's, one for each seed."""
    found = []
    for seed in SEEDS:
        x = distributions.latents(kind, ROWS, seed=100 + seed)
        found.append(ratio(stored, x, distributions.queries(x, QUERIES, seed=200 + seed)))
    return np.array(found)


def ratio(stored: Stored, x: np.ndarray, q: np.ndarray) -> float:
    stock = distributions.errors(x, ours("656")(x), q)[1]
    return distributions.errors(x, stored(x), q)[1] / stock


def served(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """(latents f32 [rows, 512], queries f64 [heads of all tokens, 512], scaled as the model scales) of each layer."""
    held = np.load(path)
    layers = sorted(name.removeprefix("latents/") for name in held if name.startswith("latents/"))
    return [
        (f32_of_bf16(held[f"latents/{n}"]), held[f"queries/{n}"].astype(np.float64).reshape(-1, 512) * SCALE)
        for n in layers
    ]


def cell(values: np.ndarray) -> str:
    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.2f} ± {half:.2f}"


def costs(path: Path) -> dict[str, str]:
    """Microseconds of restaging one request's rows, by tag."""
    rows = json.loads(path.read_text())["rows"]
    found = {row["item"]: row["got"] for row in rows}
    return {
        tag: f"{found[i]:.1f} us" for tag in ROWS_OF for i in found if i == f"restage {tag}, 1 request(s)"
    }


def table(latents: Path | None = None, bench: Path | None = None) -> str:
    layers = served(latents) if latents else []
    took = costs(bench) if bench else {}
    kinds = [*distributions.KINDS, *(["the toy's own forward"] if layers else [])]
    lines = [
        f"| row | bytes | how it is read | {' | '.join(kinds)} |",
        "|---|---:|---|" + "---:|" * len(kinds),
    ]
    for name, (size, how, stored) in ROWS_OF.items():
        cells = [cell(ratios(stored, kind)) for kind in distributions.KINDS]
        if layers:
            cells.append(cell(np.array([ratio(stored, x, q) for x, q in layers])))
        read = f"{how}, {took[name]}" if name in took else how
        lines.append(f"| {name} | {size} | {read} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latents", type=Path)
    parser.add_argument("--costs", type=Path)
    given = parser.parse_args()
    print(table(given.latents, given.costs))
