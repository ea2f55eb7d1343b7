"""The files that lie beside a toy parent's weights: config, tokenizer, chat template, licence, README."""

from __future__ import annotations

import json
from typing import Any

from shardmill.pipeline.toy.config import config
from shardmill.pipeline.toy.sizes import Size
from shardmill.pipeline.toy.tokenizer import CHAT_TEMPLATE, token_id, tokenizer, tokenizer_config

_BYTES = "toy/1"  # names the bytes: whoever changes one byte of a toy gives it a new name
_LICENSE = """\
The numbers in this folder were made by a program from integers. They describe no trained model, and nobody
claims rights in them: CC0 1.0 Universal, https://creativecommons.org/publicdomain/zero/1.0/
"""


def side_files(size: Size) -> dict[str, str]:
    """File name -> text, for every file but the weights and their index."""
    return {
        "README.md": readme(size),
        "LICENSE": _LICENSE,
        "chat_template.jinja": CHAT_TEMPLATE,
        "config.json": _json(config(size.dimensions)),
        "generation_config.json": _json(_generation()),
        "tokenizer.json": _json(tokenizer()),
        "tokenizer_config.json": _json(tokenizer_config()),
    }


def readme(size: Size) -> str:
    """The README, which also marks the folder as ours to write to again."""
    return f"""\
# Toy parent `{size.name}`

Made by `shardmill toy-parent --size {size.name}`: {size.purpose}.

It has the structure of LibertAIDAI/GLM-5.3-Flash-NVFP4 and none of its knowledge: each number follows from
integers (`{_BYTES}`). It may be made again, byte for byte, by the same command.
"""


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _generation() -> dict[str, Any]:
    return {
        "do_sample": True,
        "eos_token_id": [token_id(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")],
        "pad_token_id": token_id("<|endoftext|>"),
        "temperature": 1.0,
        "top_p": 0.95,
    }
