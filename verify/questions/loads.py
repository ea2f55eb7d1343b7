"""What becomes of a checkpoint in a loader: which module takes each tensor, what it holds then, what is refused.

No loader is imported: `verify.formats` holds their modules as tables, and each table is held to the real loader by
tests that need it installed. Where there is no table for a loader, the question is not asked of it, and that is said.
"""

from __future__ import annotations

from shardmill.verify.formats.transformers_modules import template
from shardmill.verify.questions import loads_transformers, loads_vllm
from shardmill.verify.questions.structure import structure_faults
from shardmill.verify.questions.unasked import UnaskedError
from shardmill.verify.reading.checkpoint import Checkpoint, open_checkpoint
from shardmill.verify.reading.source import Source
from shardmill.verify.rules.findings import Finding, Report

LOADERS = ("vllm", "transformers", "sglang")
RUNTIMES = loads_vllm.RUNTIMES
SGLANG = "SGLang"


def loads(source: Source, runtime: str | None = None, loader: str | None = None) -> Report:
    """`runtime` of vLLM: "stock", "patched", or None for the one that the checkpoint's own entries ask for.

    `loader` None asks all of LOADERS; a refusal by transformers is then an error only if vLLM was not asked or
    refuses too, since it is loud and another loader serves.
    """
    report = Report("loads")
    checkpoint = open_checkpoint(source, report)
    report.add(*structure_faults(checkpoint))
    reasons: dict[str, str] = {}
    for each in (loader,) if loader else LOADERS:
        try:
            if each == "vllm":
                loads_vllm.add(checkpoint, runtime, report)
            elif each == "transformers":
                _transformers(checkpoint, report, alone=loader is not None or loads_vllm.NAME in reasons)
            else:
                raise UnaskedError(f"no table of {SGLANG}'s modules")
        except UnaskedError as error:
            reasons[{"vllm": loads_vllm.NAME, "transformers": loads_transformers.NAME}.get(each, SGLANG)] = (
                str(error)
            )
    if len(reasons) == (1 if loader else len(LOADERS)):
        report.leaves_out("loads", "; ".join(reasons.values()))
        return report
    report.checks("loads")
    for name, reason in reasons.items():
        report.leaves_out(name, f"not asked, because {reason}")
    return report


def _transformers(checkpoint: Checkpoint, report: Report, *, alone: bool) -> None:
    held = loads_transformers.hold(checkpoint)
    name = loads_transformers.NAME
    counts: dict[str, int] = {}
    for parameter, word in held.weights.items():
        key = f"{template(parameter)}: {word}"
        counts[key] = counts.get(key, 0) + 1
    report.facts[name] = {key: counts[key] for key in sorted(counts)}
    report.add(*held.wrong)
    if held.error:
        slug = "loader-refuses" if alone else "transformers-refuses"
        report.add(Finding(slug, "config.json", "", "what the loader takes", f"{name}: {held.error}"))
    if held.cpu_error and not held.error:
        expected = "sides that divide, for a load without a card"
        report.add(
            Finding("transformers-refuses", "config.json", "", expected, f"{name} on a CPU: {held.cpu_error}")
        )
