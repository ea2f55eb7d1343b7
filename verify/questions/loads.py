"""What becomes of a checkpoint in a loader: which module takes each tensor, what it holds then, what is refused.

No loader is imported: `verify.formats` holds their modules as tables, and each table is held to the real loader by
tests that need it installed. Where there is no table for a loader, the question is not asked of it, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmill.verify.formats.transformers_modules import template
from shardmill.verify.questions import loads_sglang, loads_transformers, loads_vllm
from shardmill.verify.questions.structure import structure_faults
from shardmill.verify.questions.unasked import UnaskedError
from shardmill.verify.reading.checkpoint import Checkpoint, open_checkpoint
from shardmill.verify.reading.source import Source
from shardmill.verify.rules.findings import Finding, Report

NAMES = {"vllm": loads_vllm.NAME, "transformers": loads_transformers.NAME, "sglang": loads_sglang.NAME}
LOADERS = tuple(NAMES)
RUNTIMES = loads_vllm.RUNTIMES
TAKEN = "what the loader takes"


def loads(
    source: Source, runtime: str | None = None, loader: str | None = None, *, beside: bool = False
) -> Report:
    """`runtime` of vLLM: "stock", "patched", or None for the one that the checkpoint's own entries ask for.

    `loader` None asks all of LOADERS; a refusal by transformers is then an error only if vLLM was not asked or
    refuses too, since it is loud and another loader serves. What SGLang refuses or gets wrong is a note beside any
    other loader that was asked.

    `beside`: asked among other questions, of the checkpoint rather than of a loader. What is a limit of one loader is
    then a note, if the files are another tool's; a child of ours is made for every loader, and answers for each.
    """
    report = Report("loads")
    checkpoint = open_checkpoint(source, report)
    report.add(*structure_faults(checkpoint))
    reasons: dict[str, str] = {}
    said: dict[str, list[Finding]] = {}
    for each in (loader,) if loader else LOADERS:
        try:
            if each == "vllm":
                said[each] = loads_vllm.ask(checkpoint, runtime, report)
            elif each == "transformers":
                alone = loader is not None or loads_vllm.NAME in reasons
                said[each] = _transformers(checkpoint, report, alone=alone)
            else:
                said[each] = _sglang(checkpoint, report)
        except UnaskedError as error:
            reasons[NAMES[each]] = str(error)
    if len(reasons) == (1 if loader else len(LOADERS)):
        report.leaves_out("loads", "; ".join(reasons.values()))
        return report
    report.checks("loads")
    if len(said) > 1:
        said["sglang"] = [_note("sglang", finding) for finding in said.get("sglang", ())]
    if beside and checkpoint.manifest is None:
        said = _noted(checkpoint, runtime, said)
    for findings in said.values():
        report.add(*findings)
    for name, reason in reasons.items():
        report.leaves_out(name, f"not asked, because {reason}")
    return report


def _noted(
    checkpoint: Checkpoint, runtime: str | None, said: dict[str, list[Finding]]
) -> dict[str, list[Finding]]:
    """The findings with those made notes that tell of one loader and of no fault of the files."""
    taken = {
        loader for loader, findings in said.items() if loader != "sglang" and not any(map(_refused, findings))
    }
    noted = {}
    for loader, findings in said.items():
        whole = loader != "vllm" or not taken or loads_vllm.complete(checkpoint, runtime)
        noted[loader] = [
            _note(loader, finding) if _of_one_loader(finding, bool(taken), whole) else finding
            for finding in findings
        ]
    return noted


def _refused(finding: Finding) -> bool:
    return finding.severity != "info" or finding.expected == TAKEN


def _of_one_loader(finding: Finding, taken: bool, whole: bool) -> bool:
    """`taken`: another loader that was asked holds everything right. `whole`: the model lacks nothing."""
    if finding.severity == "info":
        return False
    if finding.slug == "loader-refuses" and finding.expected.startswith(loads_vllm.DIVIDED):
        return True
    return taken and (whole or finding.slug != "no-home")


def _note(loader: str, finding: Finding) -> Finding:
    if finding.severity == "info":
        return finding
    name = NAMES[loader]
    got = finding.got if name in finding.got else f"{name}: {finding.got}"
    return Finding("one-loader", finding.file, finding.tensor, finding.expected, got)


def _counted(weights: Mapping[str, str]) -> dict[str, int]:
    """Parameters in memory, those of all layers together, with what they hold."""
    counts: dict[str, int] = {}
    for parameter, word in weights.items():
        key = f"{template(parameter)}: {word}"
        counts[key] = counts.get(key, 0) + 1
    return {key: counts[key] for key in sorted(counts)}


def _sglang(checkpoint: Checkpoint, report: Report) -> list[Finding]:
    held = loads_sglang.hold(checkpoint)
    report.facts[loads_sglang.NAME] = _counted(held.weights)
    if not held.error:
        return held.wrong
    return [Finding("loader-refuses", "config.json", "", TAKEN, f"{loads_sglang.NAME}: {held.error}")]


def _transformers(checkpoint: Checkpoint, report: Report, *, alone: bool) -> list[Finding]:
    held = loads_transformers.hold(checkpoint)
    name = loads_transformers.NAME
    report.facts[name] = _counted(held.weights)
    found = list(held.wrong)
    if held.error:
        slug = "loader-refuses" if alone else "transformers-refuses"
        found.append(Finding(slug, "config.json", "", TAKEN, f"{name}: {held.error}"))
    if held.cpu_error and not held.error:
        expected = "sides that divide, for a load without a card"
        got = f"{name} on a CPU: {held.cpu_error}"
        found.append(Finding("transformers-refuses", "config.json", "", expected, got))
    return found
