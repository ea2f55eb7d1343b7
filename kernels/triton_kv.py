"""KV rows on the GPU: latents into paged rows, and rows back into the canonical 656-byte rows of the attention.

Both directions give the bytes of shardmill.kernels.kv_row, on every card and either path:

- the PTX path (NVIDIA, compute capability 8.9 and up) converts with the card's own E4M3 instructions;
- the portable path uses integers and IEEE division alone. It is what other cards and Triton's interpreter run.

One lane handles one unit of 16 elements: 32 bytes of latent, 8 bytes of nibbles, 4 bytes of exponents, 16 bytes
of E4M3. So a warp handles a row, no value crosses lanes but a tile's maximum and its drops, and the kernels
move bytes as fast as the memory does. Nothing here allocates, synchronises or looks at data on the host: every
function may be captured in a CUDA graph.
"""

import os
from functools import cache

import torch
import triton

from shardmill.kernels.kv_row import CANONICAL_BYTES, LATENT, RowLayout
from shardmill.kernels.triton_restage import number_kernel, restage_kernel
from shardmill.kernels.triton_write import write_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def has_ptx(device: torch.device) -> bool:
    """Whether the PTX path runs: an NVIDIA card of compute capability 8.9 or more, outside the interpreter."""
    if INTERPRETED or device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


# Rows of a program (one warp) by card, kernel and size of the launch, as (rows of the launch up to, rows of a
# program): few rows want many programs, many rows want loads in flight. Rows that are no multiple of 16 bytes take
# more, narrower loads. Measured on the H200 (kernels/RESULTS.md); other cards use its table until they have one.
ANY = 1 << 62
LAUNCH: dict[str, dict[str, tuple[tuple[int, int], ...]]] = {
    "NVIDIA H200": {
        "write": ((64, 1), (ANY, 2)),
        "restage": ((4096, 2), (ANY, 4)),
        "restage unaligned": ((ANY, 2),),
    },
}
_LAUNCH_DEFAULT = LAUNCH["NVIDIA H200"]


def launch_rows(kernel: str, rows: int, device: torch.device) -> int:
    """Rows of a program for a launch of `rows` rows."""
    return next(size for most, size in LAUNCH.get(_card(device), _LAUNCH_DEFAULT)[kernel] if rows <= most)


@cache
def _card(device: torch.device) -> str:
    """The card's name, asked of the driver once: a launch takes microseconds."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def write(
    latents: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layout: RowLayout,
    *,
    order: torch.Tensor | None = None,
    ptx: bool | None = None,
    rows_per_program: int | None = None,
) -> None:
    """latents bf16 [T, 512] -> rows of the paged cache u8 [pages, page_rows, row_bytes] at slots int64 [T].

    Slot s < 2**31 is row s % page_rows of page s // page_rows; a negative slot is skipped. Pages may lie further apart
    than page_rows * row_bytes. `order` int32 [512] (shardmill.kernels.spread) stores column order[k] as element k.
    `ptx` forces a path (default: what the card has), `rows_per_program` the launch table's entry.
    """
    _require(
        latents.dtype == torch.bfloat16 and latents.dim() == 2 and latents.shape[1] == LATENT,
        "latents",
        "bf16 [T, 512]",
        latents,
    )
    _require(latents.stride(1) == 1 and latents.stride(0) % 2 == 0, "latents", "rows of whole words", latents)
    _require(
        slots.dtype == torch.int64 and slots.shape == latents.shape[:1] and slots.is_contiguous(),
        "slots",
        "int64 [T]",
        slots,
    )
    words, page_words, page_rows = _paged_words(cache, layout)
    rows = latents.shape[0]
    if rows == 0:
        return
    size = rows_per_program or launch_rows("write", rows, cache.device)
    write_kernel[(triton.cdiv(rows, size),)](
        latents.view(torch.int32 if order is None else torch.int16),
        slots if order is None else order,
        slots,
        words,
        rows,
        latents.stride(0) // 2,
        page_words,
        **_parts(layout),
        FINE=layout.scales == "fine",
        PAGE_ROWS=page_rows,
        SPREAD=order is not None,
        PTX=has_ptx(cache.device) if ptx is None else ptx,
        R=size,
        num_warps=1,
    )


def restage_pages(
    cache: torch.Tensor,
    pages: torch.Tensor,
    out: torch.Tensor,
    layout: RowLayout,
    *,
    ptx: bool | None = None,
    rows_per_program: int | None = None,
) -> None:
    """Whole pages of the cache, numbers int32 [P], -> out u8 [P * page_rows, 656]. A negative page is skipped."""
    _require(
        pages.dtype == torch.int32 and pages.dim() == 1 and pages.is_contiguous(), "pages", "int32 [P]", pages
    )
    _restage(cache, pages, out, layout, cache.shape[1], ptx, rows_per_program)


def restage_gather(
    cache: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    layout: RowLayout,
    *,
    ptx: bool | None = None,
    rows_per_program: int | None = None,
) -> None:
    """Rows of the cache, slot numbers int32 [...], -> out u8 [..., 656]. A negative number is skipped."""
    _require(rows.dtype == torch.int32 and rows.is_contiguous(), "rows", "int32, contiguous", rows)
    _restage(cache, rows, out, layout, 0, ptx, rows_per_program)


def number_rows(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Where `restage_gather` put each row: slot numbers int32 [...] -> own flat positions int32 [...], -1 for none."""
    _require(rows.dtype == torch.int32 and rows.is_contiguous(), "rows", "int32, contiguous", rows)
    same = out.dtype == torch.int32 and out.is_contiguous() and out.shape == rows.shape
    _require(same, "out", f"int32 {list(rows.shape)}, contiguous", out)
    if rows.numel():
        number_kernel[(triton.cdiv(rows.numel(), 1024),)](rows, out, rows.numel(), BLOCK=1024)


