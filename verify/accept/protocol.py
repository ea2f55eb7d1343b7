"""A protocol: everything that is asked, as data. Texts become token ids once (`freeze`), so that both sides of a
comparison, and every later one, see the same tokens whatever their tokenizers or templates do.

Three protocols ship: `default`; `neutral`, which asks for bit-equal scores; and `published`, the frame of the published
card with its figures (its documents were not published).
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from shardmill.verify.accept.gates import Gate
from shardmill.verify.accept.metrics import OF_THE_TEST, PAIRED, rests_on

SHIPPED = Path(__file__).parent / "protocols"
TOP_K_MAX = 20  # what vLLM answers without a flag of its own
ANSWERED_AT_LEAST = 0.98  # of what a gate rests on; with less it is undecided


class ProtocolError(ValueError):
    """A protocol cannot be used. The message names the file, the key, what was expected and found."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text to score, or its token ids where they are frozen already."""

    id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Scoring:
    """Teacher-forced scoring: windows of at most `window_tokens`, the first `skip_tokens` of each unscored."""

    top_k: int = 20
    window_tokens: int = 2048
    skip_tokens: int = 16
    confident: float = 0.9


@dataclass(frozen=True, slots=True)
class Probes:
    """What is asked besides scoring; a probe with no prompts, rounds or lengths is left out."""

    greedy_prompts: tuple[str, ...] = ()
    greedy_tokens: int = 256
    unicode_prompts: tuple[str, ...] = ()
    unicode_tokens: int = 256
    filler: str = ""
    repetition_contexts: tuple[int, ...] = ()
    repetition_prompt: str = ""
    repetition_tokens: int = 2912
    needle_lengths: tuple[int, ...] = ()
    needle_depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    needle_sentence: str = ""
    needle_question: str = ""
    needle_salt: str = "1"
    needle_tokens: int = 48
    arithmetic_question: str = ""
    arithmetic_answer: str = ""
    vision_pictures: int = 0
    vision_images_max: int = 1
    speed_rounds: int = 0
    speed_warm_up: int = 1
    speed_tokens: int = 256
    speed_concurrency: tuple[int, ...] = (1, 4)
    soak_prompts: int = 0
    soak_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Published:
    """A published figure, to be printed beside its interval: `hits` of `n`."""

    name: str
    hits: int
    n: int


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol read from TOML. `digest` covers the whole file's meaning."""

    name: str
    summary: str
    seed: int
    scoring: Scoring
    documents: tuple[Document, ...]
    probes: Probes
    gates: tuple[Gate, ...]
    published: tuple[Published, ...]
    digest: str
    answered_at_least: float = ANSWERED_AT_LEAST

    def texts(self) -> Iterator[str]:
        """Every text that must become token ids before anything is asked."""
        yield from (document.text for document in self.documents if not document.token_ids)
        probes = self.probes
        yield from (*probes.greedy_prompts, *probes.unicode_prompts)
        yield from (t for t in (probes.filler, probes.repetition_prompt, probes.needle_question) if t)
        yield from needle_texts(probes)


def needle_texts(probes: Probes) -> list[str]:
    """One sentence to hide for each depth; the salt makes its number, so that no run can know another's."""
    if not probes.needle_sentence:
        return []
    return [
        probes.needle_sentence.replace("{number}", str(needle_number(probes, i)))
        for i in range(len(probes.needle_depths))
    ]


def needle_number(probes: Probes, index: int) -> int:
    """The seven-digit number hidden at a depth."""
    digest = hashlib.sha256(f"{probes.needle_salt}/{index}".encode()).digest()
    return 1_000_000 + int.from_bytes(digest[:4], "big") % 9_000_000


def read_protocol(name: str) -> Protocol:
    """A shipped protocol by name, or one from a path. Raises ProtocolError.

    `extends = "default"` takes every part from that shipped protocol that the file does not give itself.
    """
    data = _load(name)
    base = data.pop("extends", None)
    if base is not None:
        data = {**_load(str(base)), **data}
    return parse_protocol(name, data)


