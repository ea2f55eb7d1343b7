"""What vLLM's own KV planner makes of the full model's layers, for each rung, in a process of its own.

    python -m tests.runtime_patch.vllm.plan_probe '{"checkpoint": "...", "out": "...", "draft": true, ...}'

The folder holds config.json alone; the model is built on the meta device with the heads that a rank of two has.
"""

import os
from dataclasses import replace

from tests.runtime_patch.vllm import probe


def specs_of(config, backend):
    """Layer name -> spec, with KDA layers on a prefill backend ("flashkda" or "triton")."""
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    for layer in config.compilation_config.static_forward_context.values():
        if hasattr(layer, "kda_prefill_backend"):
            layer.kda_prefill_backend = backend
    return get_kv_cache_spec(config)


def stock_rows(specs):
    """The same specs with vLLM's own rows of 656 B on the MLA layers."""
    return {
        name: replace(spec, state_content_bytes=656, block_stride_alignment=64 * 656)
        if getattr(spec, "state_content_bytes", None)
        else spec
        for name, spec in specs.items()
    }


def plan(config, specs, pin):
    """The planner's numbers for a pool of `pin` bytes: bytes a block, bytes one request needs, blocks in the pool."""
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder

    builder = get_kv_cache_config_builder(config)
    groups = planning.get_global_kv_cache_groups(config, [specs])
    block_bytes = planning._pool_bytes_per_block_from_builder(builder, config, groups)
    need = planning._max_memory_usage_bytes_from_groups(builder, config, groups)
    try:
        blocks = planning.get_kv_cache_configs(config, [specs], [pin], groups)[0].num_blocks
    except ValueError:
        blocks = None  # the planner refuses a pool that holds no request of full length
    return {"block_bytes": block_bytes, "need": need, "pool_blocks": blocks}


def look(job):
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    report = {}
    config = probe.engine_config(job)
    with set_current_vllm_config(config):
        probe.start_world(job)
        probe.build(config)
        if job.get("draft"):
            draft_config, draft_model = probe.draft_of(config)
            with set_current_vllm_config(draft_config):
                probe.build(draft_config, draft_model)
        current_platform.update_block_size_for_backend(config)
        config.cache_config.kv_cache_layout = "BLHNC"
        report["block_tokens"] = config.cache_config.block_size
        for backend in ("flashkda", "triton"):
            for rung in job["rungs"]:
                os.environ["VLLM_KVQ_TILES"] = "8888" if rung == "stock" else rung
                specs = specs_of(config, backend)
                specs = stock_rows(specs) if rung == "stock" else specs
                report["layers"] = len(specs)
                report[f"{rung} {backend}"] = plan(config, specs, job["pin"])
    return report


if __name__ == "__main__":
    probe.main(look)
