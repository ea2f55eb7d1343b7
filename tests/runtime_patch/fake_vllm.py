"""Small stand-ins for the parts of vLLM that the plugin meets, as vLLM documents them.

Their attention kernels are plain: they read canonical 656 B rows by physical number and skip -1, as the real ones
do. The scratch workspace is one buffer, poisoned each time it is handed out, as another layer's use would leave it.
"""

import sys
import types
from dataclasses import dataclass, field

import numpy as np
import torch

from shardmill.kernels import kv_row

HEADS, TOPK, PAGE, CONTEXT = 2, 128, 64, 5000
SCALE = 0.05


@dataclass(frozen=True)
class Spec:
    state_content_bytes: int = 656
    block_stride_alignment: object = None


@dataclass
class Namespace:
    """Anything with attributes."""

    values: dict

    def __getattr__(self, name):
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class State:
    """What the process's vLLM would know: the current config, the workspace, and the kernel calls made."""

    workspace: torch.Tensor = field(default_factory=lambda: torch.zeros(1 << 24, dtype=torch.uint8))
    calls: list = field(default_factory=list)
    rope: int = 0
    decode_ranks: int = 1
    kv_cache_dtype: str = "fp8_ds_mla"
    ubatching: bool = False
    connector: str | None = None
    reserved: list = field(default_factory=list)
    attention: types.SimpleNamespace = field(
        default_factory=lambda: types.SimpleNamespace(
            hisparse_config=None, sparse_mla_prefill_workspace_factor=2
        )
    )

    @property
    def config(self):
        parallel = {
            "decode_context_parallel_size": self.decode_ranks,
            "prefill_context_parallel_size": 1,
            "use_ubatching": self.ubatching,
        }
        transfer = None if self.connector is None else types.SimpleNamespace(kv_connector=self.connector)
        return Namespace(
            {
                "parallel_config": Namespace(parallel),
                "attention_config": self.attention,
                "kv_transfer_config": transfer,
                "scheduler_config": Namespace({"max_num_batched_tokens": 64}),
            }
        )

    def get_simultaneous(self, *specs):
        self.reserved.append(specs)
        self.workspace.fill_(0xFF)
        views, begin = [], 0
        for shape, dtype in specs:
            size = int(np.prod(shape)) * dtype.itemsize
            views.append(self.workspace[begin : begin + size].view(dtype).reshape(shape))
            begin += -(-size // 256) * 256
        return views


def attend(q, pages, indices):
    """q [T, heads, 512+], canonical pages u8 [P, 64, 656 or 528], indices int32 [T, K] -> f32 [T, heads, 512]."""
    rows = pages.reshape(-1, pages.shape[-1])
    out = torch.zeros(q.shape[0], q.shape[1], 512)
    for token, wanted in enumerate(indices):
        chosen = rows[wanted[wanted >= 0].long()].numpy()
        codes = torch.from_numpy(chosen[:, :512].copy()).view(torch.float8_e4m3fn).float().view(-1, 4, 128)
        scales = torch.from_numpy(chosen[:, 512:528].copy()).view(torch.float32)
        latents = (codes * scales[..., None]).view(-1, 512)
        weights = torch.softmax(q[token, :, :512].float() @ latents.T * SCALE, -1)
        out[token] = weights @ latents
    return out


def install(monkeypatch):
    """Puts the stand-ins into sys.modules and gives their state."""
    state = State()

    class Impl:
        def __init__(self):
            self.topk_indices_buffer = torch.zeros(64, TOPK, dtype=torch.int32)
            self.qk_rope_head_dim, self.kv_lora_rank = state.rope, 512
            self.kv_cache_dtype = state.kv_cache_dtype
            rows = CONTEXT * state.attention.sparse_mla_prefill_workspace_factor
            self.workspace_specs = [((4, HEADS, 576), torch.bfloat16), ((rows, 576), torch.bfloat16)]
            state.get_simultaneous(*self.workspace_specs)

    class Sm120Impl(Impl):
        def _run_mqa_kernel(self, q, kv_cache, topk_indices_physical):
            state.calls.append((q.shape[0], tuple(kv_cache.shape)))
            return attend(q, kv_cache, topk_indices_physical)

    class Sm90Impl(Impl):
        def _fp8_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata):
            state.calls.append(
                (q.shape[1], tuple(kv_c_and_k_pe_cache.shape), kernel_metadata.scheduler_metadata)
            )
            out = attend(q[0], kv_c_and_k_pe_cache, topk_indices[0])
            return out.unsqueeze(0), torch.zeros(1, HEADS, q.shape[1])

    class Backend:
        @classmethod
        def customize_spec(cls, spec):
            return Spec(spec.state_content_bytes, PAGE * spec.state_content_bytes)

        @classmethod
        def get_name(cls):
            return "STOCK"

    class Builder:
        fp8_use_mixed_batch = False

    mla = "vllm.v1.attention.backends.mla"
    modules = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config": lambda: state.config},
        f"{mla}.flashinfer_mla_sparse": {"FlashInferMLASparseSM120Backend": Backend},
        f"{mla}.flashinfer_mla_sparse_sm120": {"FlashInferMLASparseSM120Impl": Sm120Impl},
        f"{mla}.flashmla_sparse": {
            "FlashMLASparseBackend": Backend,
            "FlashMLASparseImpl": Sm90Impl,
            "FlashMLASparseMetadataBuilder": Builder,
        },
        "vllm.v1.attention.ops.flashmla": {"get_mla_metadata": lambda: ("fresh", None)},
        "vllm.v1.kv_cache_interface": {"AttentionSpec": Spec},
        "vllm.v1.worker.workspace": {"current_workspace_manager": lambda: state},
    }
    for name, attributes in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("rows_sm120", "rows_sm90"):
        monkeypatch.delitem(sys.modules, f"shardmill.runtime_patch.{name}", raising=False)
    return state


def install_kernels(monkeypatch):
    """The row kernels by their numpy reference, under the names and signatures of shardmill.kernels.triton_kv."""

    def write(latents, cache, slots, layout):
        rows = kv_row.encode(layout.rung, to_numpy(latents), layout.scales)
        for row, slot in zip(rows, slots.tolist(), strict=True):
            if slot >= 0:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = torch.from_numpy(row)

    def restage_gather(cache, wanted, out, layout):
        flat = out.view(-1, out.shape[-1])
        for place, slot in enumerate(wanted.flatten().tolist()):
            if slot >= 0:
                row = cache[slot // cache.shape[1], slot % cache.shape[1]].numpy()[None]
                flat[place] = torch.from_numpy(kv_row.restage(layout.rung, row)[0])

    def number_rows(wanted, out):
        places = torch.arange(wanted.numel(), dtype=torch.int32).view(wanted.shape)
        out.copy_(torch.where(wanted < 0, -1, places))

    module = types.ModuleType("shardmill.kernels.triton_kv")
    module.write, module.restage_gather, module.number_rows = write, restage_gather, number_rows
    monkeypatch.setitem(sys.modules, "shardmill.kernels.triton_kv", module)


def to_numpy(latents):
    """bf16 torch -> ml_dtypes bf16 numpy, the same bits."""
    import ml_dtypes

    return latents.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
