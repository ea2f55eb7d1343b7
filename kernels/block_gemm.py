"""Block-FP8 GEMM: out[M, N] = x[M, K] @ w[N, K]^T with one scale a block of w and one a token and group of x.

Scales are f32, or E8M0 bytes (u8 or torch.float8_e8m0fnu), a fourth of their size, as DeepSeek-V4.1 stores them: every
kernel takes either form on either side, and gives the bits that the f32 of the same powers of two give.

Three kernels (kernels.triton_gemm) and the choice between them. The stock-style kernel is vLLM's algorithm: any M,
and its tile along K cannot exceed a scale block, which at 32 leaves two thirds of the memory bandwidth unused. The
decode kernels serve M <= 8, where the weights' bytes are all the time there is: one multiplies and adds (Gemv),
the other uses the tensor cores (Decode). The orders of sums differ, so bf16 results may differ in the last bit;
all lie within 2e-3 of the exact product.

Tuned parameters come from JSON files: vLLM's own format and file name for the stock-style kernel (kernels/configs,
or a folder of the user's), a second file of the same name with the prefix "decode," for the decode kernels.
"""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import triton

from shardmill.kernels.triton_gemm import decode_kernel, gemv_kernel, quantize_kernel, stock_kernel
from shardmill.kernels.triton_kv import has_ptx

CONFIGS = Path(__file__).parent / "configs"
DECODE_TOKENS = 8  # columns of the tensor core's tile
MMA_ROWS = 16
MMA_K = 32
CHUNK = 64  # bytes of a row that a warp of the decode kernel takes at once

