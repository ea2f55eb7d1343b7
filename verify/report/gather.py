"""Gathers the Facts of a checkpoint: its manifest, headers, what `verify lint` finds and what weights lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import groupby

from shardmill.verify.questions.lint import lint
from shardmill.verify.reading.checkpoint import Checkpoint, open_checkpoint
from shardmill.verify.reading.manifest import MANIFEST, Manifest
from shardmill.verify.reading.parents import open_parent
from shardmill.verify.reading.source import Source
from shardmill.verify.report.facts import (
    FORMAT,
    Facts,
    Family,
    File,
    Histogram,
    LayerError,
    Lint,
    RuleFindings,
    Weight,
)
from shardmill.verify.report.families import FamilyFacts, families_converted, families_recorded
from shardmill.verify.report.measure import Measure, measure, together, worst
from shardmill.verify.rules.findings import Report

WORST = 10
EXAMPLES_OF_A_RULE = 20
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")

Progress = Callable[[int, int], None]
Measures = Mapping[str, Measure]


def gather(source: Source, parent: Source | None, progress: Progress = lambda done, total: None) -> Facts:
    """The Facts of the checkpoint at `source`, compared with `parent` if it is given.

    Raises NoManifestError where there is no manifest of ours: without it nothing says what was converted.
    """
    opened = Report("report")
    checkpoint = open_checkpoint(source, opened)
    manifest = _manifest(checkpoint, opened)
    judged = lint(source, progress=progress)
    origin = open_parent(parent, checkpoint, Report("report"), Report("report")) if parent else None
    measures = measure(checkpoint, origin, progress) if origin else {}
    told = families_recorded(manifest)
    weights = tuple(_weight(name, checkpoint, manifest, measures) for name in sorted(manifest.conversions))
    return Facts(
        format=FORMAT,
        name=manifest.recipe,
        shardmill=version("shardmill"),
        repository=manifest.parent["repository"],
        revision=manifest.parent["revision"],
        parent_verified=manifest.parent_verified,
        compared=origin is not None,
        plan_key=manifest.plan_key,
        manifest_self=manifest.self_digest,
        numerics=manifest.numerics,
        algorithms=manifest.algorithms,
        tensors=len(checkpoint.tensors),
        tensor_bytes=checkpoint.tensor_bytes,
        file_bytes=sum(manifest.files[file].bytes for file in manifest.shards),
        parent_tensor_bytes=_parent_bytes(told, origin),
        families=_families(told or families_converted(checkpoint, manifest, origin), weights, measures),
        families_known=bool(told),
        weights=weights,
        worst=tuple(_histogram(name, measures[name]) for name in worst(measures, WORST)),
        files=_files(manifest),
        dropped=manifest.dropped,
        renamed=manifest.renamed,
        repairs=manifest.repairs,
        lint=lint_facts(judged),
    )


class NoManifestError(Exception):
    """The checkpoint has no manifest of ours, so nothing says what was converted."""


def _manifest(checkpoint: Checkpoint, opened: Report) -> Manifest:
    if MANIFEST not in checkpoint.files:
        raise NoManifestError(
            f"the checkpoint has no {MANIFEST}, so nothing says what was converted; report on a folder that "
            f"`shardmill build` made, or ask `shardmill verify lint` about any other"
        )
    faults = [finding for finding in opened.findings if finding.file == MANIFEST]
    if checkpoint.manifest is None or faults:
        edited = any(finding.slug == "manifest-self" for finding in faults)
        why = "was edited since it was written" if edited else "cannot be used"
        raise NoManifestError(f"{MANIFEST}: {why}; `shardmill verify integrity` says what is wrong")
    return checkpoint.manifest


def _parent_bytes(told: Sequence[FamilyFacts], origin: Checkpoint | None) -> int | None:
    """Every tensor of the parent belongs to one family, so their sum is the parent's."""
    if origin is not None:
        return origin.tensor_bytes
    return sum(family.bytes_before or 0 for family in told) if told else None


