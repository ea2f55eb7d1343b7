"""What the plugin costs a vLLM process that serves something else: CPU, memory, modules, compile factors.

Measured from where vLLM calls it: `EngineArgs` is imported, no model is known yet. Another version or a changed
source file is played by `pretend`.
"""

import resource
import sys
import time
from pathlib import Path

from tests.runtime_patch.vllm import probe


def memory_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def pretend(what):
    """Makes this vLLM look like another one."""
    import importlib.metadata

    from shardmill.runtime_patch import ledger, plugin

    if what == "version":
        original = importlib.metadata.version
        plugin.version = lambda name: "0.33.1" if name == "vllm" else original(name)
    if what == "source":
        ledger.LEDGER[0].expects["envs.py:compile_factors"] = "0" * 16


def look(job):
    import torch
    from vllm import (
        envs,
        triton_utils,  # noqa: F401  what the fake platform's own plugin asks for
    )
    from vllm.engine.arg_utils import EngineArgs  # noqa: F401
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    current_platform.is_cuda()
    if job.get("pretend"):
        pretend(job["pretend"])
    modules, memory, factors = set(sys.modules), memory_kib(), set(envs.compile_factors())
    begin = time.process_time()
    load_general_plugins()
    spent = time.process_time() - begin
    report = {
        "cpu_seconds": spent,
        "memory_kib": memory_kib() - memory,
        "modules": sorted(name for name in set(sys.modules) - modules if not name.startswith("importlib")),
        "factors": sorted(set(envs.compile_factors()) - factors),
        "cuda": torch.cuda.is_initialized(),
        "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    if job.get("checkpoint"):
        config = probe.engine_config(job)
        report["quant_config"] = type(config.quant_config).__name__
    return report


if __name__ == "__main__":
    probe.main(look)