def _load(name: str) -> dict[str, Any]:
    path = SHIPPED / f"{name}.toml" if "/" not in name and not name.endswith(".toml") else Path(name)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.toml")))
        raise ProtocolError(
            f"{name}: no such protocol; shipped are {known}; or give the path of a .toml"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ProtocolError(f"{path}: cannot be read as TOML: {error}") from None


def parse_protocol(where: str, data: Mapping[str, Any]) -> Protocol:
    """A protocol from parsed TOML; unknown keys are refused."""
    known = {
        "name",
        "summary",
        "seed",
        "answered_at_least",
        "scoring",
        "documents",
        "probes",
        "gates",
        "published",
    }
    unknown = sorted(set(data) - known)
    if unknown:
        raise ProtocolError(
            f"{where}: {unknown[0]!r} is not a key of a protocol; known are {', '.join(sorted(known))}"
        )
    protocol = Protocol(
        name=_plain(where, "name", "str", data.get("name", where)),
        summary=_plain(where, "summary", "str", data.get("summary", "")),
        seed=_plain(where, "seed", "int", data.get("seed", 0)),
        scoring=_record(where, "scoring", Scoring, data.get("scoring", {})),
        documents=_records(where, "documents", Document, data),
        probes=_record(where, "probes", Probes, data.get("probes", {})),
        gates=_records(where, "gates", Gate, data),
        published=_records(where, "published", Published, data),
        digest=digest_of(data),
        answered_at_least=_plain(
            where, "answered_at_least", "float", data.get("answered_at_least", ANSWERED_AT_LEAST)
        ),
    )
    _check_scoring(where, protocol)
    for gate in protocol.gates:
        _check_gate(where, gate)
    return protocol


def _check_scoring(where: str, protocol: Protocol) -> None:
    scoring = protocol.scoring
    if not 1 <= scoring.top_k <= TOP_K_MAX:
        raise ProtocolError(f"{where}: scoring.top_k must be 1 to {TOP_K_MAX}, got {scoring.top_k}")
    if scoring.skip_tokens < 0 or scoring.window_tokens <= scoring.skip_tokens + 1:
        raise ProtocolError(f"{where}: scoring.window_tokens must exceed skip_tokens + 1")
    if not 0 < protocol.answered_at_least <= 1:
        raise ProtocolError(
            f"{where}: answered_at_least must be above 0 and at most 1, got {protocol.answered_at_least}"
        )
    sentence = protocol.probes.needle_sentence
    if sentence and "{number}" not in sentence:
        raise ProtocolError(f"{where}: probes.needle_sentence must hold {{number}}, got {sentence!r:.60}")
    ids = [document.id for document in protocol.documents]
    twice = next((id_ for id_ in ids if ids.count(id_) > 1), None)
    if twice is not None:
        raise ProtocolError(f"{where}: two documents have the id {twice!r}; documents are what is counted")


def _check_gate(where: str, gate: Gate) -> None:
    if (gate.at_least is None) == (gate.at_most is None):
        raise ProtocolError(f"{where}: gate {gate.metric!r} needs one of at_least and at_most")
    if not isfinite(gate.limit) or not 0.5 < gate.confidence < 1:
        raise ProtocolError(
            f"{where}: gate {gate.metric!r} needs a finite limit and a confidence between 0.5 and 1"
        )
    if rests_on(gate.metric) is None:
        known = ", ".join([*PAIRED, *OF_THE_TEST, "decode_cN", "mtp_acceptance_N"])
        raise ProtocolError(f"{where}: gate {gate.metric!r} is no metric; known are {known}")


def _records(where: str, key: str, kind: type[Any], data: Mapping[str, Any]) -> tuple[Any, ...]:
    tables = data.get(key, ())
    if not isinstance(tables, list | tuple):
        raise ProtocolError(f"{where}: {key} must be a list of tables, got {tables!r:.60}")
    return tuple(_record(where, key, kind, table) for table in tables)


def _record(where: str, key: str, kind: type[Any], table: Any) -> Any:
    """A dataclass from a table; lists become tuples; a key that it has not, or of another type, is refused."""
    if not isinstance(table, Mapping):
        raise ProtocolError(f"{where}: {key} must be a table, got {table!r:.60}")
    types = {field.name: str(field.type) for field in fields(kind)}
    unknown = sorted(set(table) - types.keys())
    if unknown:
        raise ProtocolError(f"{where}: {key}.{unknown[0]} is not known")
    values = {name: _plain(where, f"{key}.{name}", types[name], value) for name, value in table.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ProtocolError(f"{where}: {key}: {error}") from None


def _plain(where: str, key: str, expected: str, value: Any) -> Any:
    """A value of an annotated type: `str`, `int`, `float` (whole numbers too), `X | None`, or `tuple[X, ...]`."""
    kind = expected.removesuffix(" | None")
    if kind.startswith("tuple["):
        inner = kind.removeprefix("tuple[").removesuffix(", ...]")
        if isinstance(value, list | tuple):
            return tuple(_plain(where, key, inner, one) for one in value)
    elif type(value) in {"str": (str,), "int": (int,), "float": (int, float)}[kind]:
        return value
    raise ProtocolError(f"{where}: {key}: expected {kind}, got {value!r:.60}")


def digest_of(value: Any) -> str:
    """sha256 of canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()