Block = tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stock:
    """Parameters of the stock-style kernel; the names in JSON are vLLM's."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    warps: int
    stages: int

    @classmethod
    def default(cls, block: Block) -> Self:
        """What vLLM 0.33.0 runs where it finds no file."""
        return cls(64, block[0], block[1], 32, 4, 2)

    @classmethod
    def from_json(cls, entry: dict[str, int]) -> Self:
        return cls(*(entry[name] for name in _STOCK_NAMES))

    def to_json(self) -> dict[str, int]:
        values = (self.block_m, self.block_n, self.block_k, self.group_m, self.warps, self.stages)
        return dict(zip(_STOCK_NAMES, values, strict=True))


@dataclass(frozen=True, slots=True)
class Decode:
    """Parameters of the decode kernel: 16-row tiles of a program, chunks asked for at once, warps along K.

    early: its first weights are asked for before the kernel in front of it is done (programmatic dependent launch).
    """

    tiles: int
    depth: int
    warps: int
    early: bool = False

    @classmethod
    def default(cls) -> Self:
        return cls(2, 4, 4)

    @classmethod
    def from_json(cls, entry: dict[str, int]) -> Self:
        tiles, depth, warps = (entry[name] for name in _DECODE_NAMES)
        return cls(tiles, depth, warps, bool(entry.get(_EARLY_NAME)))

    def to_json(self) -> dict[str, int]:
        named = dict(zip(_DECODE_NAMES, (self.tiles, self.depth, self.warps), strict=True))
        return named | ({_EARLY_NAME: 1} if self.early else {})


@dataclass(frozen=True, slots=True)
class Gemv:
    """Parameters of the kernel for one or two tokens: rows of a program, bytes of K in a step, warps."""

    rows: int
    step: int
    warps: int
    early: bool = False

    @classmethod
    def default(cls) -> Self:
        return cls(4, 1024, 4)

    @classmethod
    def from_json(cls, entry: dict[str, int]) -> Self:
        rows, step, warps = (entry[name] for name in _GEMV_NAMES)
        return cls(rows, step, warps, bool(entry.get(_EARLY_NAME)))

    def to_json(self) -> dict[str, int]:
        named = dict(zip(_GEMV_NAMES, (self.rows, self.step, self.warps), strict=True))
        return named | ({_EARLY_NAME: 1} if self.early else {})


_STOCK_NAMES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
_DECODE_NAMES = ("TILES", "DEPTH", "num_warps")
_GEMV_NAMES = ("ROWS", "STEP", "num_warps")
_EARLY_NAME = "EARLY"


def quantize(
    x: torch.Tensor,
    group: int,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    ptx: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x bf16, f16 or f32 [M, K] -> E4M3 codes [M, K] and f32 scales [M, K / group], vLLM's bits.

    Results go into `codes` and `scales` where they are given. K must be a multiple of the group.
    """
    tokens, K = x.shape
    if K % group or x.stride(1) != 1:
        raise ValueError(f"x {list(x.shape)}: K must be contiguous and a multiple of the group {group}")
    codes = torch.empty((tokens, K), dtype=torch.float8_e4m3fn, device=x.device) if codes is None else codes
    scales = torch.empty((tokens, K // group), device=x.device) if scales is None else scales
    groups = tokens * (K // group)
    if groups:
        size = 1024 // group
        quantize_kernel[(triton.cdiv(groups, size),)](
            x,
            codes.view(torch.uint8),
            scales,
            groups,
            x.stride(0),
            K=K,
            GROUP=group,
            PTX=has_ptx(x.device) if ptx is None else ptx,
            G=size,
            num_warps=4,
        )
    return codes, scales


def gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    block: Block,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    how: Stock | Decode | Gemv | None = None,
) -> torch.Tensor:
    """x E4M3 [M, K], x_scale [M, K / block_k], w E4M3 [N, K], w_scale [ceil(N / block_n), K / block_k], scales f32 or
    E8M0, bias [N] -> out [M, N], bf16 unless `out` is given. `how` forces a kernel; by default `choose` picks it.
    """
    tokens, K = x.shape
    N = w.shape[0]
    x_scale, w_scale = _loadable(x_scale), _loadable(w_scale)
    _check(x, x_scale, w, w_scale, block)
    out = torch.empty((tokens, N), dtype=torch.bfloat16, device=x.device) if out is None else out
    if tokens == 0:
        return out
    how = how or choose(tokens, N, K, block, x.device)
    tensors = (w_scale if bias is None else bias, out, x_scale, w_scale, tokens, N)
    shared: dict[str, Any] = {"BLOCK_N": block[0], "BLOCK_K": block[1], "HAS_BIAS": bias is not None}
    if isinstance(how, Decode):
        decode_kernel[(triton.cdiv(N, MMA_ROWS * how.tiles),)](
            x.view(torch.int64),
            w.view(torch.int64),
            *tensors,
            K=K,
            **shared,
            SETS=2 if block[1] == MMA_K and tokens > DECODE_TOKENS // 2 else 1,
            TILES=how.tiles,
            DEPTH=how.depth,
            WARPS=how.warps,
            **_early(how, x.device),
            num_warps=how.warps,
        )
    elif isinstance(how, Gemv):
        gemv_kernel[(triton.cdiv(N, how.rows),)](
            x,
            w,
            *tensors,
            K=K,
            **shared,
            ROWS=how.rows,
            STEP=how.step,
            **_early(how, x.device),
            num_warps=how.warps,
        )
    else:
        programs = triton.cdiv(tokens, how.block_m) * triton.cdiv(N, how.block_n)
        stock_kernel[(programs,)](
            x,
            w,
            *tensors,
            K,
            **shared,
            BLOCK_SIZE_M=how.block_m,
            BLOCK_SIZE_N=how.block_n,
            BLOCK_SIZE_K=how.block_k,
            GROUP_SIZE_M=how.group_m,
            num_warps=how.warps,
            num_stages=how.stages,
        )
    return out


def _loadable(scale: torch.Tensor) -> torch.Tensor:
    """The scales in a form that the kernels tell apart: f32 as they are, E8M0 as u8. Other dtypes are a ValueError."""
    if scale.dtype == torch.float8_e8m0fnu:
        return scale.view(torch.uint8)
    if scale.dtype not in (torch.float32, torch.uint8):
        raise ValueError(f"scales must be float32 or E8M0 (uint8, float8_e8m0fnu), got {scale.dtype}")
    return scale


def _early(how: Decode | Gemv, device: torch.device) -> dict[str, Any]:
    """The launch's words for programmatic dependent launch, where it is wanted and the card has it."""
    if not how.early or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return {}
    return {"EARLY": True, "launch_pdl": True}


def _check(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, block: Block
) -> None:
    tokens, K = x.shape
    N = w.shape[0]
    groups = -(-K // block[1])
    expected = {"w": [N, K], "x_scale": [tokens, groups], "w_scale": [-(-N // block[0]), groups]}
    for name, tensor in {"w": w, "x_scale": x_scale, "w_scale": w_scale}.items():
        if list(tensor.shape) != expected[name]:
            raise ValueError(
                f"{name}: expected shape {expected[name]} for x {[tokens, K]}, got {list(tensor.shape)}"
            )
    if not (x.is_contiguous() and w.is_contiguous() and x_scale.is_contiguous() and w_scale.is_contiguous()):
        raise ValueError("x, w and their scales must be contiguous")


def decodes(tokens: int, K: int, block: Block, device: torch.device) -> bool:
    """Whether the decode kernel can take the call: few tokens, whole blocks along K, a card with its PTX."""
    whole = K % block[1] == 0 and K % CHUNK == 0 and block[1] % MMA_K == 0 and block[0] % MMA_ROWS == 0
    return tokens <= DECODE_TOKENS and whole and has_ptx(device)


def choose(
    tokens: int, N: int, K: int, block: Block, device: torch.device, folder: Path = CONFIGS
) -> Stock | Decode | Gemv:
    """The kernel and its parameters for a call: the decode kernel where it can run, else the stock-style one.

    Parameters come from the file of this card and shape, from the entry with the nearest number of tokens; without
    a file the defaults hold.
    """
    if decodes(tokens, K, block, device):
        default = Gemv.default() if tokens <= 2 else Decode.default()
        return _nearest(_decode_table(folder, N, K, block, device_name(device)), tokens) or default
    return stock_config(tokens, N, K, block, device, folder)


def stock_config(
    tokens: int, N: int, K: int, block: Block, device: torch.device, folder: Path = CONFIGS
) -> Stock:
    """The stock-style kernel's parameters for a call: the file's, or vLLM's default."""
    return _nearest(_stock_table(folder, N, K, block, device_name(device)), tokens) or Stock.default(block)


def device_name(device: torch.device) -> str:
    """The card's name as vLLM writes it in file names: runs of blanks and slashes become one underscore."""
    return re.sub(r"[\s/]+", "_", torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


def config_name(N: int, K: int, block: Block, name: str) -> str:
    """vLLM 0.33.0's file name for a shape and card (fp8_utils.py, get_w8a8_block_fp8_configs)."""
    shape = f"block_shape=[{block[0]},{block[1]}]"
    return f"N={N},K={K},device_name={name},dtype=fp8_w8a8,{shape}.json"


def decode_config_name(N: int, K: int, block: Block, name: str) -> str:
    return "decode," + config_name(N, K, block, name)


@lru_cache
def _stock_table(folder: Path, N: int, K: int, block: Block, name: str) -> dict[int, Stock]:
    entries = _entries(folder / config_name(N, K, block, name))
    return {tokens: Stock.from_json(entry) for tokens, entry in entries.items()}


@lru_cache
def _decode_table(folder: Path, N: int, K: int, block: Block, name: str) -> dict[int, Decode | Gemv]:
    entries = _entries(folder / decode_config_name(N, K, block, name))
    return {tokens: _decode_entry(entry) for tokens, entry in entries.items()}


def _decode_entry(entry: dict[str, int]) -> Decode | Gemv:
    return Decode.from_json(entry) if "TILES" in entry else Gemv.from_json(entry)


def _entries(path: Path) -> dict[int, dict[str, int]]:
    if not path.exists():
        return {}
    return {int(tokens): entry for tokens, entry in json.loads(path.read_text()).items()}


def _nearest(table: dict[int, T], tokens: int) -> T | None:
    return table[min(table, key=lambda known: (abs(known - tokens), known))] if table else None
