"""Everything the report says, as frozen records that `asdict` turns into plain JSON.

Errors are relative: ||child - parent|| / ||parent|| over all elements, in f64. None stands for what is not known (no
parent was given) or is no number. Sizes are bytes of tensor data, unless a name says `file`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FORMAT = "shardmill/report/2"


@dataclass(frozen=True, slots=True)
class Error:
    """What one weight, or all of a group, lost. The sums of squares let a reader add up groups of his own."""

    stored: float | None  # relative, of the f32 values that codes and scales stand for
    rounded: float | None  # relative, of those values rounded to the parent's dtype: 0 is bit for bit
    served: float | None  # relative, after the runtime re-rounded scales (shardmill.verify.report.served)
    elements: int
    parent_squares: float | None  # sum of squares of the parent
    stored_squares: float | None  # sum of squares of child - parent
    rounded_squares: float | None
    served_squares: float | None
    cosine: float | None  # as stored, like the rest
    largest: float | None  # of |child - parent|
    saturated: int  # codes at the largest value
    zeros: int  # codes of zero where the parent's weight is not


@dataclass(frozen=True, slots=True)
class Weight:
    """One converted weight."""

    name: str
    family: str
    layer: int | None  # its number in the stack of layers or blocks
    file: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    numerics: str
    blocks: int | None  # None where its numerics count none
    exact_blocks: int | None  # that decode to the parent's bits, as the numerics counted them
    rerounded: bool  # the runtime makes powers of two of its scales
    error: Error | None


@dataclass(frozen=True, slots=True)
class LayerError:
    """What the weights of a family in one layer lost together."""

    layer: int | None
    weights: int
    error: Error


@dataclass(frozen=True, slots=True)
class Family:
    """A family of the recipe and what became of it."""

    name: str
    action: str
    reason: str | None
    block: tuple[int, int] | None
    numerics: tuple[str, ...]
    tensors: int
    bytes_before: int | None
    bytes_after: int  # scales left out
    scale_bytes: int
    blocks: int | None
    exact_blocks: int | None
    rerounded: int  # weights
    error: Error | None
    worst: float | None  # the largest error as stored of one weight
    layers: tuple[LayerError, ...]  # in order of layer; those outside of any layer come last


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of one weight's elements. The bins are those of shardmill.verify.report.histogram."""

    name: str
    stored: tuple[int, ...]  # by relative error, as stored
    served: tuple[int, ...]  # by relative error, as served
    codes: tuple[int, ...]  # by the code's power of two


@dataclass(frozen=True, slots=True)
class File:
    name: str
    bytes: int
    sha256: str | None
    kind: str  # "rewritten", "passed on" or "other"


@dataclass(frozen=True, slots=True)
class RuleFindings:
    """All findings of one rule of `verify lint`."""

    id: str
    slug: str
    severity: str
    sentence: str
    advice: str
    count: int
    examples: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class Lint:
    status: str
    checked: tuple[str, ...]
    not_checked: Mapping[str, str]
    rules: tuple[RuleFindings, ...]
    tensor_parallel: str | None


@dataclass(frozen=True, slots=True)
class Facts:
    """The whole report."""

    format: str
    name: str  # the recipe's
    shardmill: str  # version that wrote the report
    repository: str | None
    revision: str | None
    parent_verified: bool
    compared: bool  # with the parent's weights
    plan_key: str
    manifest_self: str
    numerics: tuple[str, ...]
    algorithms: Mapping[str, str]
    tensors: int
    tensor_bytes: int
    file_bytes: int  # of the weight files
    parent_tensor_bytes: int | None
    families: tuple[Family, ...]
    families_known: bool  # the kept families and their reasons could be read
    weights: tuple[Weight, ...]
    worst: tuple[Histogram, ...]  # of the weights with the largest error as stored, the worst first
    files: tuple[File, ...]
    dropped: tuple[str, ...]
    renamed: Mapping[str, str]
    repairs: tuple[Mapping[str, Any], ...]
    lint: Lint

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"
