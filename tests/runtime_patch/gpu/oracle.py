"""vLLM's own CUDA operators, where their two libraries lie in a folder; a torch reference of attention elsewhere.

SHARDMILL_ORACLE names the folder with `_C_stable_libtorch.abi3.so` and `_flashmla_C.abi3.so` of the vLLM 0.33.0 wheel,
plain or as .xz. They are oracles here, never dependencies.
"""

import lzma
import os
import tempfile
from pathlib import Path

import torch

LIBRARIES = ("_C_stable_libtorch.abi3.so", "_flashmla_C.abi3.so")
SCALE = 256**-0.5  # of the model's 256 query dimensions


def load():
    """Whether vLLM's operators could be loaded."""
    folder = os.environ.get("SHARDMILL_ORACLE")
    if not folder:
        return False
    for library in LIBRARIES:
        path = Path(folder, library)
        packed = Path(folder, library + ".xz")
        if not path.exists() and packed.exists():
            path = Path(tempfile.mkdtemp(), library)
            path.write_bytes(lzma.decompress(packed.read_bytes()))
        if not path.exists():
            return False
        torch.ops.load_library(str(path))
    return True


def attend_flashmla(q, pages, indices):
    """q bf16 [T, 64, 576], canonical pages u8 [P, 64, 656], indices int32 [T, K] -> bf16 [T, 64, 512]."""
    out, *_ = torch.ops._flashmla_C.sparse_decode_fwd(
        q.unsqueeze(0),
        pages.unsqueeze(2),
        indices.unsqueeze(0),
        *[None] * 7,
        512,
        SCALE,
        None,
        False,
    )
    return out.view(q.shape[0], q.shape[1], 512)


def attend_torch(q, pages, indices):
    """The same in f32, plainly: decode the rows, softmax over those that are not -1."""
    rows = pages.reshape(-1, 656)[indices.clamp_min(0).long()]
    codes = rows[..., :512].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    scales = rows[..., 512:528].contiguous().view(torch.float32)
    latents = (codes * scales[..., None]).flatten(-2)
    return attend_latents(q, latents, indices)


def attend_latents(q, latents, indices):
    """q [T, heads, 512+], latents f32 [T, K, 512], indices [T, K] -> f32 [T, heads, 512]."""
    known = indices >= 0
    latents = torch.where(known[..., None], latents, 0.0)
    scores = torch.einsum("thd,tkd->thk", q[..., :512].float(), latents) * SCALE
    scores.masked_fill_(~known[:, None], float("-inf"))
    return torch.einsum("thk,tkd->thd", torch.softmax(scores, -1), latents)


def write_stock(latents, cache, slots):
    """vLLM's own writer: bf16 [T, 512] into u8 [blocks, rows, 656]."""
    rope = torch.zeros(latents.shape[0], 64, dtype=latents.dtype, device=latents.device)
    ones = torch.ones(1, device=latents.device)
    torch.ops._C_cache_ops.concat_and_cache_mla(latents, rope, cache, slots, "fp8_ds_mla", ones)
