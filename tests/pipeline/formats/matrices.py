"""Matrices that formats are tried on: made of integers, so the same everywhere, each with a difficulty of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardmill.kernels.formats import f32_to_bf16
from shardmill.kernels.group_codes import GroupCodes, widened
from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import Params, Setting
from tests.kernels.conftest import bell_f32, words

ROWS, COLUMNS = 24, 256


def kinds(rows: int = ROWS, columns: int = COLUMNS) -> Iterator[tuple[str, Any]]:
    """Name -> f32 [rows, columns]."""
    bell = bell_f32(31, rows, columns)
    yield "bell", bell
    loud = words(32, rows, columns) % 97 == 0
    yield "heavy tails", np.where(loud, bell * np.float32(211), bell)
    whole = (words(33, rows, columns) % 57).astype(np.float32) - 28
    ties = whole * np.float32(0.25)
    ties[:, ::16] = 6
    yield "ties", ties
    edges = bell.copy()
    edges[0], edges[1] = 0, -0.0
    edges[2] *= np.float32(1e-4)
    edges[3, :32] = edges[4, 16:32] = 0
    edges[5] *= 100
    edges[6, 5], edges[7, 9] = -0.0, 3e4
    yield "edges", edges


def source(values: Any, dtype: str) -> Any:
    """The f32 values as they are stored: BF16 bits, f16 or f32."""
    return {"bf16": f32_to_bf16, "f16": lambda each: each.astype(np.float16), "f32": np.copy}[dtype](values)


def setting(name: str, profile: str, strip: Any, kernel: str = "numpy", **params: Any) -> Setting:
    """What encoding a whole matrix needs, its own maximum surveyed."""
    form = formats()[name]
    spelling = form.spelling(profile)
    assert spelling is not None, (name, profile)
    law = spelling.law or next(iter(form.laws), "")
    amax = np.float32(np.abs(widened(strip)).max()) if form.surveys else None
    return Setting(Params(**params), spelling, GroupCodes(kernel), law, amax)


def targets() -> list[tuple[str, str]]:
    """(format, profile) of every way to write."""
    return [
        (form.name, each.profile)
        for form in formats().values()
        if form.encode and form.name != "bf16"
        for each in form.spellings
        if each.entry
    ]
