"""Does the checkpoint make sense? Its scales, names, groups and config, by rules; no parent needed.

Rules are selected by id, slug or the front of an id; a finding is ignored only by a line that gives its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardmill.verify.formats.claims import claim_faults
from shardmill.verify.formats.declared import declaration
from shardmill.verify.formats.forms.kv_cache import cache_faults
from shardmill.verify.formats.schemes import pair_faults, quantized
from shardmill.verify.questions.code_range import range_faults
from shardmill.verify.questions.coverage import coverage_of
from shardmill.verify.questions.decoded_sizes import sizes_of
from shardmill.verify.questions.entries import entry_faults
from shardmill.verify.questions.lint_config import config_faults
from shardmill.verify.questions.lint_experts import expert_faults
from shardmill.verify.questions.lint_names import name_faults, names_of
from shardmill.verify.questions.lint_scales import ScaleContext, scale_faults
from shardmill.verify.questions.lint_siblings import sibling_faults
from shardmill.verify.questions.lint_sizes import size_faults
from shardmill.verify.questions.lint_towers import tower_faults
from shardmill.verify.questions.lint_words import word_faults
from shardmill.verify.questions.scale_values import SAMPLE_BYTES, read_scales
from shardmill.verify.questions.structure import structure_faults
from shardmill.verify.questions.tensor_parallel import demanded, sentence, tensor_parallel
from shardmill.verify.reading.checkpoint import Checkpoint, open_checkpoint
from shardmill.verify.reading.seeds import fresh_seed
from shardmill.verify.reading.source import Source
from shardmill.verify.rules.findings import Finding, Report
from shardmill.verify.rules.table import RULES, rule_named

OF_NAMES = (name_faults, config_faults, expert_faults, tower_faults, sibling_faults, word_faults)


@dataclass(frozen=True, slots=True)
class Ignore:
    """One line of an ignore file: `SM104 model.layers.*.down_proj.input_scale  # measured, see card`."""

    slug: str
    pattern: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        return finding.slug == self.slug and fnmatchcase(finding.tensor or finding.file, self.pattern)


@dataclass(frozen=True, slots=True)
class LintOptions:
    """What the user asked for beside the checkpoint."""

    read_data: bool = True
    sample_bytes: int | None = None
    tp: tuple[int, ...] = ()
    select: frozenset[str] | None = None  # slugs
    ignore: tuple[Ignore, ...] = ()
    seed: int | None = None  # of the sample of scales; None: one of the system's


def lint(
    source: Source,
    options: LintOptions = LintOptions(),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    report = Report("lint")
    checkpoint = open_checkpoint(source, report)
    linears = quantized(checkpoint.tensors)
    report.add(*structure_faults(checkpoint), *pair_faults(linears.values()))
    report.add(*entry_faults(checkpoint, linears))
    declared = declaration(checkpoint.quantization)[0] if checkpoint.quantization else None
    names = names_of(checkpoint, linears, declared)
    for faults in OF_NAMES:
        report.add(*faults(names))
    report.add(*claim_faults(checkpoint.quantization, declared, linears))
    report.add(*cache_faults(checkpoint.tensors, checkpoint.quantization))
    report.checks("names")
    if options.read_data:
        budget = (
            options.sample_bytes
            if options.sample_bytes is not None
            else SAMPLE_BYTES
            if source.remote
            else None
        )
        seed = fresh_seed() if options.seed is None else options.seed
        scales = read_scales(checkpoint, linears, report, budget, progress, seed)
        seen = scales.keys() | {linear.weight.name for linear in linears.values() if linear.weight}
        sampled = "scales" not in report.checked
        report.coverage = coverage_of(checkpoint, linears, seen, sampled, floats=False)
        if sampled:
            report.facts["seed"] = seed
        report.add(*scale_faults(ScaleContext(linears, scales, declared, checkpoint.quantization)))
        if budget is None:
            report.add(*size_faults(sizes_of(checkpoint, linears, declared)))
            report.add(*range_faults(checkpoint, linears, declared))
            report.checks("decoded sizes")
        else:
            report.leaves_out("decoded sizes", "a sample of scales alone was read")
    else:
        report.leaves_out("scales", "headers only")
        report.coverage = coverage_of(checkpoint, linears, None, floats=False)
        context = ScaleContext(linears, {}, declared, checkpoint.quantization)
        report.add(*scale_faults(context))
    if linears:
        verdict = tensor_parallel(linears, declared, options.tp, names.count("num_key_value_heads"))
        report.facts["tensor parallel"] = sentence(verdict)
        report.add(*demanded(verdict, options.tp))
    return finish(report, checkpoint, options)


def finish(report: Report, checkpoint: Checkpoint, options: LintOptions) -> Report:
    """The report with only the selected rules, without what is ignored, and with a line for each fine file."""
    kept = Report(
        report.question, report.checked, report.not_checked, facts=report.facts, coverage=report.coverage
    )
    ignored: dict[str, int] = {}
    for finding in report.findings:
        if options.select is not None and finding.slug not in options.select:
            continue
        line = next((line for line in options.ignore if line.covers(finding)), None)
        if line is None:
            kept.add(finding)
        else:
            said = f"{RULES[line.slug].id} {line.slug}: {line.reason}"
            ignored[said] = ignored.get(said, 0) + 1
    ignored_rules = {line.slug for line in options.ignore}
    for slug, count in report.more.items():
        if slug not in ignored_rules and (options.select is None or slug in options.select):
            kept.more[slug] = count
    if ignored:
        kept.facts["ignored"] = {said: ignored[said] for said in sorted(ignored)}
    faulty = {finding.file for finding in kept.findings if finding.severity != "info"}
    kept.fine = [
        f"{file}: {len(header.tensors):,} tensors"
        for file, header in checkpoint.headers.items()
        if file not in faulty
    ]
    return kept


def parse_selection(text: str) -> frozenset[str]:
    """Slugs of `SM1,SM202,placeholder-input-scale`: ids, fronts of ids, slugs. Raises ValueError."""
    slugs: set[str] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        rule = rule_named(part)
        found = {rule.slug} if rule else {s for s, r in RULES.items() if r.id.startswith(part.upper())}
        if not found:
            raise ValueError(f"{part!r} is no rule; --list-rules shows them")
        slugs |= found
    return frozenset(slugs)


def parse_ignores(lines: Iterable[str]) -> Iterator[Ignore]:
    """Lines of an ignore file. Raises ValueError for one without a known rule or without a reason."""
    for number, line in enumerate(lines, 1):
        body, _, reason = line.partition("#")
        parts = body.split()
        if not parts:
            continue
        rule = rule_named(parts[0])
        if rule is None or len(parts) > 2:
            raise ValueError(f"line {number}: {body.strip()!r} is not `RULE [PATTERN]  # reason`")
        if not reason.strip():
            raise ValueError(f"line {number}: {parts[0]} is ignored without a reason; write one after #")
        yield Ignore(rule.slug, parts[1] if len(parts) == 2 else "*", reason.strip())