def layer_of(name: str) -> int | None:
    """The number of the layer or block that a tensor belongs to."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def _weight(name: str, checkpoint: Checkpoint, manifest: Manifest, measures: Measures) -> Weight:
    conversion, tensor = manifest.conversions[name], checkpoint.tensors.get(name)
    measured = measures.get(name)
    return Weight(
        name=name,
        family=conversion.family,
        layer=layer_of(name),
        file=tensor.file if tensor else "",
        shape=tensor.shape if tensor else (),
        block=conversion.block,
        numerics=conversion.numerics,
        blocks=conversion.counts.get("blocks"),
        exact_blocks=conversion.counts.get("exact_blocks"),
        rerounded=measured.rerounded if measured else False,
        error=measured.error if measured else None,
    )


def _families(
    told: Sequence[FamilyFacts], weights: Sequence[Weight], measures: Measures
) -> tuple[Family, ...]:
    members: dict[str, list[Weight]] = {each.name: [] for each in told}
    for weight in weights:
        members.setdefault(weight.family, []).append(weight)
    return tuple(_family(each, members[each.name], measures) for each in told)


def _family(told: FamilyFacts, weights: Sequence[Weight], measures: Measures) -> Family:
    # The measures stand in the order in which `verify roundtrip` adds them up: sums of floats depend on it.
    names = {weight.name for weight in weights}
    measured = {name: each for name, each in measures.items() if name in names}
    added = together(told.name, measured.values())
    counted = [weight for weight in weights if weight.exact_blocks is not None]
    return Family(
        name=told.name,
        action=told.action,
        reason=told.reason,
        block=told.block,
        numerics=tuple(sorted({weight.numerics for weight in weights})),
        tensors=told.tensors,
        bytes_before=told.bytes_before,
        bytes_after=told.bytes_after,
        scale_bytes=told.scale_bytes,
        blocks=sum(weight.blocks or 0 for weight in counted) if counted else None,
        exact_blocks=sum(weight.exact_blocks or 0 for weight in counted) if counted else None,
        rerounded=sum(each.rerounded for each in measured.values()),
        error=added.error if added else None,
        worst=_largest([each.error.stored for each in measured.values()]),
        layers=_layers(told.name, measured),
    )


def _largest(errors: Sequence[float | None]) -> float | None:
    """None where one of them is no number, which is worse than any."""
    known = [error for error in errors if error is not None]
    return max(known) if known and len(known) == len(errors) else None


def _layers(family: str, measured: Measures) -> tuple[LayerError, ...]:
    def order(name: str) -> tuple[bool, int]:
        layer = layer_of(name)
        return layer is None, layer or 0

    found = []
    for _, group in groupby(sorted(measured, key=order), order):
        names = list(group)
        added = together(family, (measured[name] for name in names))
        assert added is not None
        found.append(LayerError(layer_of(names[0]), len(names), added.error))
    return tuple(found)


def _histogram(name: str, measured: Measure) -> Histogram:
    counts = (measured.stored_counts, measured.served_counts, measured.code_counts)
    stored, served, codes = (tuple(each.tolist()) for each in counts)
    return Histogram(name, stored, served, codes)


def _files(manifest: Manifest) -> tuple[File, ...]:
    return tuple(
        File(name, record.bytes, record.sha256, _kind(manifest, name))
        for name, record in sorted(manifest.files.items())
    )


def _kind(manifest: Manifest, name: str) -> str:
    if name not in manifest.shards:
        return "other"
    return "rewritten" if manifest.shards[name].rewritten else "passed on"


def lint_facts(report: Report) -> Lint:
    """A lint report, its findings counted by rule, with the first few of each."""
    by_slug = [list(group) for _, group in groupby(report.worst_first(), key=lambda finding: finding.slug)]
    told = report.facts.get("tensor parallel")
    return Lint(
        status=report.status,
        checked=tuple(report.checked),
        not_checked=dict(report.not_checked),
        rules=tuple(
            RuleFindings(
                id=group[0].rule.id,
                slug=group[0].slug,
                severity=group[0].severity.value,
                sentence=group[0].rule.sentence,
                advice=group[0].rule.advice,
                count=report.count(group[0].slug),
                examples=tuple(finding.as_json() for finding in group[:EXAMPLES_OF_A_RULE]),
            )
            for group in by_slug
        ),
        tensor_parallel=str(told) if told else None,
    )
