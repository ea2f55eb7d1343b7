"""A prediction beside what the real transformers did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardmill.verify.questions.loads_transformers import Held

CODES = ("float8_e4m3fn", "float8_e5m2")
SCALES = ("weight_scale", "weight_scale_inv", "_proj_scale_inv")


def differences(predicted: Held, real: Mapping[str, Any]) -> list[str]:
    """Where the two differ, in words: errors, scales missing or left over, and what each weight became."""
    if "error" in real or predicted.error:
        return (
            []
            if ("error" in real) == bool(predicted.error)
            else [f"error {real.get('error')}, predicted {predicted.error!r}"]
        )
    found = []
    for what, ours in (("missing", predicted.missing), ("unexpected", predicted.unexpected)):
        found += [f"{what} {name}" for name in sorted(ours ^ set(real[what]))]
    words = {name: "fp8" if dtype in CODES else "float" for name, dtype in real["held"].items()}
    coded = {name for name, word in words.items() if word == "fp8"}
    found += [f"{name} became {words.get(name)}, predicted {word}"
              for name, word in predicted.weights.items() if words.get(name) != word]  # fmt: skip
    return found + [
        f"{name} became fp8, predicted nothing" for name in sorted(coded - predicted.weights.keys())
    ]
