"""The files that lie beside a toy parent's weights: tokenizer, chat template, licence, README.

The tokenizer is the smallest honest one: a token for each byte, then the special ones; no merges. The
`tokenizers` and `transformers` libraries load it.
"""

from __future__ import annotations

import json
from typing import Any

from pipeline.toy.config import config
from pipeline.toy.sizes import Size

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
    "<|begin_of_image|>",
    "<|image|>",
    "<|end_of_image|>",
)
_BYTES = "toy/1"  # names the bytes: whoever changes one byte of a toy gives it a new name
_FIRST_SPECIAL = 256
_ENDS = [
    _FIRST_SPECIAL + SPECIAL_TOKENS.index(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")
]
_CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""
_LICENSE = """\
The numbers in this folder were made by a program from integers. They describe no trained model, and nobody
claims rights in them: CC0 1.0 Universal, https://creativecommons.org/publicdomain/zero/1.0/
"""


def side_files(size: Size) -> dict[str, str]:
    """File name -> text, for every file but the weights and their index."""
    return {
        "README.md": readme(size),
        "LICENSE": _LICENSE,
        "chat_template.jinja": _CHAT_TEMPLATE,
        "config.json": _json(config(size.dimensions)),
        "generation_config.json": _json(_generation()),
        "tokenizer.json": _json(_tokenizer()),
        "tokenizer_config.json": _json(_tokenizer_config()),
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
        "eos_token_id": _ENDS,
        "pad_token_id": _FIRST_SPECIAL,
        "temperature": 1.0,
        "top_p": 0.95,
    }


def _tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {symbol: number for number, symbol in enumerate(byte_symbols())}
    special = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, token in enumerate(SPECIAL_TOKENS, _FIRST_SPECIAL)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table).

    A byte that prints as itself in Latin-1 keeps its character; the others take those from U+0100 on, in order.
    """
    spare = iter(range(0x100, 0x200))
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": list(SPECIAL_TOKENS),
        "model_max_length": 1_048_576,
    }
