"""What model-signing says of files that are not the signed ones, as findings: the file first, digests as hex."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardmill.verify.rules.findings import Finding

FILES_MAX = 100  # files that are named

_DIGEST = r"Digest\(algorithm='\w+', digest_value=(b.*)\)"
_CHANGED = re.compile(rf"Hash mismatch for '(.*)': Expected '{_DIGEST}', Actual '{_DIGEST}'", re.DOTALL)
_LISTED = re.compile(r"(Extra files found|Missing files) in model '.*?': (.*)", re.DOTALL)


def differing(said: str) -> list[Finding]:
    """said: the library's message, a list of sentences as Python prints it. Empty where it says something else."""
    try:
        sentences = ast.literal_eval(said.removeprefix("Signature mismatch: "))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    if not said.startswith("Signature mismatch: ") or not isinstance(sentences, list):
        return []
    found = [finding for sentence in sentences for finding in _of(str(sentence))]
    return found[:FILES_MAX]


def _of(sentence: str) -> Iterator[Finding]:
    if changed := _CHANGED.fullmatch(sentence):
        expected, got = _hex(changed[2]), _hex(changed[3])
        yield Finding("signature-bad", changed[1], "", f"the signed digest {expected}", got)
    elif listed := _LISTED.fullmatch(sentence):
        extra = listed[1].startswith("Extra")
        expected, got = (
            ("no file but the signed ones", "one more") if extra else ("the signed file", "no such file")
        )
        yield from (Finding("signature-bad", name, "", expected, got) for name in listed[2].split(", "))
    else:
        yield Finding("signature-bad", "", "", "the signed files", sentence[:300])


def _hex(literal: str) -> str:
    """A digest that Python printed as bytes."""
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        return literal
    return value.hex() if isinstance(value, bytes) else literal
