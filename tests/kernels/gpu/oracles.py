"""vLLM's own kernels as oracles: two shared objects of its 0.33.0 wheel, loaded under torch without vLLM."""

import lzma
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from shardmill.kernels import block_gemm, kv_row, testing, triton_kv
from shardmill.kernels.formats import bf16_to_f32, f32_to_bf16
from shardmill.kernels.kv_row import RowLayout
from tests.kernels.gpu import distributions

OBJECTS = ("_C_stable_libtorch.abi3.so", "_flashmla_C.abi3.so")
DEVICE = torch.device("cuda")
TOP_K = 2048
HEADS = 64
Q_WIDTH = 576  # latent and rotary part, as FlashMLA wants it
ROWS = 4096


def checks(folder: Path) -> list[Callable[[], list[str]]]:
    """The comparisons, once the objects in `folder` (each plain or as .xz) are loaded."""
    for name in OBJECTS:
        torch.ops.load_library(str(_unpacked(folder, name)))
    return [check_writer, check_quantizer, check_attention]


def _unpacked(folder: Path, name: str) -> Path:
    if (folder / name).exists():
        return folder / name
    target = Path(tempfile.mkdtemp()) / name
    target.write_bytes(lzma.decompress((folder / f"{name}.xz").read_bytes()))
    return target


def check_writer() -> list[str]:
    """Stock rows equal those of vLLM's concat_and_cache_mla, NaN and extremes included."""
    named = [rows for _, rows in testing.hostile_latents()]
    bits = np.concatenate(
        [*named, testing.every_quotient(), testing.every_bf16(), testing.random_rows(15, 9000)]
    )
    x = torch.from_numpy(bits.view(np.int16)).to(DEVICE).view(torch.bfloat16)
    pages = len(x) // 64 + 2
    slots = torch.randperm(pages * 64, device=DEVICE)[: len(x)]
    slots[7] = -1
    theirs = torch.full((pages, 64, 656), testing.POISON, dtype=torch.uint8, device=DEVICE)
    ours = theirs.clone()
    rotary = torch.zeros((len(x), 64), dtype=torch.bfloat16, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    torch.ops._C_cache_ops.concat_and_cache_mla(x, rotary, theirs, slots, "fp8_ds_mla", one)
    layout = RowLayout.parse("656")
    triton_kv.write(x, ours, slots, layout)
    rows = [cache.cpu().numpy().reshape(-1, 656) for cache in (theirs, ours)]
    difference = testing.first_difference(*rows, layout)
    return [] if difference is None else [difference]


def check_quantizer() -> list[str]:
    """Activation codes and scales equal those of vLLM's per_token_group_fp8_quant, groups of 32 and 128."""
    failures = []
    for group in (32, 128):
        x = torch.randn((512, 4096), device=DEVICE) * torch.exp(4 * torch.randn((512, 1), device=DEVICE))
        x = x.bfloat16()
        x[0], x[1] = 0, 1e-30
        codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scales = torch.empty((512, 4096 // group), device=DEVICE)
        limits = (1e-10, -448.0, 448.0, False, False, False)
        torch.ops._C.per_token_group_fp8_quant(x, codes, scales, group, *limits)
        ours, our_scales = block_gemm.quantize(x, group)
        if not (
            torch.equal(ours.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(our_scales, scales)
        ):
            failures.append(f"group {group}: codes or scales differ from vLLM's")
    return failures


def check_attention() -> list[str]:
    """Rows of every rung go through FlashMLA's sparse decode; 416 fine bytes lose no more than the stock row."""
    formats = ("8888-fine", "8666-fine", "6666-fine", "6666f-fine", "8666-stock", "6666-stock")
    failures = []
    print("      attention output against bf16 latents; stock row's error, then each row's relative to it")
    print("      " + f"{'':24}{'656-stock':>11}" + "".join(f"{tag:>12}" for tag in formats))
    for kind in distributions.KINDS:
        x = distributions.latents(kind, ROWS)
        q = distributions.queries(x, HEADS)
        index = np.random.default_rng(16).permutation(ROWS)[:TOP_K].astype(np.int32)
        # FlashMLA's softmax scale is folded into the queries, which it takes in bf16.
        q = bf16_to_f32(f32_to_bf16((q * Q_WIDTH**0.5).astype(np.float32))) / Q_WIDTH**0.5
        exact = distributions.attention(q.astype(np.float64), x[index])
        error = partial(_decode_error, x, q, index, exact)
        stock = error("656-stock")
        ratios = {tag: error(tag) / stock for tag in formats}
        print(f"      {kind:24}{stock:11.5f}" + "".join(f"{ratio:12.3f}" for ratio in ratios.values()))
        bound = 1.02 if kind == "Gaussian" else 1.0
        if ratios["6666-fine"] > bound:
            failures.append(f"{kind}: 416-byte rows have {ratios['6666-fine']:.3f} of the stock row's error")
    return failures


def _decode_error(x: np.ndarray, q: np.ndarray, index: np.ndarray, exact: np.ndarray, tag: str) -> float:
    """Relative error of FlashMLA's output over the rows of a format, restaged by our kernel."""
    layout = RowLayout.parse(tag)
    latents = torch.from_numpy(f32_to_bf16(x).view(np.int16)).to(DEVICE).view(torch.bfloat16)
    cache = torch.empty((ROWS // 64, 64, layout.row_bytes), dtype=torch.uint8, device=DEVICE)
    triton_kv.write(latents, cache, torch.arange(ROWS, device=DEVICE), layout)
    rows = torch.empty((ROWS, 656), dtype=torch.uint8, device=DEVICE)
    triton_kv.restage_pages(cache, torch.arange(ROWS // 64, device=DEVICE).int(), rows, layout)
    expected = kv_row.restage(layout.rung, kv_row.encode(layout.rung, x, layout.scales))
    assert testing.first_difference(expected, rows.cpu().numpy()) is None
    query = torch.zeros((1, 1, HEADS, Q_WIDTH), device=DEVICE, dtype=torch.bfloat16)
    query[0, 0, :, : kv_row.LATENT] = torch.from_numpy(q * Q_WIDTH**0.5).to(DEVICE)
    chosen = torch.from_numpy(index).to(DEVICE).view(1, 1, TOP_K)
    staged = rows.view(ROWS // 64, 64, 1, 656)
    nothing = [None] * 7
    out = torch.ops._flashmla_C.sparse_decode_fwd(
        query, staged, chosen, *nothing, kv_row.LATENT, Q_WIDTH**-0.5, None, False
    )[0]
    got = out.view(HEADS, kv_row.LATENT).double().cpu().numpy()
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
