"""A verdict as a signed statement: what was asked of which files, what was found, and by which version.

`attest` makes a DSSE envelope of an in-toto statement whose subjects are the published files with their sha256 and
whose predicate is the verdict as `--json` prints it. `attested` reads such envelopes against a folder: who vouches for
what, and whether it is about the files that are here. A statement proves who said it, not that it is true.
Form: https://in-toto.io/Statement/v1; the kind of predicate is our own, `pkg:generic/shardmill/verdict@1`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardmill.verify.questions.dsse import (
    BadEnvelopeError,
    Opened,
    private_key,
    public_key,
    seal,
    unseal,
)
from shardmill.verify.questions.provenance import BUILDER, STATEMENT, this_version
from shardmill.verify.reading.file_pass import FileJob
from shardmill.verify.reading.manifest import canonical
from shardmill.verify.reading.source import Folder
from shardmill.verify.reading.stream import stream
from shardmill.verify.rules.findings import Finding, Report

VERDICT = "pkg:generic/shardmill/verdict@1"
MADE_AFTERWARDS = ("model.sig",)  # it may be made after a verdict, and vouches for itself
ENVELOPE_BYTES_MAX = 64 << 20


def attest(report: Report, folder: Path, key: Path, password: str | None) -> bytes:
    """The envelope that says, signed by `key` (PEM), what `report` says of the files in `folder`.

    Raises `dsse.KeyFileError`; UnreadableError where a file can't be read to its end.
    """
    signer = private_key(key, password)
    digests = _digests(folder)
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digests[name]}} for name in sorted(digests)],
        "predicateType": VERDICT,
        "predicate": {
            "verifier": {"id": f"{BUILDER}@{this_version()}"},
            "timeVerified": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "verdict": json.loads(report.as_json()),
        },
    }
    return seal(canonical(statement), signer)


def attested(folder: Path, envelopes: list[Path], keys: list[Path]) -> Report:
    """Which of `envelopes` one of `keys` (PEM) signed, what each says, and whether it is about these files.

    Raises `dsse.KeyFileError`.
    """
    report = Report("attested")
    known = {path: public_key(path) for path in keys}
    digests = _digests(folder)
    for envelope in envelopes:
        try:
            opened = unseal(_read(envelope), list(known.values()))
            report.facts[str(envelope)] = _said(opened, digests, report, str(envelope))
        except BadEnvelopeError as error:
            report.add(
                Finding("attestation-bad", str(envelope), "", "a verdict that a given key signed", str(error))
            )
    report.checks("signatures")
    report.checks("files")
    return report


def _digests(folder: Path) -> dict[str, str]:
    """File -> sha256, of every published file."""
    source = Folder(folder)
    jobs = [
        FileJob(name, size, True, ()) for name, size in source.files().items() if name not in MADE_AFTERWARDS
    ]
    return {name: result.sha256 for name, result in stream(source, jobs).items()}


def _read(envelope: Path) -> bytes:
    try:
        with envelope.open("rb") as file:
            return file.read(ENVELOPE_BYTES_MAX + 1)
    except OSError as error:
        raise BadEnvelopeError(error.strerror or "it can't be read") from None


def _said(opened: Opened, digests: Mapping[str, str], report: Report, place: str) -> dict[str, object]:
    """What the statement says, for people; its files are compared with these."""
    subjects, predicate = _facts(opened.statement)
    report.add(*_other_files(place, subjects, digests))
    verdict = predicate["verdict"]
    return {
        "signed by the key": f"sha256 {opened.key}",
        "question": verdict["question"],
        "verdict": verdict["status"],
        "checked": ", ".join(verdict["checked"]) or "nothing",
        "not checked": ", ".join(verdict["not_checked"]) or "nothing was left out",
        "not asked": ", ".join(verdict["not_asked"]) or "nothing",
        "findings": len(verdict["findings"]),
        "made": f"{predicate['timeVerified']} by {predicate['verifier']['id']}",
    }


def _facts(statement: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Subjects and predicate of a verdict. Raises BadEnvelopeError where the statement is of another kind."""
    try:
        if statement["_type"] != STATEMENT or statement["predicateType"] != VERDICT:
            raise BadEnvelopeError("its statement is no verdict")
        subjects = {str(row["name"]): str(row["digest"]["sha256"]) for row in statement["subject"]}
        predicate, verdict = statement["predicate"], statement["predicate"]["verdict"]
        texts = (
            verdict["question"],
            verdict["status"],
            predicate["timeVerified"],
            predicate["verifier"]["id"],
        )
        lists = (verdict["checked"], verdict["not_checked"], verdict["findings"], [*verdict["not_asked"]])
    except (KeyError, TypeError, AttributeError):
        raise BadEnvelopeError("its statement is no verdict") from None
    named = [name for names in lists[:2] if isinstance(names, list) for name in names]
    if not all(isinstance(text, str) for text in (*texts, *named)) or not all(
        isinstance(names, list) for names in lists
    ):
        raise BadEnvelopeError("its statement is no verdict")
    return subjects, predicate


def _other_files(place: str, subjects: Mapping[str, str], digests: Mapping[str, str]) -> list[Finding]:
    """One finding a file that the verdict is not about, or that it is about and is not here as it was."""
    found = []
    for name in sorted({*subjects, *digests}):
        if subjects.get(name) != digests.get(name):
            expected = f"{name}: sha256 {subjects[name]}" if name in subjects else f"no {name}"
            got = f"sha256 {digests[name]}" if name in digests else "no such file"
            found.append(Finding("attestation-differs", place, "", expected, got))
    return found
