"""Zeros that a manifest's digest covers are named and are no fault; without a manifest they are one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from shardmill.verify.questions.dead_data import as_published
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.rules.findings import Finding, Severity

ZEROS = [Finding(slug, "a.safetensors", "w", "no zeros", "zeros") for slug in ("zero-weight", "zero-hole")]


def checkpoint(*digested: str) -> Checkpoint:
    shard = SimpleNamespace(tensors=dict.fromkeys(digested, "0" * 32))
    return cast(Checkpoint, SimpleNamespace(manifest=SimpleNamespace(shards={"a.safetensors": shard})))


def test_zeros_under_a_digest_are_an_info() -> None:
    """They stay in the verdict, under SM134, and don't change the exit code."""
    found = list(as_published(checkpoint("w"), ZEROS))
    assert [finding.slug for finding in found] == ["zeros-published"] * 2
    assert {finding.severity for finding in found} == {Severity.INFO}


@pytest.mark.parametrize(
    "place",
    [checkpoint("other"), cast(Checkpoint, SimpleNamespace(manifest=None))],
    ids=["other tensors", "no manifest"],
)
def test_zeros_without_a_digest_stay_what_they_are(place: Checkpoint) -> None:
    """A manifest that says nothing of a tensor excuses nothing of it."""
    assert list(as_published(place, ZEROS)) == ZEROS
