"""The entry point that vLLM calls in every process, and the ledger that it applies where it is asked for.

vLLM calls `register` in the server, the engine, each worker and the subprocess that inspects models, whatever they
serve, and some of them more than once. So it does next to nothing: it puts a name in front of vLLM's MIXED_PRECISION
config (runtime_patch.naming) and reads the environment. The ledger is applied when a config with FP8_BLOCK entries
is built or arrives in a process, or at once where a VLLM_KVQ_ variable is set.

vLLM logs errors of *importing* a plugin and goes on, so importing this module can hardly fail; errors of the calls
below do stop the server. They are raised only where our checkpoint or a KV layout is asked for: on another vLLM or
platform every other model is served as if the plugin were not there, with one line in the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shardmill.runtime_patch import settings
from shardmill.runtime_patch.errors import PatchError
from shardmill.runtime_patch.fingerprint import package_root
from shardmill.runtime_patch.ledger import LEDGER, VLLM, mismatches

log = logging.getLogger("vllm.shardmill")

_NO_VLLM = "vLLM is not installed"
_named: list[bool] = []  # not empty once `register` has run in this process
_applied: dict[str, str] = {}  # patch name -> "applied" or "not needed: why"; one process, filled once


def register() -> None:
    """Names the config that understands FP8_BLOCK, and applies the ledger where the environment asks for it.

    Raises PatchError where a VLLM_KVQ_ variable is misspelt or cannot be honoured here.
    """
    if _named:
        return
    settings.refuse_unknown(os.environ)
    chosen = settings.current()
    other = other_vllm()
    if other and not chosen.unchecked:
        log.warning("shardmill stays out: %s; only its own checkpoints and KV layouts are refused", other)
    _name_config()
    _named.append(True)
    if settings.asked(os.environ):
        _activate_for(chosen)


def _activate_for(chosen: settings.Settings) -> None:
    """The environment's wish. Where it cannot be had, only a KV layout is worth stopping a server for."""
    try:
        activate()
    except PatchError as error:
        if chosen.rung is not None:
            raise
        log.warning("shardmill's variables are ignored: %s", error)


def activate() -> None:
    """Applies every patch of the ledger once. Raises PatchError where this vLLM is not the one that was tried."""
    if _applied:
        return
    settings.refuse_unknown(os.environ)
    chosen = settings.current()
    check_vllm(chosen)
    states = {patch.name: APPLY[patch.name](chosen) for patch in LEDGER}
    _applied.update(states)
    log.info("shardmill: %s", "; ".join(f"{name} {state}" for name, state in states.items()))


def applied() -> dict[str, str]:
    """What `activate` did in this process, by patch."""
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
    if told == _NO_VLLM:
        raise PatchError(f"{told}. Install vllm=={VLLM} into the environment that serves, and ask there")
    raise PatchError(
        f"{told}. The plugin was checked against vLLM {VLLM} on CUDA alone: install vllm=={VLLM}, leave the plugin "
        f"out (VLLM_PLUGINS=''), or set {settings.UNCHECKED}=1"
    )


def vllm_problems() -> list[str]:
    """What differs between the installed vLLM and the one that was read; empty where nothing does."""
    root = package_root("vllm")
    if root is None:
        return [_NO_VLLM]
    other = other_vllm()
    return ([other] if other else []) + mismatches(root)


def other_vllm() -> str | None:
    """Why this is not the vLLM or the platform that was tried, from what costs nothing to ask; None where it is."""
    try:
        got = version("vllm")
    except PackageNotFoundError:
        return _NO_VLLM
    if got.split("+")[0] != VLLM:
        return f"version {got}, expected {VLLM}"
    platform = _platform()
    return None if platform in (None, "cuda") else f"platform {platform}, expected cuda"


def _platform() -> str | None:
    """vLLM's name of the platform, "cuda", "rocm", "xpu" or "cpu"; None where vLLM cannot tell or found no device.

    "unspecified" is a machine without a device, such as the one that only prints or checks: nothing is served there.
    """
    try:
        from vllm.platforms import current_platform

        if current_platform.is_cuda():
            return "cuda"
        name = str(current_platform.device_name or "")
    except (ImportError, AttributeError, RuntimeError):
        return None
    return name or None


def _name_config() -> None:
    """Puts our name in front of vLLM's config. A vLLM that has no such place serves none of our checkpoints anyway."""
    try:
        from shardmill.runtime_patch import naming

        naming.put_in_place()
    except (ImportError, AttributeError, TypeError) as error:
        log.warning("shardmill stays out: its config has no place here (%s)", error)


def _mixed_precision(_: settings.Settings) -> str:
    from shardmill.runtime_patch import naming

    naming.put_in_place()
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
