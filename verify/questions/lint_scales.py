"""Sanity of scales: placeholders, outliers, fused halves that disagree, conventions mixed up. No parent needed.

Scales are compared with those of their kind: the same module of other layers and experts (`kind_of` a name).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.kernels.formats import E4M3_MAX
from shardmill.verify.formats.declared import CONFIG, Declaration
from shardmill.verify.formats.fused import fused_groups, kind_of
from shardmill.verify.formats.schemes import INPUT_SCALES, Linear, split_name
from shardmill.verify.questions.scale_values import Scale
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

PLACEHOLDER_MEMBERS_MIN = 4  # so many equal scales of one kind are no chance
OUTLIER_MEMBERS_MIN = 8
OUTLIER_Z = 10.0  # robust z of the logarithm
OUTLIER_RATIO = (
    16.0  # and this far from the median: a kind whose members are all but equal has tiny deviations
)
ZERO_SHARE_MAX = 0.01

# Mistral publishes activation_scale in BF16, where equal values are ordinary.
_MEASURED = tuple(leaf for leaf in INPUT_SCALES if leaf not in ("activation_scale", "qscale_act"))
RANGE = 65_536.0  # from a weight's typical scale to its largest
DECODED_MAX = 1e6

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class ScaleContext:
    """What the rules look at."""

    linears: Mapping[str, Linear]
    scales: Mapping[str, Scale]  # by tensor name
    declared: Declaration | None
    quantization: Mapping[str, Any]

    def of(self, linear: Linear, leaf: str) -> Scale | None:
        tensor = linear.scales.get(leaf)
        return self.scales.get(tensor.name) if tensor is not None else None


def scale_faults(context: ScaleContext) -> Iterator[Finding]:
    for rule in (*OF_NAMES, *(OF_VALUES if context.scales else ())):
        yield from rule(context)


def _by_kind(context: ScaleContext, leaves: Iterable[str]) -> Iterator[tuple[str, list[Scale]]]:
    """Scalars with these leaves, grouped with the others of their kind, in the order of names."""
    wanted = frozenset(leaves)
    groups: dict[str, list[Scale]] = {}
    for name in sorted(context.scales):
        scale = context.scales[name]
        if split_name(name)[1] in wanted and scale.count == 1 and not scale.faulty:
            groups.setdefault(kind_of(name), []).append(scale)
    yield from groups.items()


def placeholders(context: ScaleContext) -> Iterator[Finding]:
    """One value for every expert of several layers, or 1.0 for all: nobody measured it."""
    for leaf in _MEASURED:
        everywhere = [scale for _, members in _by_kind(context, [leaf]) for scale in members]
        if len(everywhere) >= PLACEHOLDER_MEMBERS_MIN and {scale.value for scale in everywhere} == {1.0}:
            got = f"1.0 in all {len(everywhere):,} of {leaf}"
            yield _at("placeholder-input-scale", everywhere[0].tensor, "measured values, which differ", got)
            return
    for kind, members in _by_kind(context, _MEASURED):
        values = {scale.value for scale in members}
        layers = {number[0] if (number := _NUMBER.search(s.tensor.name)) else "" for s in members}
        if len(members) < PLACEHOLDER_MEMBERS_MIN or len(values) > 1:
            continue
        if len(layers) > 1 or values == {1.0}:
            first = members[0].tensor
            got = f"{members[0].value:g} in all {len(members):,} of {kind}"
            yield Finding(
                "placeholder-input-scale", first.file, first.name, "measured values, which differ", got
            )


def unit_global_scales(context: ScaleContext) -> Iterator[Finding]:
    for leaf in ("weight_scale_2", "weight_global_scale"):
        for _, members in _by_kind(context, [leaf]):
            for scale in members:
                if scale.value == 1.0:
                    yield _at("global-scale-one", scale.tensor, "amax / (6 * 448) or its inverse", "1.0")


def unit_weight_scales(context: ScaleContext) -> Iterator[Finding]:
    """Every scale of every weight is 1.0: they were initialised and never computed."""
    grids = [
        (linear, context.scales.get(linear.grid.name)) for linear in context.linears.values() if linear.grid
    ]
    known = [
        scale for linear, scale in grids if scale is not None and linear.kind.startswith(("fp8", "comfy"))
    ]
    if len(known) >= PLACEHOLDER_MEMBERS_MIN and all(scale.low == scale.high == 1.0 for scale in known):
        got = f"1.0 in all {len(known):,} weights"
        yield _at("placeholder-weight-scale", known[0].tensor, "scales computed from the weights", got)


def missing_input_scales(context: ScaleContext) -> Iterator[Finding]:
    """Most of a kind have an input scale and one has none; or the declared path reads one and there is none."""
    with_scale: dict[str, int] = {}
    without: dict[str, list[Linear]] = {}
    for module, linear in context.linears.items():
        if linear.weight is None:
            continue
        kind = kind_of(module)
        if any(leaf in linear.scales for leaf in INPUT_SCALES):
            with_scale[kind] = with_scale.get(kind, 0) + 1
        else:
            without.setdefault(kind, []).append(linear)
    for kind, lacking in without.items():
        for linear in lacking:
            assert linear.weight is not None
            if with_scale.get(kind, 0) > len(lacking):
                expected = f"an input scale, as {with_scale[kind]:,} of its kind have"
                yield Finding("missing-input-scale", linear.weight.file, linear.module, expected, "none")
            elif _reads_input_scale(context.declared, linear):
                expected = f"an input scale, which {_path(context)} reads"
                yield Finding("input-scale-needed", linear.weight.file, linear.module, expected, "none")


def _reads_input_scale(declared: Declaration | None, linear: Linear) -> bool:
    if declared is None or not declared.static_inputs:
        return False
    if declared.entries is not None:
        entry = declared.entries.get(linear.module)
        return entry is not None and entry.algo in ("NVFP4", "FP8")
    return linear.kind in ("nvfp4", "ct-nvfp4", "fp8-tensor", "fp8-block", "fp8-grid")


def _path(context: ScaleContext) -> str:
    assert context.declared is not None
    return context.declared.algo or context.declared.method


def weight_only(context: ScaleContext) -> Iterator[Finding]:
    """NVFP4 with `input_activations: null` selects the weight-only path; the stored input scales lie idle."""
    declared = context.declared
    if declared is not None and declared.weight_only and declared.algo == "NVFP4":
        got = "quant_algo NVFP4 with input_activations null in every group"
        expected = "W4A16_NVFP4 for weight-only, or NVFP4 with input_activations for W4A4"
        yield Finding("weight-only-path", CONFIG, "", expected, got)


def outliers(context: ScaleContext) -> Iterator[Finding]:
    """Robust z of the logarithm over layers and experts."""
    leaves = (*INPUT_SCALES, "weight_scale_2", "weight_global_scale")
    for kind, members in _by_kind(context, leaves):
        positive = [scale for scale in members if scale.value > 0]
        if len(positive) < OUTLIER_MEMBERS_MIN:
            continue
        logs = np.log(np.array([scale.value for scale in positive]))
        middle = float(np.median(logs))
        spread = max(1.4826 * float(np.median(np.abs(logs - middle))), 1e-3)
        far = (np.abs(logs - middle) > OUTLIER_Z * spread) & (np.abs(logs - middle) > np.log(OUTLIER_RATIO))
        for place in np.flatnonzero(far):
            scale = positive[int(place)]
            z = (logs[place] - middle) / spread
            expected = f"about {np.exp(middle):.3g}, the median of {len(positive):,} of {kind}"
            yield _at("scale-outlier", scale.tensor, expected, f"{scale.value:.3g} (robust z {z:+.0f})")


def fused_global_scales(context: ScaleContext) -> Iterator[Finding]:
    """One fused kernel takes one global scale: the other half decodes wrong by the ratio."""
    for parent, group, members in fused_groups(context.linears):
        for leaf in ("weight_scale_2", "weight_global_scale"):
            found = [
                (member, context.of(context.linears[module], leaf)) for member, module in members.items()
            ]
            known = [(member, scale) for member, scale in found if scale is not None and scale.value > 0]
            values = [scale.value for _, scale in known]
            if len(known) < 2 or min(values) == max(values):
                continue
            said = ", ".join(f"{member} {scale.value:.6g}" for member, scale in known)
            wrong = max(max(v / values[0], values[0] / v) for v in values)
            got = f"{said}: with {known[0][0]}'s, another half decodes {wrong:.4g} times wrong"
            first = known[0][1].tensor
            yield Finding("fused-global-scale", first.file, f"{parent}.{group.fused}", f"one {leaf}", got)


def zero_block_scales(context: ScaleContext) -> Iterator[Finding]:
    for linear in context.linears.values():
        scale = context.of(linear, "weight_scale")
        if linear.kind in ("nvfp4", "ct-nvfp4") and scale is not None and scale.zeros:
            share = scale.zeros / scale.count
            if share > ZERO_SHARE_MAX:
                got = f"{share:.1%} ({scale.zeros:,} of {scale.count:,})"
                yield _at("zero-block-scales", scale.tensor, f"at most {ZERO_SHARE_MAX:.0%} of zeros", got)


def conventions(context: ScaleContext) -> Iterator[Finding]:
    """A scale that multiplies lies far below 1 for any sane weight (amax / 448); a divisor far above."""
    multipliers = ("weight_scale_inv", "scale_weight", "qscale_weight", "scale", "weight_scale_2", "_scales")
    for linear in context.linears.values():
        for leaf in linear.scales:
            scale = context.of(linear, leaf)
            if scale is None or scale.faulty:
                continue
            multiplies = leaf in multipliers or (
                leaf == "weight_scale" and linear.kind.startswith(("fp8", "mx", "int"))
            )
            if multiplies and scale.low > 1.0:
                got = (
                    f"{scale.low:.4g} and more: decoded weights of up to {scale.low * E4M3_MAX:.3g} and more"
                )
                yield _at("scale-convention", scale.tensor, "a number that multiplies, far below 1", got)
            elif leaf == "weight_global_scale" and 0 < scale.high < 1.0:
                yield _at("scale-convention", scale.tensor, "a divisor: 448 * 6 / amax", f"{scale.high:.4g}")


def ranges(context: ScaleContext) -> Iterator[Finding]:
    """One block scale that is beyond all others of its weight, or makes weights that no network has."""
    for linear in context.linears.values():
        grid = linear.grid
        scale = context.scales.get(grid.name) if grid is not None else None
        if scale is None or grid is None or scale.faulty or linear.kind in ("nvfp4", "ct-nvfp4"):
            continue
        if scale.count > 1 and scale.high > RANGE * scale.typical:
            yield _at("scale-range", grid, f"about {scale.typical:.3g}, as its others", f"{scale.high:.3g}")
        elif scale.high > DECODED_MAX:
            yield _at("scale-range", grid, f"a scale below {DECODED_MAX:g}", f"{scale.high:.3g}")


def powers_of_two(context: ScaleContext) -> Iterator[Finding]:
    """`scale_fmt: ue8m0` promises powers of two; others are rounded again at load, up to 2x."""
    if str(context.quantization.get("scale_fmt", "")).lower() != "ue8m0":
        return
    for linear in context.linears.values():
        scale = context.scales.get(linear.grid.name) if linear.grid is not None else None
        if scale is not None and linear.kind.startswith("fp8") and not scale.powers_of_two:
            yield _at(
                "scale-not-ue8m0", scale.tensor, "powers of two, as scale_fmt ue8m0 says", "other numbers"
            )


def _at(slug: str, tensor: Tensor, expected: str, got: str) -> Finding:
    return Finding(slug, tensor.file, tensor.name, expected, got)


OF_NAMES: tuple[Callable[[ScaleContext], Iterator[Finding]], ...] = (missing_input_scales, weight_only)
OF_VALUES: tuple[Callable[[ScaleContext], Iterator[Finding]], ...] = (
    placeholders,
    unit_global_scales,
    unit_weight_scales,
    outliers,
    fused_global_scales,
    zero_block_scales,
    conventions,
    ranges,
    powers_of_two,
)
