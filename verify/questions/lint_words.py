"""Names that a wrapper left, names alike, husks without elements, declarations in two places or by prefix."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from shardmill.verify.formats.declared import CONFIG
from shardmill.verify.formats.linear import FLOATS
from shardmill.verify.questions.lint_names import Names
from shardmill.verify.questions.stacks import NAME_CHARS_MAX
from shardmill.verify.reading.declarations import declarations_in
from shardmill.verify.rules.findings import Finding

# What training wrappers put before or between the parts of a name; no loader maps these.
_WRAPPER = re.compile(
    r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|_module|ds_module"
    r"|modules_to_save(\.\w+)?|base_layer|original_module)\."
    r"|^(module|base_model\.model|student|ema_model|learner)\."
)
_REPEATED = re.compile(
    r"(?:^|\.)(\w+)\.(?:\1\.){2,}|(?:^|\.)(language_model|text_model|vision_tower)\.(?:\w+\.)?\2\."
)
_NUMBERED_END = re.compile(r"\.\d+$")
ADAPTER = "adapter_model.safetensors"
PLAIN_MAX = 2_000  # exclusions that end in a number, held to each layer
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def word_faults(names: Names) -> Iterator[Finding]:
    yield from _wrapped(names)
    yield from _alike(names)
    yield from _husks(names)
    yield from _by_prefix(names)
    yield from _nested(names.checkpoint.config)
    yield from _dtype(names)


def _wrapped(names: Names) -> Iterator[Finding]:
    found = [
        tensor
        for tensor in names.stacks.representatives()
        if len(tensor.name) <= NAME_CHARS_MAX
        and not tensor.file.endswith(ADAPTER)  # whose names PEFT writes so
        and (_WRAPPER.search(tensor.name) or _REPEATED.search(tensor.name))
    ]
    if found:
        got = f"{len(found):,} kinds of names like this one"
        expected = "names as the model's class writes them"
        yield Finding("wrapper-name", found[0].file, found[0].name, expected, got)


def _alike(names: Names) -> Iterator[Finding]:
    """Names equal but for case or Unicode form, and words that mix alphabets."""
    tensors = names.checkpoint.tensors
    if all(map(str.isascii, tensors)) and len(set(map(str.lower, tensors))) == len(tensors):
        return
    seen: dict[str, str] = {}
    for name, tensor in tensors.items():
        folded = name.lower() if name.isascii() else unicodedata.normalize("NFKC", name).casefold()
        other = seen.setdefault(folded, name)
        if other != name:
            yield Finding(
                "names-alike", tensor.file, name, "names that differ in more than case or form", other
            )
        if not name.isascii() and any(_mixed(part) for part in name.split(".")):
            yield Finding("names-alike", tensor.file, name, "letters of one alphabet", ascii(name))


def _mixed(word: str) -> bool:
    alphabets = {unicodedata.name(letter, "?").split(" ")[0] for letter in word if letter.isalpha()}
    return len(alphabets) > 1


def _husks(names: Names) -> Iterator[Finding]:
    """Weights without elements: what ZeRO-3 leaves when parameters were not gathered before the save."""
    for name, tensor in names.checkpoint.tensors.items():
        if 0 in tensor.shape and name.endswith((".weight", ".bias", ".weight_packed", ".qweight")):
            yield Finding("empty-weight", tensor.file, name, "elements", str(tensor))


def _by_prefix(names: Names) -> Iterator[Finding]:
    """`model.layers.1` also excludes layers 10 to 19 where a loader compares the beginnings of names."""
    declared = names.declared
    if declared is None or declared.method.startswith("modelopt"):
        return
    plain = [p.text for p in declared.excludes.patterns if p.regex is None and _NUMBERED_END.search(p.text)]
    if not plain or len(plain) > PLAIN_MAX:
        return
    listed = {text.rpartition(".")[0] for text in plain}
    fronts: dict[str, str] = {}  # the name up to its number -> a quantized module under it
    for module, linear in names.linears.items():
        if linear.weight is None:
            continue
        for match in re.finditer(r"\.\d{2,}(?=\.|$)", module):
            if module[: match.start()] in listed:
                fronts.setdefault(module[: match.end()], module)
    for text in plain:
        hit = next(
            (module for front, module in fronts.items() if front.startswith(text) and front != text), None
        )
        if hit is not None:
            yield Finding("exclude-by-prefix", CONFIG, text, "a name that begins no other module's", hit)


def _nested(config: Mapping[str, Any]) -> Iterator[Finding]:
    places = list(declarations_in(config))
    for path, value in places[1:]:
        said = "the same" if value == places[0][1] else "another"
        got = f"{path} beside {places[0][0]}, {said}"
        yield Finding("declared-twice", CONFIG, path, "one declaration, at the top", got)


def _dtype(names: Names) -> Iterator[Finding]:
    config, text = names.checkpoint.config, names.text_config
    if not config or not config.get("architectures"):
        return
    said = next(
        (place[key] for place in (config, text) for key in ("dtype", "torch_dtype") if place.get(key)), None
    )
    floats = {
        tensor.dtype
        for tensor in names.checkpoint.tensors.values()
        if len(tensor.shape) >= 2 and tensor.dtype in FLOATS
    }
    if said is None:
        yield Finding("dtype-unsaid", CONFIG, "dtype", "the dtype of the weights", "none")
    elif isinstance(said, str) and said in DTYPES and len(floats) == 1 and DTYPES[said] not in floats:
        yield Finding("dtype-differs", CONFIG, "dtype", f"{min(floats)}, as the tensors have", said)
