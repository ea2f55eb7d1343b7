"""What the environment asks of the plugin, read once and checked.

| variable | values | meaning |
|---|---|---|
| VLLM_KVQ_TILES | 8888, 8666, 6666, 6666f; unset | row of a latent in the KV cache; unset leaves vLLM's 656 B rows |
| VLLM_KVQ_SCALES | stock, fine; unset | scale policy; unset is stock for 8888 and fine for the others |
| VLLM_KVQ_STAGE_MIB | integer, default 64 | scratch into which rows are restaged for the attention kernel |
| VLLM_KVQ_INDEXER_MIB | integer, default 64; 0 | scratch of the sparse indexer's prefill; 0 leaves vLLM's indexer |
| VLLM_KVQ_DECODE_GEMM | 1, 0; default 1 | own decode kernel for [32,32] weights at up to 8 tokens |
| VLLM_KVQ_UNCHECKED | 1; unset | patch a vLLM whose source was not checked: a warning instead of a refusal |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.runtime_patch.errors import PatchError

if TYPE_CHECKING:
    from shardmill.kernels.kv_row import RowLayout

PREFIX = "VLLM_KVQ_"
TILES = "VLLM_KVQ_TILES"
SCALES = "VLLM_KVQ_SCALES"
STAGE_MIB = "VLLM_KVQ_STAGE_MIB"
INDEXER_MIB = "VLLM_KVQ_INDEXER_MIB"
DECODE_GEMM = "VLLM_KVQ_DECODE_GEMM"
UNCHECKED = "VLLM_KVQ_UNCHECKED"
NAMES = (TILES, SCALES, STAGE_MIB, INDEXER_MIB, DECODE_GEMM, UNCHECKED)

RUNGS = (
    "8888",
    "8666",
    "6666",
    "6666f",
)  # the rungs that can be served; 656 is served by leaving TILES unset
SCALE_POLICIES = ("stock", "fine")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings. `rung` None: vLLM's own rows."""

    rung: str | None = None
    scales: str | None = None
    stage_bytes: int = 64 * MIB
    indexer_bytes: int = 64 * MIB
    decode_gemm: bool = True
    unchecked: bool = False

    @property
    def layout(self) -> RowLayout | None:
        from shardmill.kernels.kv_row import RowLayout

        return None if self.rung is None else RowLayout.parse(self.rung, self.scales)  # type: ignore[arg-type]


def read(environ: Mapping[str, str]) -> Settings:
    """Settings from the environment. Raises PatchError with the variable's name and what it may hold."""
    rung = _choice(environ, TILES, RUNGS)
    scales = _choice(environ, SCALES, SCALE_POLICIES)
    if scales and rung is None:
        raise PatchError(f"{SCALES}={scales} without {TILES}: vLLM's own 656 B rows have no scale policy")
    return Settings(
        rung=rung,
        scales=scales,
        stage_bytes=_mib(environ, STAGE_MIB, least=1),
        indexer_bytes=_mib(environ, INDEXER_MIB, least=0),
        decode_gemm=_choice(environ, DECODE_GEMM, ("0", "1")) != "0",
        unchecked=_choice(environ, UNCHECKED, ("0", "1")) == "1",
    )


def current() -> Settings:
    """Settings of this process."""
    return read(os.environ)


def asked(environ: Mapping[str, str]) -> bool:
    """Whether any variable of the plugin is set: it then does its work whatever the checkpoint."""
    return any(environ.get(name) for name in NAMES)


def refuse_unknown(environ: Mapping[str, str]) -> None:
    """Raises PatchError where a VLLM_KVQ_ name is none of ours: a misspelt one would be ignored without a word."""
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in NAMES)
    if unknown:
        raise PatchError(f"{', '.join(unknown)} unknown; the plugin reads {', '.join(NAMES)}")


def _choice(environ: Mapping[str, str], name: str, values: tuple[str, ...]) -> str | None:
    value = environ.get(name, "")
    if value and value not in values:
        raise PatchError(f"{name}={value!r} is unknown; expected one of {', '.join(values)}, or unset")
    return value or None


def _mib(environ: Mapping[str, str], name: str, least: int) -> int:
    value = environ.get(name, "") or "64"
    if not value.isdecimal() or int(value) < least:
        raise PatchError(f"{name}={value!r} is no number of MiB; expected an integer of at least {least}")
    return int(value) * MIB
