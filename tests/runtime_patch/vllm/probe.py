"""One look at the real vLLM, in a process of its own: builds a model on the CPU, loads it, tells what it found.

    python -m tests.runtime_patch.vllm.probe '{"checkpoint": "...", "out": "report.json", ...}'

The capability, the plugin and the world size belong to a process, so each case is one. The report is JSON.
"""

import hashlib
import json
import os
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from tests.runtime_patch.vllm.expected import expected


def engine_config(job):
    from vllm.engine.arg_utils import EngineArgs

    if job.get("view") == "unquantized":
        job["engine"] = {"hf_overrides": {"quantization_config": None}} | job.get("engine", {})
    arguments = {
        "model": job["checkpoint"],
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "max_model_len": 524288,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1024,
        "kv_cache_dtype": "fp8",
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "tensor_parallel_size": job.get("ranks", 1),
        **job.get("engine", {}),
    }
    if job.get("draft"):
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    return EngineArgs(**arguments).create_engine_config()


def start_world(job):
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.fused_moe.runner import shared_experts
    from vllm.v1.worker.workspace import init_workspace_manager

    ranks, rank = job.get("ranks", 1), job.get("rank", 0)
    init_distributed_environment(ranks, rank, f"file://{job['meeting']}", rank, backend="gloo")
    initialize_model_parallel(ranks, 1)
    init_workspace_manager(torch.device(os.environ.get("FAKE_DEVICE", "cpu")))
    shared_experts.aux_stream = lambda: None  # a second CUDA stream, which a CPU has not


def build(config, model_config=None):
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    device = torch.device(os.environ.get("FAKE_DEVICE", "cpu"))
    with set_default_torch_dtype(torch.bfloat16), device:
        return initialize_model(vllm_config=config, model_config=model_config or config.model_config)


def draft_of(config):
    """The draft's config and model config, as the engine makes them."""
    from vllm.config import VllmConfig, replace

    draft = config.speculative_config.draft_model_config
    quant = VllmConfig.get_quantization_config(draft, config.load_config)
    return replace(config, model_config=draft, quant_config=quant), draft


class Checkpoint:
    """Random access to a folder of safetensors files."""

    def __init__(self, folder, stack):
        index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
        files = {f: stack.enter_context(safe_open(Path(folder) / f, "pt")) for f in set(index.values())}
        self.where = {name: files[file] for name, file in index.items()}

    def read(self, name):
        return self.where[name].get_tensor(name)

    def __iter__(self):
        return ((name, self.read(name)) for name in self.where)


class Unquantized(Checkpoint):
    """The same checkpoint as if its experts had never been packed: each byte of a pair of codes as two numbers."""

    def __init__(self, folder, stack):
        super().__init__(folder, stack)
        extra = (".weight_scale", ".weight_scale_2", ".input_scale")
        self.where = {name: file for name, file in self.where.items() if not name.endswith(extra)}

    def read(self, name):
        tensor = super().read(name)
        if tensor.dtype != torch.uint8:
            return tensor
        return torch.stack([tensor & 15, tensor >> 4], -1).flatten(1).to(torch.bfloat16) / 64


def load(model, checkpoint, job):
    """Loads, then compares each parameter's bytes with the checkpoint's share of this rank."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data.view(torch.uint8).fill_(0xA5) if parameter.data.dim() else None
    loaded = model.load_weights(iter(checkpoint))
    wrong = {}
    for name in sorted(loaded):
        if name not in parameters:
            continue
        got = parameters[name].data
        want = expected(name, checkpoint.read, job.get("rank", 0), job.get("ranks", 1)).to(got.dtype)
        if want.shape != got.shape and want.numel() == got.numel():
            want = want.reshape(got.shape)
        if want.shape != got.shape or not same_bytes(got, want):
            wrong[name] = f"{tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"
    return {
        "loaded": sorted(loaded),
        "missing": sorted(set(parameters) - set(loaded)),
        "wrong": wrong,
        "digest": digest(parameters),
    }


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8).flatten(), b.contiguous().view(torch.uint8).flatten())


def digest(parameters):
    summary = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        summary.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        summary.update(parameter.data.contiguous().view(torch.uint8).numpy().tobytes())
    return summary.hexdigest()


def kernels(model):
    """Module name -> the class that will multiply by it, for modules with a quantization method."""
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            kernel = getattr(method, "fp8_linear", None) or getattr(method, "kernel", None) or method
            found[name] = type(kernel).__name__
    return found


def seams(model):
    """What stands at the plugin's hooks in a model: attention backends with their rows, and the indexer."""
    found = set()
    for module in model.modules():
        backend = getattr(module, "attn_backend", None)
        if backend is not None and hasattr(module, "impl"):
            layout = getattr(module.impl, "layout", None)
            found.add(
                f"{backend.__name__} {type(module.impl).__name__} {layout.tag if layout else 'stock rows'}"
            )
        if (
            hasattr(module, "topk_indices_buffer")
            and hasattr(module, "k_cache")
            and hasattr(module, "forward_cuda")
        ):
            found.add(f"{type(module).__name__} bounded={getattr(module, 'bounded', False)}")
    return sorted(found)


def look(job):
    from vllm.config import set_current_vllm_config
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    report = {
        "plugin": sys.modules.get("shardmill.runtime_patch.plugin")
        and sys.modules["shardmill.runtime_patch.plugin"].applied()
    }
    config = engine_config(job)
    with set_current_vllm_config(config), ExitStack() as stack:
        start_world(job)
        view = Unquantized if job.get("view") == "unquantized" else Checkpoint
        checkpoint = view(job["checkpoint"], stack)
        for part in job.get("parts", ["main"]):
            part_config, model_config = draft_of(config) if part == "draft" else (config, None)
            with set_current_vllm_config(part_config):
                model = build(part_config, model_config)
                report[part] = {"kernels": kernels(model), "seams": seams(model)} | load(
                    model, checkpoint, job
                )
    return report


def main(look):
    """Runs `look` on the job of the command line, JSON or @FILE, and writes its report, or the error that it met."""
    word = sys.argv[1]
    job = json.loads(Path(word[1:]).read_text() if word.startswith("@") else word)
    try:
        report = look(job)
    except Exception as error:
        traceback.print_exc()
        report = {"error": f"{type(error).__name__}: {error}"}
    Path(job["out"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main(look)
