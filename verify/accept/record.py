"""Ask a server everything that a protocol holds, and keep what it says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from shardmill.verify.accept.client import Client, Reply
from shardmill.verify.accept.identity import Identity
from shardmill.verify.accept.items import Item
from shardmill.verify.accept.rows import Row
from shardmill.verify.accept.runs import Run, RunError, add_notes, append_row, read_run, request_digest
from shardmill.verify.accept.score import entries_of, read_positions
from shardmill.verify.accept.speculation import acceptance, gained
from shardmill.verify.accept.watermark import Watermark

REFUSED = "refused"  # the detail of a request with one picture too many, as it should be
KEPT: tuple[str, ...] = ("choices", "usage")


def fault_of(item: Item, reply: Reply) -> tuple[str | None, str]:
    """How an answer fails although it came: empty, or truncated. A refused extra picture is the right answer."""
    if item.kind == "vision_limit" and reply.failure in (None, "http 4xx"):
        return None, "served" if reply.failure is None else REFUSED
    if reply.body is None:
        return reply.failure, reply.detail
    choices = reply.body.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        return "empty", "no choices"
    if item.kind == "score":
        return _score_fault(item, reply.body)
    generated = completion_tokens(reply)
    if generated <= 0:
        return "empty", "no tokens were generated"
    answers = item.kind in ("arithmetic", "vision") and not item.facts.get("blind")
    if answers and choices[0].get("finish_reason") == "length":
        return "truncated", "the answer ran into the token limit"
    if item.kind == "speed" and generated != item.body["max_tokens"]:
        return "truncated", f"{generated} of {item.body['max_tokens']} tokens"
    return None, ""


def completion_tokens(reply: Reply) -> int:
    """Generated tokens by the server's own count; 0 where it gives none."""
    usage = (reply.body or {}).get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if type(count) is int else 0


def _score_fault(item: Item, body: dict[str, Any]) -> tuple[str | None, str]:
    entries = entries_of(body)
    if entries is None:
        return "empty", "no prompt_logprobs: this server cannot score prompts"
    try:
        read_positions(item.body["prompt"], entries, 0, item.body.get("prompt_logprobs", 1))
    except ValueError as error:
        return "truncated", f"{error}; was the server started with --max-logprobs?"
    return None, ""


def keep(item: Item, identity: str, reply: Reply, counters: dict[str, float] | None = None) -> Row:
    """The row of a reply: of the body only what is judged later."""
    failure, detail = fault_of(item, reply)
    answer: dict[str, Any] | None = None
    if reply.body is not None:
        answer = {key: reply.body[key] for key in KEPT if key in reply.body}
    return Row(
        item.id,
        item.kind,
        request_digest(item),
        identity,
        answer,
        failure,
        detail,
        reply.attempts,
        reply.seconds,
        counters,
    )


@dataclass(slots=True)
class Recorder:
    """One recording: asks what is not yet answered, batch by batch; `tell` is called before each request."""

    client: Client
    identity: Identity
    folder: Path
    tell: Callable[[Item, int, int], None] = lambda item, done, total: None

    def record(self, items: Sequence[Item]) -> Run:
        """Ask every item that has no good row for the very same request; failures are asked again."""
        done = read_run(self.folder).rows
        wanted = [item for item in items if not _answered(item, done)]
        asked = 0
        for at_once, group in groupby(wanted, key=lambda item: int(item.facts.get("at_once", 1))):
            batch = list(group)
            for i in range(0, len(batch), at_once):
                self.tell(batch[i], asked, len(wanted))
                self._ask(batch[i : i + at_once], at_once)
                asked += len(batch[i : i + at_once])
        return read_run(self.folder)

    def _ask(self, batch: Sequence[Item], at_once: int) -> None:
        """One request, or `at_once` copies of it together for the throughput."""
        with ThreadPoolExecutor(at_once) as pool:
            for item in batch:
                before = self._counters()
                begin = time.monotonic()
                replies = list(pool.map(lambda _, item=item: self._reply(item), range(at_once)))
                seconds = time.monotonic() - begin
                reply = replies[0] if at_once == 1 else _together(replies, seconds)
                counters = gained(before, self._counters()) if before is not None else None
                append_row(self.folder, keep(item, self.identity.digest, reply, counters))

    def _counters(self) -> dict[str, float] | None:
        """The counters of a server that has a draft, None of one that has not."""
        return acceptance(self.client, self.identity.model) if self.identity.speculation else None

    def _reply(self, item: Item) -> Reply:
        if item.too_long:
            return Reply(None, "skipped", item.too_long, 0, 0.0)
        return self.client.ask(item.path, {"model": self.identity.model, **item.body})


def _answered(item: Item, rows: Any) -> bool:
    row = rows.get(item.id)
    return row is not None and row.ok and row.request == request_digest(item)


def _together(replies: Sequence[Reply], seconds: float) -> Reply:
    """Several replies as one: the first failure if any, else all tokens over the whole time."""
    failed = next((reply for reply in replies if reply.failure), None)
    if failed:
        return failed
    tokens = sum(completion_tokens(reply) for reply in replies)
    body = {
        **(replies[0].body or {}),
        "usage": {"completion_tokens": tokens // len(replies), "all_tokens": tokens},
    }
    return Reply(body, None, "", max(reply.attempts for reply in replies), seconds)


def record_all(recorder: Recorder, items: Sequence[Item]) -> Run:
    """Record, with the memory watermark around everything.

    Raises RunError where another recording is writing to the same folder.
    """
    try:
        with FileLock(recorder.folder / "recording.lock", timeout=0):
            return _record_all(recorder, items)
    except Timeout:
        raise RunError(
            f"{recorder.folder}: another recording is writing here; wait for it or stop it"
        ) from None


def _record_all(recorder: Recorder, items: Sequence[Item]) -> Run:
    with Watermark() as watermark:
        recorder.record(items)
    if watermark.mib is not None:
        add_notes(recorder.folder, least_free_mib=watermark.mib)
    return read_run(recorder.folder)
