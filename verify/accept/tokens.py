"""Frozen tokens: a protocol's texts as the ids of one tokenizer, in a JSON file that both runs are given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardmill.verify.accept.client import Client
from shardmill.verify.accept.protocol import Protocol, ProtocolError, digest_of


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
        ids[text_key(text)] = tuple(int(token) for token in reply.body["tokens"])
    return Tokens(protocol.digest, ids)


def write_tokens(path: Path, tokens: Tokens) -> None:
    value = {"format": "shardmill/tokens/1", "protocol": tokens.protocol, "ids": dict(tokens.ids)}
    path.write_text(json.dumps(value) + "\n", encoding="utf-8")


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
        value = json.loads(path.read_text(encoding="utf-8"))
        return Tokens(value["protocol"], {name: tuple(ids) for name, ids in value["ids"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"{path}: cannot be read as frozen tokens: {error}") from None
