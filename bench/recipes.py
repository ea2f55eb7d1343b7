"""What each recipe loses: relative error of the weights, by recipe, block and kind of weights.

    python -m bench.recipes                                   synthetic weights
    python -m bench.recipes --checkpoint model.safetensors    and F32 matrices of a file
    python -m bench.recipes --json                            one JSON object on stdout

Three errors, each the norm of the difference over the norm of the weights, in per cent:
stored    code * scale in f32, against the source
as bf16   the same rounded to BF16, which is what the parent holds
served    after a runtime has re-quantized the weights with scales rounded up to powers of two, as vLLM does by
          default for DeepGEMM with [128, 128] blocks
`native` weights are BF16 copies of block FP8 [128, 128] weights; all others were never FP8.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from shardmill.kernels.block_fp8 import RECIPES, decode, encoder, grid
from shardmill.kernels.formats import F32, U8, bf16_to_f32, f32_to_bf16

Block = tuple[int, int]
SIDE = 2048
BLOCKS: tuple[Block, ...] = ((128, 128), (32, 32))


def main() -> None:
    arguments = _arguments()
    rows = [
        {"weights": name, "block": list(block), "recipe": recipe} | errors(source, block, recipe)
        for name, source in sources(arguments.checkpoint)
        for block in BLOCKS
        for recipe in sorted(RECIPES)
    ]
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    print(
        f"{'weights':28} {'block':8} {'recipe':10} {'stored':>8} {'as bf16':>8} {'served':>8}  exact blocks"
    )
    for row in rows:
        block = "x".join(map(str, row["block"]))
        print(
            f"{row['weights']:28} {block:8} {row['recipe']:10} {row['stored']:8.4f} {row['as_bf16']:8.4f} "
            f"{row['served']:8.4f}  {row['exact_blocks']} of {row['blocks']}"
        )


def sources(checkpoint: Path | None) -> Iterator[tuple[str, NDArray[Any]]]:
    """Matrices by kind: BF16 bits, or f32 where a checkpoint holds f32."""
    random = np.random.Generator(np.random.PCG64(5))
    shape = (SIDE, SIDE)
    normal = (random.standard_normal(shape) * 0.02).astype(np.float32)
    yield "Gaussian", f32_to_bf16(normal)
    for freedom in (5, 3):
        heavy = (random.standard_t(freedom, shape) * 0.02).astype(np.float32)
        yield f"Student-t, {freedom} degrees", f32_to_bf16(heavy)
    for origin, recipe in (("amax / 448", "amax/1"), ("UE8M0", "ue8m0/1")):
        codes, scales, _ = _encode(normal, (128, 128), recipe)
        yield f"native, {origin}", f32_to_bf16(decode(codes, scales, (128, 128)))
    if checkpoint:
        yield from _matrices(checkpoint)


def errors(source: NDArray[Any], block: Block, recipe: str) -> dict[str, Any]:
    """The three errors in per cent, and how many blocks come back bit for bit as BF16."""
    weights = bf16_to_f32(source) if source.dtype == np.uint16 else source
    codes, scales, counts = _encode(source, block, recipe)
    stored = decode(codes, scales, block)
    again, rounded, _ = _encode(stored, block, "ue8m0/1")
    return {
        "stored": _error(stored, weights),
        "as_bf16": _error(bf16_to_f32(f32_to_bf16(stored)), weights),
        "served": _error(decode(again, rounded, block), weights),
        "blocks": scales.size,
        "exact_blocks": counts.get("exact_blocks", 0),
    }


def _encode(source: NDArray[Any], block: Block, recipe: str) -> tuple[U8, F32, dict[str, int]]:
    codes, scales = np.empty(source.shape, np.uint8), np.empty(grid(source.shape, block), np.float32)
    return codes, scales, encoder(recipe, block).encode(source, codes, scales)


def _error(got: F32, wanted: F32) -> float:
    difference = got.astype(np.float64) - wanted
    return round(100 * float(np.linalg.norm(difference) / np.linalg.norm(wanted.astype(np.float64))), 4)


def _matrices(checkpoint: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """The first matrix of each kind of tensor, by its name without numbers."""
    with safe_open(checkpoint, "numpy") as file:
        seen = set()
        for name in sorted(file.keys()):
            kind = ".".join(part for part in name.split(".") if not part.isdigit())
            tensor = file.get_tensor(name)
            if (
                kind not in seen
                and tensor.ndim == 2
                and tensor.dtype == np.float32
                and min(tensor.shape) >= 128
            ):
                seen.add(kind)
                yield (
                    kind.removeprefix("encoder.layer.").removesuffix(".weight")[-28:],
                    np.ascontiguousarray(tensor),
                )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.recipes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FILE.safetensors")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