def _restage(
    cache: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor,
    layout: RowLayout,
    index_rows: int,
    ptx: bool | None,
    rows_per_program: int | None,
) -> None:
    words, page_words, page_rows = _paged_words(cache, layout)
    rows = index.numel() * max(index_rows, 1)
    whole = out.dtype == torch.uint8 and out.is_contiguous() and out.numel() == rows * CANONICAL_BYTES
    _require(whole and out.shape[-1] == CANONICAL_BYTES, "out", f"u8, {rows} rows of {CANONICAL_BYTES}", out)
    if rows == 0:
        return
    kernel = "restage unaligned" if layout.row_bytes % 16 else "restage"
    size = rows_per_program or launch_rows(kernel, rows, cache.device)
    restage_kernel[(triton.cdiv(rows, size),)](
        words,
        index,
        out.view(torch.int32),
        rows,
        page_words,
        **_parts(layout),
        PAGE_ROWS=page_rows,
        INDEX_ROWS=index_rows,
        PTX=has_ptx(cache.device) if ptx is None else ptx,
        R=size,
        num_warps=1,
    )


def _parts(layout: RowLayout) -> dict[str, int]:
    """The layout as the kernels want it: word offsets."""
    return {
        "FP8_TILES": layout.fp8_tiles,
        "GROUP": layout.drop_group,
        "NIBBLE": layout.nibble_at // 4,
        "EXPONENT": layout.exponent_at // 4,
        "SCALE": layout.scale_at // 4,
        "DROP": layout.drop_at // 4,
        "ROW_WORDS": layout.row_bytes // 4,
    }


def _paged_words(cache: torch.Tensor, layout: RowLayout) -> tuple[torch.Tensor, int, int]:
    """The cache as words, the words from page to page, and the rows of a page (0: no gap between pages)."""
    rows_follow = (
        cache.dim() == 3 and cache.shape[2] == layout.row_bytes == cache.stride(1) and cache.stride(2) == 1
    )
    _require(
        cache.dtype == torch.uint8 and rows_follow,
        "cache",
        f"u8 [pages, page_rows, {layout.row_bytes}]",
        cache,
    )
    _require(cache.stride(0) % 4 == 0, "cache", "a page stride of whole words", cache)
    gapless = cache.stride(0) == cache.shape[1] * layout.row_bytes
    return cache.view(torch.int32), cache.stride(0) // 4, 0 if gapless else cache.shape[1]


def _require(holds: bool, name: str, expected: str, got: torch.Tensor) -> None:
    if not holds:
        shape, stride = list(got.shape), list(got.stride())
        raise ValueError(f"{name}: expected {expected}; got {got.dtype} {shape} with strides {stride}")
