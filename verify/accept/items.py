"""What is asked, request by request: a protocol, its frozen tokens and a server's limit give a fixed list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardmill.verify.accept.pictures import Picture, draw_pictures
from shardmill.verify.accept.protocol import Document, Protocol, needle_texts
from shardmill.verify.accept.tokens import Tokens

Kind = Literal[
    "score",
    "greedy",
    "unicode",
    "repetition",
    "needle",
    "arithmetic",
    "vision",
    "vision_limit",
    "speed",
    "soak",
]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ANSWER_TOKENS = 1024  # a reasoning model thinks before it answers a short question
SOAK_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Item:
    """One request. `facts` are what its answer is judged by; `too_long` says why it is skipped."""

    id: str
    kind: Kind
    path: str
    body: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    too_long: str = ""


def list_items(protocol: Protocol, tokens: Tokens, limit: int) -> list[Item]:
    """Every request in order: scoring, then the probes; with a soak the probes come again after it.

    limit: the server's longest context in tokens, 0 where it does not say.
    """
    room = limit or 1 << 62
    items = list(_scores(protocol, tokens, room))
    items += _probes(protocol, tokens, room, "before")
    if protocol.probes.soak_prompts:
        items += _soak(protocol, tokens, room)
        items += _probes(protocol, tokens, room, "after")
    return items


def _probes(protocol: Protocol, tokens: Tokens, room: int, phase: str) -> Iterator[Item]:
    yield from _generations(protocol, tokens, room, phase)
    yield from _repetitions(protocol, tokens, room, phase)
    yield from _needles(protocol, tokens, room, phase)
    yield from _questions(protocol, phase)
    yield from _speed(protocol, tokens, phase)


def _scores(protocol: Protocol, tokens: Tokens, room: int) -> Iterator[Item]:
    scoring = protocol.scoring
    size = min(scoring.window_tokens, room - 1)
    for document in protocol.documents:
        ids = document_ids(document, tokens)
        for i, begin in enumerate(range(0, len(ids), size)):
            window = ids[begin : begin + size]
            if len(window) > scoring.skip_tokens + 1:
                body = {
                    "prompt": list(window),
                    "max_tokens": 1,
                    "temperature": 0,
                    "prompt_logprobs": scoring.top_k,
                }
                facts = {"document": document.id, "tokens": len(window)}
                yield Item(f"score/{document.id}/{i}", "score", COMPLETIONS, body, facts)


def document_ids(document: Document, tokens: Tokens) -> tuple[int, ...]:
    return document.token_ids or tokens.of(document.text)


def _generate(ids: list[int], count: int, **more: Any) -> dict[str, Any]:
    return {"prompt": ids, "max_tokens": count, "temperature": 0, "return_token_ids": True, **more}


def _generations(protocol: Protocol, tokens: Tokens, room: int, phase: str) -> Iterator[Item]:
    probes = protocol.probes
    for i, text in enumerate(probes.greedy_prompts):
        ids = list(tokens.of(text))
        body = _generate(ids, min(probes.greedy_tokens, room - len(ids)), logprobs=2)
        yield Item(f"greedy/{phase}/{i}", "greedy", COMPLETIONS, body)
    for i, text in enumerate(probes.unicode_prompts):
        ids = list(tokens.of(text))
        body = _generate(ids, min(probes.unicode_tokens, room - len(ids)))
        yield Item(f"unicode/{phase}/{i}", "unicode", COMPLETIONS, body)


def filler_ids(tokens: Tokens, filler: str, count: int, turn: int = 0) -> list[int]:
    """`count` tokens of the filler over and over, begun `turn` tokens in, so that no cached prefix serves it."""
    ids = tokens.of(filler)
    return [ids[(turn + i) % len(ids)] for i in range(count)]


def _repetitions(protocol: Protocol, tokens: Tokens, room: int, phase: str) -> Iterator[Item]:
    probes = protocol.probes
    for context in probes.repetition_contexts:
        end = list(tokens.of(probes.repetition_prompt))
        ids = [*filler_ids(tokens, probes.filler, max(context - len(end), 1)), *end]
        body = _generate(ids, probes.repetition_tokens)
        why = _too_long(len(ids) + probes.repetition_tokens, room)
        yield Item(f"repetition/{phase}/{context}", "repetition", COMPLETIONS, body, too_long=why)


def _needles(protocol: Protocol, tokens: Tokens, room: int, phase: str) -> Iterator[Item]:
    probes = protocol.probes
    if not probes.needle_sentence:
        return
    needles = [list(tokens.of(text)) for text in needle_texts(probes)]
    question = list(tokens.of(probes.needle_question))
    for length in probes.needle_lengths:
        free = max(length - len(question) - sum(map(len, needles)), len(needles))
        ids = filler_ids(tokens, probes.filler, free)
        for depth, needle in sorted(zip(probes.needle_depths, needles, strict=True), reverse=True):
            place = int(depth * free)
            ids[place:place] = needle
        body = _generate([*ids, *question], probes.needle_tokens)
        why = _too_long(len(ids) + len(question) + probes.needle_tokens, room)
        yield Item(f"needle/{phase}/{length}", "needle", COMPLETIONS, body, too_long=why)


def _questions(protocol: Protocol, phase: str) -> Iterator[Item]:
    probes = protocol.probes
    if probes.arithmetic_question:
        body = _chat([{"type": "text", "text": probes.arithmetic_question}])
        facts = {"answer": probes.arithmetic_answer}
        yield Item(f"arithmetic/{phase}", "arithmetic", CHAT, body, facts)
    pictures = draw_pictures(probes.vision_pictures, protocol.seed)
    for i, picture in enumerate(pictures):
        facts = {"answer": picture.answer, "question": picture.question}
        body = _chat([*_images([picture]), {"type": "text", "text": picture.question}])
        yield Item(f"vision/{phase}/{i}", "vision", CHAT, body, facts)
    if pictures:
        blind = _chat([{"type": "text", "text": pictures[0].question}])
        yield Item(f"vision/{phase}/blind", "vision", CHAT, {**blind, "max_tokens": 1}, {"blind": True})
        many = [pictures[i % len(pictures)] for i in range(probes.vision_images_max + 1)]
        body = _chat([*_images(many), {"type": "text", "text": "How many pictures are there?"}])
        yield Item(f"vision_limit/{phase}", "vision_limit", CHAT, body)


def _chat(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": ANSWER_TOKENS, "temperature": 0}


def _images(pictures: list[Picture]) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": picture.url}} for picture in pictures]


def _speed(protocol: Protocol, tokens: Tokens, phase: str) -> Iterator[Item]:
    probes = protocol.probes
    if not probes.speed_rounds:
        return
    prompt = probes.greedy_prompts[0] if probes.greedy_prompts else probes.filler
    body = _generate(list(tokens.of(prompt)), probes.speed_tokens, ignore_eos=True)
    for at_once in probes.speed_concurrency:
        for i in range(probes.speed_warm_up + probes.speed_rounds):
            facts = {"at_once": at_once, "warm_up": i < probes.speed_warm_up}
            yield Item(f"speed/{phase}/c{at_once}/{i}", "speed", COMPLETIONS, body, facts)


def _soak(protocol: Protocol, tokens: Tokens, room: int) -> Iterator[Item]:
    probes = protocol.probes
    count = min(probes.soak_tokens, room - SOAK_ANSWER_TOKENS)
    for i in range(probes.soak_prompts):
        ids = filler_ids(tokens, probes.filler, count, turn=1 + 7 * i)
        body = _generate(ids, SOAK_ANSWER_TOKENS)
        yield Item(f"soak/{i}", "soak", COMPLETIONS, body, {"tokens": count, "wanted": probes.soak_tokens})


def _too_long(tokens: int, room: int) -> str:
    return f"{tokens:,} tokens exceed the server's {room:,}" if tokens > room else ""
