"""No control character of a stranger's reaches a terminal raw, whatever file, name, key or answer holds it."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardmill.verify.commands.group import verify
from tests.verify.zoo.clean import mixed_child
from tests.verify.zoo.model import MANIFEST, Blob, Model, bf16, canonical, raw_file
from tests.verify.zoo.published import PUBLISHED, parent

# An escape that moves the cursor, its one-byte form, a bell, a carriage return, a turn of direction, a line separator.
EVIL = "x\x1b[2J\x9b31m\x07\r\u202e\u2028y"
QUESTIONS = (
    ("integrity",),
    ("lint",),
    ("lint", "--headers-only", "--tp", "3"),
    ("loads",),
    ("all",),
    ("integrity", "--parent", "P"),
    ("all", "--parent", "P"),
    ("roundtrip", "--parent", "P"),
    ("reproduce", "--parent", "P"),
    ("origin", "--parent", "P"),
    ("origin",),
    ("diff", "P"),
    ("signature", "--public-key", "KEY"),
)


def _config(key: str, value: Any = EVIL) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        assert model.config is not None
        model.config[key] = value

    return change


def _quantization(key: str, value: Any = EVIL) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        assert model.config is not None
        model.config.setdefault("quantization_config", {})[key] = value

    return change


def _other(file: str, data: bytes) -> Callable[[Model], None]:
    return lambda model: model.others.__setitem__(file, data)


def _named(model: Model) -> None:
    model.shards["model.safetensors"][f"model.layers.0.{EVIL}.weight"] = bf16("n", 32, 32)


def _unknown_dtype(model: Model) -> None:
    model.shards["model.safetensors"]["model.odd"] = Blob(EVIL, (4,), b"abcd")


def _index(model: Model) -> None:
    model.others["model.safetensors.index.json"] = json.dumps(
        {
            "metadata": {"total_size": EVIL},
            "weight_map": {f"a{EVIL}": "model.safetensors", "b": f"{EVIL}.safetensors"},
        }
    ).encode()


def _broken_header(model: Model) -> None:
    model.others["other.safetensors"] = raw_file(('{"' + "a\x1b[2J" + '":{}}').encode())


def _metadata(model: Model) -> None:
    model.others["other.safetensors"] = raw_file(json.dumps({"__metadata__": {EVIL: 3}}).encode())


FIELDS: dict[str, Callable[[Model], None]] = {
    "a tensor's name": _named,
    "a dtype": _unknown_dtype,
    "an index": _index,
    "a header": _broken_header,
    "metadata": _metadata,
    "model_type": _config("model_type"),
    "architectures": _config("architectures", [EVIL, f"{EVIL}ForCausalLM"]),
    "torch_dtype": _config("torch_dtype"),
    "a key of the config": _config(EVIL, {EVIL: EVIL}),
    "rope": _config("rope_scaling", {EVIL: EVIL, "type": EVIL}),
    "hidden_size": _config("hidden_size"),
    "tie_word_embeddings": _config("tie_word_embeddings"),
    "quant_method": _quantization("quant_method"),
    "quant_algo": _quantization("quant_algo"),
    "exclusions": _quantization("modules_to_not_convert", [EVIL, f"re:{EVIL}(", f"*{EVIL}*"]),
    "quantized_layers": _quantization("quantized_layers", {EVIL: {"quant_algo": EVIL, "group_size": EVIL}}),
    "config_groups": _quantization(
        "config_groups", {EVIL: {"targets": [EVIL], "weights": {"strategy": EVIL}}}
    ),
    "weight_block_size": _quantization("weight_block_size", [EVIL, EVIL]),
    "the cache's scheme": _quantization("kv_cache_scheme", {EVIL: EVIL}),
    "hf_quant_config": _other(
        "hf_quant_config.json", json.dumps({"quantization": {"quant_algo": EVIL}}).encode()
    ),
    "a tokenizer": _other(
        "tokenizer_config.json", json.dumps({"tokenizer_class": EVIL, "eos_token": EVIL}).encode()
    ),
    "generation_config": _other(
        "generation_config.json", json.dumps({"eos_token_id": EVIL, EVIL: 1}).encode()
    ),
    "modules.json": _other("modules.json", json.dumps([{"path": EVIL, "type": EVIL}]).encode()),
    "adapter_config.json": _other(
        "adapter_config.json", json.dumps({"base_model_name_or_path": EVIL}).encode()
    ),
    "a file's name": _other(f"{EVIL}.json".replace("/", ""), b"{}"),
    "a shard's name": _other(f"{EVIL}.safetensors", b"\0" * 9),
    "a config that is no JSON": _other("generation_config.json", EVIL.encode()),
    "an error page": _other("tokenizer.json", f"<html>{EVIL}</html>".encode()),
}


def _raw(text: str) -> list[str]:
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c not in "\n\t"]


def _ask(folder: Path, question: tuple[str, ...], more: tuple[str, ...]) -> None:
    words = [
        {"P": str(folder / "parent"), "KEY": str(folder / "key.pem")}.get(word, word) for word in question
    ]
    asked = [words[0], str(folder / "child"), *words[1:], *more]
    result = CliRunner().invoke(verify, asked)
    assert result.exception is None or isinstance(result.exception, SystemExit), asked
    shown = result.output + (result.stderr if result.stderr_bytes is not None else "")
    assert _raw(shown) == [], asked
    if more and result.stdout.strip():
        json.loads(result.stdout)


@pytest.mark.parametrize("field", FIELDS)
def test_a_control_character_is_escaped_wherever_it_comes_from(tmp_path: Path, field: str) -> None:
    model = next(one for one in PUBLISHED if one.name == "block fp8").model()
    FIELDS[field](model)
    model.write(tmp_path / "child")
    parent(False).write(tmp_path / "parent")
    (tmp_path / "key.pem").write_text("-----BEGIN PUBLIC KEY-----\nAA==\n-----END PUBLIC KEY-----\n")
    number = list(FIELDS).index(field)
    for question in QUESTIONS[number % 13 :: 13]:
        _ask(tmp_path, question, ("--json",) if number % 3 == 1 else ())


@pytest.mark.parametrize(
    "place", ["families", "repairs", "recipe", "parent", "renamed", "dropped", "numerics"]
)
def test_a_control_character_of_a_manifest_is_escaped(tmp_path: Path, place: str) -> None:
    mixed_child().write(tmp_path / "child")
    mixed_child().write(tmp_path / "parent")
    (tmp_path / "key.pem").write_text("no key")
    path = tmp_path / "child" / MANIFEST
    value = json.loads(path.read_bytes())
    first = next(iter(value["conversions"]))
    for change in (
        lambda: value["conversions"][first].__setitem__(
            "numerics" if place == "numerics" else "family", EVIL
        ),
        lambda: value.__setitem__("repairs", [{"repair": "reconcile/1", "tensor": EVIL}]),
        lambda: value["recipe"].__setitem__("name", EVIL),
        lambda: value.__setitem__("parent", {"repository": EVIL, "revision": EVIL}),
        lambda: value.__setitem__("renamed", {EVIL: f"{EVIL}z"}),
        lambda: value.__setitem__("dropped", [EVIL]),
    ):
        change()
    path.write_bytes(canonical(value))
    for question in QUESTIONS[:: 3 if place == "family" else 4]:
        _ask(tmp_path, question, ())


class _Evil(BaseHTTPRequestHandler):
    """Answers with control characters in its status line, its headers and its page."""

    def do_GET(self) -> None:
        self.wfile.write(f"HTTP/1.1 {self.server.code} \x1b[2J\x07\r\n".encode())  # type: ignore[attr-defined]
        self.wfile.write(
            b"Content-Range: bytes \x1b[31m/\x07\r\nContent-Length: 4\r\nConnection: close\r\n\r\nab\x1b["
        )

    do_HEAD = do_GET  # noqa: N815 (the library's name)

    def log_message(self, *_: object) -> None:
        return None


@pytest.mark.parametrize("code", [200, 206, 404, 418, 503])
def test_a_servers_status_line_and_headers_are_escaped(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading
    from http.server import ThreadingHTTPServer

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Evil)
    server.code = code  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    try:
        place = f"http://127.0.0.1:{server.server_port}/m"
        result = CliRunner().invoke(verify, ["lint", place, "--timeout", "5"])
    finally:
        server.shutdown()
        server.server_close()
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.exit_code in (1, 2)
    assert _raw(result.output) == []
