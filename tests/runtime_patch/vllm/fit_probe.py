"""What vLLM's own KV planner makes of random models and flags, in a process of its own.

    python -m tests.runtime_patch.vllm.fit_probe '{"cases": [...], "folder": "...", "out": "report.json", ...}'

A case holds `text` (keys of the text config that differ), `preset` (flags), `pin`. The models are built on the meta
device; their rows are sized as a rung would, whatever plugin is installed.
"""

import json
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from tests.runtime_patch.vllm import probe
from tests.runtime_patch.vllm.fake_platform import prepare
from tests.runtime_patch.vllm.plan_probe import specs_of


class NoCard(TorchFunctionMode):
    """Puts on the meta device what vLLM's modules put on a card by name, some of it while they are imported."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)


def write_config(folder, case):
    """The config.json of a case: the shape that `fit` is asked about, small where memory does not look."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps(case["config"]))


def engine_config(job, folder, preset):
    engine = {
        "max_model_len": preset["max_model_len"],
        "enable_prefix_caching": preset["prefix_caching"],
        "kv_cache_dtype": preset["kv_dtype"],
        "mamba_ssm_cache_dtype": preset["state_dtype"],
        "max_num_batched_tokens": preset["batched_tokens"],
        "tensor_parallel_size": preset["tensor_parallel"],
    }
    if preset["tensor_parallel"] > 1:
        engine["distributed_executor_backend"] = "mp"  # it looks for cards where none is named
    if not (Path(folder) / "config.json").read_text().count("vision_config"):
        engine["limit_mm_per_prompt"] = {}
    if preset["draft_tokens"]:
        engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": preset["draft_tokens"]}
    return probe.engine_config({"checkpoint": folder, "engine": engine})


def rows_of(specs, row):
    """The specs with latent rows of `row` bytes."""
    return {
        name: replace(spec, state_content_bytes=row, block_stride_alignment=64 * row)
        if getattr(spec, "state_content_bytes", None)
        else spec
        for name, spec in specs.items()
    }


def plan(config, specs, pin):
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder

    builder = get_kv_cache_config_builder(config)
    groups = planning.get_global_kv_cache_groups(config, [specs])
    block_bytes = planning._pool_bytes_per_block_from_builder(builder, config, groups)
    longest = planning._estimate_max_model_len_from_groups(builder, config, groups, pin - block_bytes)
    return {
        "block_tokens": config.cache_config.block_size,
        "block_bytes": block_bytes,
        "need_bytes": planning._max_memory_usage_bytes_from_groups(builder, config, groups),
        "max_context": longest,
        "groups": len(groups),
    }


def answer(job, case, folder):
    """The planner's numbers for one case, or why vLLM cannot serve it."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()  # its key leaves out index_topk, which decides too
    write_config(folder, case)
    config = engine_config(job, folder, case["preset"])
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            probe.start_world(job)
        be_first_of(case["preset"]["tensor_parallel"])
        probe.build(config)
        if case["preset"]["draft_tokens"]:
            draft_config, draft_model = probe.draft_of(config)
            with set_current_vllm_config(draft_config):
                probe.build(draft_config, draft_model)
        current_platform.update_block_size_for_backend(config)
        config.cache_config.kv_cache_layout = "BLHNC"
        specs = specs_of(config, case["preset"]["kda_backend"])
        if (
            case["family"] == "glm5_next" and case["preset"]["sm"] == 120
        ):  # the plugin's rows are of its backend alone
            specs = rows_of(specs, case["row_bytes"])
        return plan(config, specs, case["pin"]) | {"backend": backends(config)}


def be_first_of(ranks):
    """Makes this lone process the first rank of several: a model is built with a rank's share, and says nothing."""
    from vllm.distributed import parallel_state

    group = parallel_state.get_tp_group()
    group.world_size, group.ranks, group.rank_in_group = ranks, list(range(ranks)), 0


def backends(config):
    """The names of the attention backends that vLLM chose, for a reader of the record."""
    layers = config.compilation_config.static_forward_context.values()
    return sorted(
        {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    )


def look(job):
    from vllm.model_executor.models import registry

    prepare()
    registry._run_in_subprocess = lambda inspect: (
        inspect()
    )  # a process for each class costs ten seconds of CPU
    with NoCard():
        return plan_all(job)


def plan_all(job):
    report = {}
    for case in job["cases"]:
        folder = f"{job['folder']}/{case['index']}"
        try:
            report[case["index"]] = answer(job, case, folder)
        except Exception as error:
            if job.get("loud"):
                traceback.print_exc()
            report[case["index"]] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        Path(job["out"]).write_text(json.dumps(report))
    return report


if __name__ == "__main__":
    probe.main(look)
