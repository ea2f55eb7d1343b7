"""The metrics that a gate may name, and the kinds of request that each rests on."""

from __future__ import annotations

import re
from collections.abc import Mapping

GENERATING = ("greedy", "unicode", "repetition", "needle", "arithmetic", "vision", "speed", "soak")
# Measured of two runs, so both must have answered.
PAIRED: Mapping[str, tuple[str, ...]] = {
    "top1_agreement": ("score",),
    "mean_kl": ("score",),
    "confident_flips": ("score",),
    "mean_logprob_delta": ("score",),
    "max_logprob_delta": ("score",),
    "identical_positions": ("score",),
    "outside_top_k": ("score",),
    "vision_agreement": ("vision",),
}
OF_THE_TEST: Mapping[str, tuple[str, ...]] = {
    "worst_4gram": ("repetition",),
    "replacement_characters": ("unicode",),
    "needles": ("needle",),
    "arithmetic": ("arithmetic",),
    "vision": ("vision",),
    "vision_prompt_tokens": ("vision",),
    "vision_limit_refused": ("vision_limit",),
    "soak_served": ("soak",),
    "soak_seconds": ("soak",),
    "least_free_mib": (),
    "mtp_acceptance": GENERATING,
}
NUMBERED = {re.compile(r"decode_c\d+"): ("speed",), re.compile(r"mtp_acceptance_\d+"): GENERATING}


def rests_on(metric: str) -> tuple[str, ...] | None:
    """The kinds of request that a metric rests on; None for one that nothing measures."""
    for table in (PAIRED, OF_THE_TEST):
        if metric in table:
            return table[metric]
    return next((kinds for name, kinds in NUMBERED.items() if name.fullmatch(metric)), None)
