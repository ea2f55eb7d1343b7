"""What vLLM's parser makes of the presets' commands, and how its indexer cuts a prefill."""

import torch

from tests.runtime_patch.vllm import probe

TOKENS, QUERIES, POOL = 524_288, 1024, 4


def parsed(words):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    given.model = given.model_tag  # as `vllm serve` does with its argument
    engine = AsyncEngineArgs.from_cli_args(given)
    return {
        "max_model_len": engine.max_model_len,
        "kv_cache_memory_bytes": engine.kv_cache_memory_bytes,
        "cudagraph_capture_sizes": engine.compilation_config.cudagraph_capture_sizes,
        "kda_prefill_backend": engine.kda_prefill_backend,
        "speculative": engine.speculative_config,
    }


def look(job):
    from vllm.v1.attention.backends.mla.indexer import (
        DeepseekV32IndexerMetadataBuilder,
        get_max_prefill_buffer_size,
    )

    report = {name: parsed(words) for name, words in job["commands"].items()}
    split = DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks
    config = probe.engine_config(job)
    gathered = get_max_prefill_buffer_size(config) // POOL
    report["stock_gather_bytes"] = gathered * 132
    report["chunks"] = {}
    for mib in (512, 128, 64):
        chunks = split(torch.tensor([TOKENS // POOL]), torch.tensor([QUERIES]), gathered, mib << 20)
        rows = chunks[0][1]
        report["chunks"][str(mib)] = [len(chunks), rows.stop - rows.start]
    return report


if __name__ == "__main__":
    probe.main(look)
