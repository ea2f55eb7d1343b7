"""The real SGLang on a CPU: builds the class of a config.json, loads headers filled with numbers, and looks."""

from __future__ import annotations

import importlib
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.verify.loaders.cases import fold
from tests.verify.loaders.sglang import stand_ins, trace
from tests.verify.loaders.sglang.models import CLASSES, Headers

DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
FLOATS = ("BF16", "F16", "F32", "F8_E4M3")
# Made by SGLang itself after loading or with a default: scales of the KV cache, orders of GPTQ, swizzled scales.
COMPUTED = re.compile(
    r"(\.attn(_m[hq]a)?\.[kv]_scale|blockscale_swizzled|g_idx_sort_indices|w(13|2)_weight_g_idx)$"
)


class Oracle:
    """One process: the first config starts SGLang's world, each later one takes its place."""

    def __init__(self) -> None:
        stand_ins.install()
        self.started = False

    def outcome(self, config: dict[str, Any], headers: Headers) -> dict[str, Any]:
        """What is compared: what parameters hold, which are not filled, which tensors reach none; or the error."""
        logging.disable(logging.CRITICAL)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            try:
                model = self._model(folder)
            except Exception as error:
                return {"error": f"{type(error).__name__}: {str(error)[:160]}"}
        loaded = trace.load(model, tensors(headers))
        if loaded.error:
            return {"error": loaded.error[:160]}
        dtypes = {name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters()}
        empty = [n for n, share in loaded.filled.items() if not _whole(n, share) and not COMPUTED.search(n)]
        return {
            "held": {
                dtype: fold(n for n, d in dtypes.items() if d == dtype and not COMPUTED.search(n))
                for dtype in sorted(set(dtypes.values()) - {"bfloat16", "float16", "float32"})
            },
            "missing": fold(empty),
            "unexpected": fold(name for name in headers if name not in loaded.reached),
        }

    def _model(self, folder: str) -> Any:
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
        from sglang.srt.model_loader.utils import set_default_torch_dtype
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs

        arguments = ServerArgs(model_path=folder, skip_tokenizer_init=True, load_format="dummy")
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
        self._start()
        initialize_dp_attention(arguments)
        config = ModelConfig.from_server_args(arguments)
        register(config.hf_config.model_type)
        load = LoadConfig()
        quantization = _get_quantization_config(config, load)
        with set_default_torch_dtype(config.dtype):
            model = _initialize_model(config, load, quantization)
        model.post_load_weights = lambda *_, **__: None  # of the MLA: kernels make two of kv_b's weight
        return model

    def _start(self) -> None:
        from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel

        if not self.started:
            meeting = f"file://{tempfile.mktemp()}"
            init_distributed_environment(1, 0, meeting, 0, backend="gloo")
            initialize_model_parallel(backend="gloo")
            self.started = True


def _whole(name: str, share: str) -> bool:
    """Rows that pad a table of embeddings are nobody's."""
    return share == "whole" or (share == "part" and "embed" in name)


def register(kind: str) -> None:
    """Tells SGLang's registry of one model class, as its start does of all."""
    from sglang.srt.models.registry import ModelRegistry

    name, module = CLASSES[kind]
    ModelRegistry.models[name] = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)


def tensors(headers: Headers) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (dtype, shape) in headers.items():
        made = torch.full(shape, 0.5 if dtype in FLOATS else 1.0)  # a scale of 1 is let pass by some classes
        yield name, made.to(DTYPES[dtype])
