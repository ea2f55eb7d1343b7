"""Which GEMM a [32,32] weight gets: ours for a few tokens, vLLM's for the rest, and the switch between them."""

import importlib
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """shardmill.runtime_patch.block_kernel among stand-ins; calls tell which kernel ran with which folder of tables."""
    calls = []
    gemm = types.ModuleType("shardmill.kernels.block_gemm")
    gemm.CONFIGS = Path("own")
    gemm.decodes = lambda tokens, K, block, device: tokens <= 8
    gemm.choose = lambda M, N, K, block, device, folder: (M, N, K, block, folder)
    gemm.gemm = lambda x, xs, w, ws, block, *, out, how: calls.append(("ours", how)) or out
    gemm.device_name = lambda device: "card"
    gemm.decode_config_name = lambda N, K, block, name: f"decode,{N},{K},{block[0]},{name}.json"
    fakes = {
        "vllm": {"envs": types.SimpleNamespace(VLLM_BATCH_INVARIANT=False)},
        "vllm.model_executor.kernels.linear": {"TritonFp8BlockScaledMMKernel": object},
        "vllm.model_executor.layers.quantization.utils.fp8_utils": {
            "w8a8_triton_block_scaled_mm": lambda *a: calls.append(("vLLM", a[4], a[5]))
        },
        "vllm.utils.torch_utils": {"direct_register_custom_op": lambda *a, **k: None},
    }
    for name, attributes in fakes.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    import shardmill.kernels

    monkeypatch.setitem(sys.modules, "shardmill.kernels.block_gemm", gemm)
    monkeypatch.setattr(shardmill.kernels, "block_gemm", gemm, raising=False)
    monkeypatch.delitem(sys.modules, "shardmill.runtime_patch.block_kernel", raising=False)
    module = importlib.import_module("shardmill.runtime_patch.block_kernel")
    yield types.SimpleNamespace(module=module, calls=calls, envs=sys.modules["vllm"].envs, folder=tmp_path)
    sys.modules.pop("shardmill.runtime_patch.block_kernel", None)


def multiply(kernel, tokens):
    A, B = torch.zeros(tokens, 64), torch.zeros(96, 64)
    return kernel.module.block_mm(A, B, torch.ones(tokens, 2), torch.ones(3, 2), 32, torch.bfloat16)


def test_few_tokens_take_our_kernel(kernel):
    """Up to eight tokens are ours, into an output of the right shape and dtype; more are vLLM's."""
    out = multiply(kernel, 8)
    assert (out.shape, out.dtype) == ((8, 96), torch.bfloat16)
    multiply(kernel, 9)
    assert kernel.calls == [
        ("ours", (8, 96, 64, (32, 32), Path("own"))),
        ("vLLM", [32, 32], torch.bfloat16),
    ]


def test_it_can_be_switched_off(kernel, monkeypatch):
    """VLLM_KVQ_DECODE_GEMM=0 and VLLM_BATCH_INVARIANT leave every call to vLLM: the order of sums differs."""
    monkeypatch.setenv("VLLM_KVQ_DECODE_GEMM", "0")
    multiply(kernel, 1)
    monkeypatch.delenv("VLLM_KVQ_DECODE_GEMM")
    kernel.module.decode_gemm_wanted.cache_clear()  # as in another process
    kernel.envs.VLLM_BATCH_INVARIANT = True
    multiply(kernel, 1)
    assert [call[0] for call in kernel.calls] == ["vLLM", "vLLM"]


def test_an_owners_decode_table_is_used(kernel, monkeypatch):
    """A decode table in VLLM_TUNED_CONFIG_FOLDER comes before our own."""
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(kernel.folder))
    (kernel.folder / "decode,96,64,32,card.json").write_text("{}")
    multiply(kernel, 1)
    assert kernel.calls[0][1][-1] == kernel.folder


def test_the_environment_is_read_once_a_process(kernel, monkeypatch):
    """A call costs no look at the environment: the variables are checked before the first layer is built."""
    asked = []
    original = kernel.module.settings.current
    monkeypatch.setattr(kernel.module.settings, "current", lambda: asked.append(1) or original())
    for _ in range(3):
        multiply(kernel, 1)
    assert len(asked) == 1
