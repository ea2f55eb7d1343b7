"""Frozen tokens: a protocol's texts as the ids of one tokenizer, in a JSON file that both runs are given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardmill.verify.accept.client import Client
from shardmill.verify.accept.protocol import Protocol, ProtocolError, digest_of
from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.atomic import write_whole
from shardmill.verify.reading.bounded_json import BadJsonError

TOKENS_MAX = 8_000_000


@dataclass(frozen=True, slots=True)
class Tokens:
    """Text -> ids. `digest` is that of all ids, so that two runs can be held to the same ones."""

    protocol: str
    ids: Mapping[str, tuple[int, ...]]

    @property
    def digest(self) -> str:
        return digest_of({name: list(ids) for name, ids in self.ids.items()})

    def of(self, text: str) -> tuple[int, ...]:
        return self.ids[text_key(text)]


def text_key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def freeze(client: Client, model: str, protocol: Protocol) -> Tokens:
    """Tokenise every text by the server's own /tokenize. Raises ProtocolError where it has none."""
    ids = {}
    for text in protocol.texts():
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        reply = client.ask("/tokenize", body)
        if reply.body is None or not isinstance(reply.body.get("tokens"), list):
            raise ProtocolError(
                f"{client.url}/tokenize: cannot freeze tokens: {reply.failure}: {reply.detail}"
            )
        found = reply.body["tokens"]
        if not (found and all(type(token) is int and 0 <= token < 1 << 32 for token in found)):
            raise ProtocolError(
                f"{client.url}/tokenize: expected token ids for {text[:40]!r}, got {found!r:.60}"
            )
        ids[text_key(text)] = tuple(found)
    return Tokens(protocol.digest, ids)


def write_tokens(path: Path, tokens: Tokens) -> None:
    value = {"format": "shardmill/tokens/1", "protocol": tokens.protocol, "ids": dict(tokens.ids)}
    write_whole(path, (json.dumps(value) + "\n").encode())


def read_tokens(path: Path | None, protocol: Protocol) -> Tokens:
    """The frozen tokens of a protocol. Raises ProtocolError where they are another's or lack a text."""
    if path is None:
        tokens = Tokens(protocol.digest, {})
    else:
        tokens = _parse(path)
    if tokens.protocol != protocol.digest:
        raise ProtocolError(
            f"{path}: these tokens were frozen for another protocol than {protocol.name}; freeze again"
        )
    missing = [text for text in protocol.texts() if text_key(text) not in tokens.ids]
    if missing:
        raise ProtocolError(
            f"{protocol.name}: {len(missing)} texts have no frozen tokens, the first {missing[0][:40]!r}; "
            "make them with `shardmill verify accept freeze URL -o tokens.json` and pass --tokens"
        )
    return tokens


def _parse(path: Path) -> Tokens:
    try:
        value = bounded_json.loads(path.read_bytes(), values_max=TOKENS_MAX)
        protocol, ids = value["protocol"], {name: tuple(some) for name, some in value["ids"].items()}
    except (OSError, BadJsonError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"{path}: cannot be read as frozen tokens: {error}") from None
    for name, some in ids.items():
        if not all(type(token) is int and 0 <= token < 1 << 32 for token in some):
            raise ProtocolError(f"{path}: ids.{name:.16}: expected token ids, whole numbers from 0 on")
    return Tokens(str(protocol), ids)
