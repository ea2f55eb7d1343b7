"""Speculative decoding: its acceptance from the server's counters, and the proof that scoring may trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmill.verify.accept.client import Client, MetricsError, counter, samples
from shardmill.verify.accept.identity import Identity
from shardmill.verify.accept.items import Item
from shardmill.verify.accept.runs import Run, RunError
from shardmill.verify.accept.score import entries_of

DRAFTS = "spec_decode_num_drafts"
ACCEPTED = "spec_decode_num_accepted_tokens_per_pos"
PROVEN_ITEMS = 3


class SpeculationError(RunError):
    """Prompt log probabilities are not to be trusted while a draft is on, unless that is shown first."""


def acceptance(client: Client, model: str) -> dict[str, float] | None:
    """The server's counters of speculative decoding as they stand; None where its page does not come.

    Raises SpeculationError on a bad metrics page.
    """
    try:
        page = client.get_or_none("/metrics")
        return None if page is None else count_acceptance(page, model)
    except MetricsError as error:
        raise SpeculationError(f"{client.url}/metrics: {error}") from None


def count_acceptance(page: str, model: str) -> dict[str, float]:
    """Counters of one model on a metrics page: drafts, and accepted tokens by position. Raises MetricsError."""
    found: dict[str, float] = {}
    for sample in samples(page):
        if sample.labels.get("model_name", model) != model:
            continue
        if DRAFTS in sample.name and sample.name.endswith("_total"):
            found["drafts"] = found.get("drafts", 0.0) + counter(sample)
        elif ACCEPTED in sample.name and sample.name.endswith("_total"):
            key = f"position {sample.labels.get('position', '?')}"
            found[key] = found.get(key, 0.0) + counter(sample)
    return found


def gained(before: Mapping[str, float], after: Mapping[str, float] | None) -> dict[str, float] | None:
    """What the counters gained between two readings; None where nothing was drafted, or a restart set them back."""
    by = {key: value - before.get(key, 0.0) for key, value in (after or {}).items()}
    return by if by.get("drafts", 0) > 0 and min(by.values()) >= 0 else None


def check_speculation(client: Client, identity: Identity, items: Sequence[Item], proof: Run | None) -> None:
    """Scoring needs speculation off, or a run with it off whose first documents come out bit for bit the same.

    Raises SpeculationError otherwise. The same server but for its draft must have made the proof.
    """
    if not identity.speculation:
        return
    scores = [item for item in items if item.kind == "score"][:PROVEN_ITEMS]
    if not scores:
        return
    if proof is None:
        raise SpeculationError(
            "this server has speculative decoding on, which has corrupted prompt log probabilities before: "
            "score with it off, or pass --equal-to RUN, a run of the same server with it off"
        )
    if proof.identity.speculation or proof.identity.checkpoint != identity.checkpoint:
        raise SpeculationError(
            f"{proof.folder}: no proof: it must be of the same checkpoint with speculation off"
        )
    for item in scores:
        row, reply = (
            proof.rows.get(item.id),
            client.ask(item.path, {"model": identity.model, **item.body}),
        )
        if row is None or not row.ok or reply.body is None:
            raise SpeculationError(f"{item.id}: cannot be compared with {proof.folder}")
        mine, theirs = entries_of(reply.body), entries_of(row.answer)
        if mine is None or mine != theirs:
            raise SpeculationError(
                f"{item.id}: prompt log probabilities change with speculation on; score with it off"
            )
