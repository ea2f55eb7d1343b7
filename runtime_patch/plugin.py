"""The entry point that vLLM calls in every process: checks this vLLM, then applies the ledger.

vLLM calls it in the server, the engine, each worker and the subprocess that inspects models, some of them more
than once: applying twice does nothing. vLLM logs errors of *importing* a plugin and goes on, so importing this
module can hardly fail; errors of the call below do stop the server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from shardmill.runtime_patch import settings
from shardmill.runtime_patch.errors import PatchError
from shardmill.runtime_patch.fingerprint import package_root
from shardmill.runtime_patch.ledger import LEDGER, VLLM, mismatches

log = logging.getLogger("vllm.shardmill")

_applied: dict[str, str] = {}  # patch name -> "applied" or "not needed: why"; one process, filled once


def register() -> None:
    """Applies every patch of the ledger once. Raises PatchError where this vLLM is not the one that was tried."""
    if _applied:
        return
    chosen = settings.current()
    check_vllm(chosen)
    states = {patch.name: APPLY[patch.name](chosen) for patch in LEDGER}
    _applied.update(states)
    log.info("shardmill: %s", "; ".join(f"{name} {state}" for name, state in states.items()))


def applied() -> dict[str, str]:
    """What `register` did in this process, by patch."""
    return dict(_applied)


def check_vllm(chosen: settings.Settings) -> None:
    """Raises PatchError, or warns under VLLM_KVQ_UNCHECKED=1, unless vLLM's code is what was read and tried."""
    problems = vllm_problems()
    if not problems:
        return
    told = "; ".join(problems)
    if chosen.unchecked:
        log.warning("shardmill patches a vLLM that was not checked: %s", told)
        return
    raise PatchError(
        f"{told}. The plugin was checked against vLLM {VLLM} alone: install vllm=={VLLM}, leave the plugin out "
        f"(VLLM_PLUGINS=''), or set {settings.UNCHECKED}=1"
    )


def vllm_problems() -> list[str]:
    """What differs between the installed vLLM and the one that was read; empty where nothing does."""
    root = package_root("vllm")
    if root is None:
        return ["vLLM is not installed"]
    got = version("vllm")
    wrong = [] if got.split("+")[0] == VLLM else [f"version {got}, expected {VLLM}"]
    return wrong + mismatches(root)


def _mixed_precision(_: settings.Settings) -> str:
    from vllm.model_executor.layers.quantization import register_quantization_config

    from shardmill.runtime_patch.quant_config import MixedPrecisionConfig

    register_quantization_config("modelopt_mixed")(MixedPrecisionConfig)
    return "applied"


def _block_linear(_: settings.Settings) -> str:
    import shardmill.runtime_patch.block_linear  # noqa: F401  registers itself where it is defined

    return "applied"


def _passthrough(wrap: str, module: str, name: str) -> Callable[[settings.Settings], str]:
    def apply(_: settings.Settings) -> str:
        getattr(import_module("shardmill.runtime_patch.passthrough"), wrap)(
            getattr(import_module(module), name)
        )
        return "applied"

    return apply


def _tuned_configs(_: settings.Settings) -> str:
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    from shardmill.runtime_patch import tuned_configs

    tuned_configs.wrap(fp8_utils)
    return "applied"


def _rows(member: str, backend: str) -> Callable[[settings.Settings], str]:
    def apply(chosen: settings.Settings) -> str:
        if chosen.rung is None:
            return f"not needed: {settings.TILES} is unset"
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum[member], backend)
        return f"applied: rung {chosen.rung}"

    return apply


def _bounded_indexer(chosen: settings.Settings) -> str:
    if chosen.indexer_bytes == 0:
        return f"not needed: {settings.INDEXER_MIB}=0"
    from shardmill.runtime_patch.indexer import register_indexer

    register_indexer()
    return "applied"


def _environment(_: settings.Settings) -> str:
    from vllm import envs

    for name in settings.NAMES:
        envs.environment_variables[name] = lambda name=name: os.environ.get(name)
    return "applied"


_GLM = "vllm.models.glm5next.common"
APPLY: dict[str, Callable[[settings.Settings], Any]] = {
    "mixed-precision": _mixed_precision,
    "block-linear": _block_linear,
    "mla-passthrough": _passthrough("wrap_mla", f"{_GLM}.attention", "Glm5NextMLAAttention"),
    "kda-passthrough": _passthrough("wrap_kda", f"{_GLM}.kda", "Glm5NextLinearAttention"),
    "vision-passthrough": _passthrough("wrap_vision", f"{_GLM}.multimodal", "Glm5NextVisionTransformer"),
    "tuned-configs": _tuned_configs,
    "rows-sm120": _rows(
        "FLASHINFER_MLA_SPARSE_SM120", "shardmill.runtime_patch.rows_sm120.CompactSm120Backend"
    ),
    "rows-sm90": _rows("FLASHMLA_SPARSE", "shardmill.runtime_patch.rows_sm90.CompactSm90Backend"),
    "bounded-indexer": _bounded_indexer,
    "environment": _environment,
}
