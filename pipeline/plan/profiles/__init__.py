"""Output profiles: how a loader wants the result named and declared, and what it has no words for. One row each.

A profile is what a published checkpoint says of itself; codes and scales are the same bits under each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardmill.pipeline.plan.profiles import compressed_tensors, fp8, modelopt
from shardmill.pipeline.plan.profiles.child import Child


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profile says and can't say.

    scale_suffix: what a weight's name gains to become that of its scales, F32 [ceil(R/r), ceil(C/c)], rank 2.
    problems(child): why the profile can't express the child; empty where it can.
    declare(child): the child's config.json, and how many entries it took.
    beside(config): further files that declare the same, by name.
    loaders: who reads its results, unpatched but for modelopt-mixed; a recipe may name those that must.
    """

    name: str
    scale_suffix: str
    problems: Callable[[Child], Iterable[str]]
    declare: Callable[[Child], tuple[dict[str, Any], int]]
    beside: Callable[[Mapping[str, Any]], dict[str, bytes]] = lambda config: {}
    loaders: tuple[str, ...] = ("transformers", "vllm", "sglang")


_SERVERS = ("vllm", "sglang", "tensorrt-llm")

PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "modelopt-mixed",
            "_scale_inv",
            modelopt.problems,
            modelopt.declare,
            loaders=("shardmill-serving",),
        ),
        Profile(
            "modelopt",
            "_scale",
            modelopt.stock_problems,
            modelopt.declare_stock,
            modelopt.beside_stock,
            _SERVERS,
        ),
        Profile("fp8", "_scale_inv", fp8.problems, fp8.declare),
        Profile("compressed-tensors", "_scale", compressed_tensors.problems, compressed_tensors.declare),
    )
}
