"""A toy parent's tokenizer, the smallest honest one: a token for each byte, then the special ones; no merges.

The `tokenizers` and `transformers` libraries load it.
"""

from __future__ import annotations

from typing import Any

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
    "<|begin_of_video|>",
    "<|video|>",
    "<|end_of_video|>",
)
_FIRST_SPECIAL = 256
CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""


def token_id(token: str) -> int:
    """The number of a special token."""
    return _FIRST_SPECIAL + SPECIAL_TOKENS.index(token)


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: byte-level BPE without merges."""
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


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json, as transformers reads it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": list(SPECIAL_TOKENS),
        "model_max_length": 1_048_576,
    }
