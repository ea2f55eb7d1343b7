"""What a checkpoint becomes in transformers 5.24, weight by weight, without transformers.

Two declarations are followed, `fp8` and compressed-tensors with FP8 codes, as on a card that multiplies FP8. A module
that the config makes FP8 holds codes and a scale; a scale that the checkpoint lacks is left as memory was, and a scale
whose module stays float is dropped, both with a line in the log and no error. That is what this question is for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardmill.verify.formats.excludes import NAME_CHARS_MAX, safe_regex
from shardmill.verify.formats.transformers_modules import (
    Architecture,
    architecture_of,
    parameter,
    template,
)
from shardmill.verify.questions.unasked import UnaskedError, no_table
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

NAME = "transformers 5.24"
CODES = ("F8_E4M3", "F8_E5M2")
SCALES = ("weight_scale_inv", "weight_scale")
Matches = Callable[[str], bool]


@dataclass(slots=True)
class Held:
    """What transformers makes of a checkpoint. `error`: it raises; the rest is then what it had planned."""

    weights: dict[str, str] = field(default_factory=dict)  # parameter in memory -> "fp8" or "float"
    missing: set[str] = field(default_factory=set)  # scales that it makes and the checkpoint has not
    unexpected: set[str] = field(default_factory=set)  # scales that the checkpoint has and no module takes
    error: str = ""
    cpu_error: str = ""  # without a card it decodes every weight, which may fail where FP8 does not
    wrong: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class Part:
    """One stacked parameter, or one Linear's weight: the tensors that it is made of."""

    module: str
    part: str
    leaves: dict[str, list[Tensor]] = field(default_factory=dict)

    def dtype(self) -> str:
        return self.leaves["weight"][0].dtype if "weight" in self.leaves else ""

    def scales(self) -> list[Tensor]:
        return [tensor for leaf in SCALES for tensor in self.leaves.get(leaf, ())]

    def parameter(self, leaf: str = "") -> str:
        """The name in memory of its weight, or of its scale."""
        if self.part:
            return f"{self.module}.{self.part}{leaf.removeprefix('weight')}"
        return f"{self.module}.{leaf or 'weight'}"


def hold(checkpoint: Checkpoint) -> Held:
    """The prediction. Raises UnaskedError for an architecture without a table and for another declaration."""
    kind = checkpoint.config.get("model_type")
    row = architecture_of(kind)
    if row is None:
        raise no_table(NAME, checkpoint.config)
    quantization = checkpoint.quantization
    method = quantization.get("quant_method")
    parts = list(_parts(checkpoint, row))
    if not quantization:
        return _hold_plain(parts)
    if method == "fp8":
        return _hold_fp8(checkpoint, row, parts, quantization)
    if method == "compressed-tensors":
        return _hold_compressed(checkpoint, row, parts, quantization)
    raise UnaskedError(f"no table of what {NAME} makes of quant_method {str(method)[:60]!r}")


def _parts(checkpoint: Checkpoint, row: Architecture) -> Iterator[Part]:
    """The Linears and banks that the checkpoint has tensors for, and the tied head, for which it has none."""
    parts: dict[tuple[str, str], Part] = {}
    linears = set(row.linears)
    layers = _trunk_layers(checkpoint.config)
    for tensor in checkpoint.tensors.values():
        if len(tensor.name) > NAME_CHARS_MAX:
            continue
        module, part, leaf = parameter(row, tensor.name)
        shape = template(module)
        if (shape not in linears and shape != row.bank) or _is_draft(row, tensor.name, layers):
            continue
        parts.setdefault((module, part), Part(module, part)).leaves.setdefault(leaf, []).append(tensor)
    if ("lm_head", "") not in parts and _tied(checkpoint.config):
        parts["lm_head", ""] = Part("lm_head", "")
    yield from parts.values()


def _is_draft(row: Architecture, name: str, layers: int) -> bool:
    if not row.draft or not name.startswith(row.draft):
        return False
    number = name.removeprefix("model.layers.").partition(".")[0]
    return row.draft != "model.layers." or (number.isdigit() and int(number[:6]) >= layers)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _trunk_layers(config: Mapping[str, Any]) -> int:
    value = _text(config).get("num_hidden_layers")
    return value if type(value) is int else 1 << 30


def _tied(config: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding. Gemma and Cohere are tied where config.json says nothing."""
    value = config.get("tie_word_embeddings", _text(config).get("tie_word_embeddings"))
    if isinstance(value, bool):
        return value
    return str(config.get("model_type")).startswith(("gemma", "cohere"))


def _hold_plain(parts: Iterable[Part]) -> Held:
    """Without a declaration every weight is float, and a code is a number like any other."""
    held = Held()
    for part in parts:
        _drop_scales(held, part, "config.json declares no quantization")
        held.weights[part.parameter()] = "float"
    return held


def _hold_fp8(
    checkpoint: Checkpoint, row: Architecture, parts: list[Part], quantization: Mapping[str, Any]
) -> Held:
    listed = _names(quantization, "modules_to_not_convert")
    if listed is None:
        listed = ["lm_head", "model.embed_tokens", "model.language_model.embed_tokens"]
    else:
        listed = [row.name(f"{name}.").removesuffix(".") for name in listed]
    excluded = _by_should_convert([*listed, *row.kept])
    held = Held()
    for part in parts:
        if part.module in row.subclassed or excluded(part.module):
            _drop_scales(held, part, "modules_to_not_convert hits it under its name in memory")
            held.weights[part.parameter()] = "float"
            continue
        if part.part and row.bank_biased:
            held.error = (
                f"{part.module}: FP8 experts with biases are not known to {NAME}; list the bank as excluded"
            )
        _make_fp8(held, part, "weight_scale_inv")
    held.cpu_error = next((error for part in parts if (error := _undivided(part))), "")
    return held


def _undivided(part: Part) -> str:
    """Without a card weights are decoded, by code that wants rows and columns divisible by the grid's sides."""
    for weight, scale in zip(part.leaves.get("weight", ()), part.scales(), strict=False):
        for size, blocks in zip(weight.shape[-2:], scale.shape[-2:], strict=False):
            if blocks and size % blocks:
                return f"{weight.name}: {size} does not divide into {blocks} blocks"
    return ""


def _hold_compressed(
    checkpoint: Checkpoint, row: Architecture, parts: list[Part], quantization: Mapping[str, Any]
) -> Held:
    groups = quantization.get("config_groups")
    values = (
        [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    )
    forms = {str(group.get("format") or quantization.get("format")) for group in values}
    if forms != {"float-quantized"} or quantization.get("kv_cache_scheme"):
        raise UnaskedError(
            f"no table of what {NAME} makes of compressed-tensors format {', '.join(sorted(forms))[:60]!r}"
        )
    targets = _by_match_name([name for group in values for name in _names(group, "targets") or []])
    ignored = _by_match_name(_names(quantization, "ignore") or [])
    held = Held()
    for part in parts:
        if part.part:
            held.weights[part.parameter()] = "float"
            if part.scales():
                held.error = (
                    f"{part.module}: experts with scales are not stacked by {NAME} under compressed-tensors"
                )
        elif targets(part.module) and not ignored(part.module):
            _make_fp8(held, part, "weight_scale")
        else:
            _drop_scales(held, part, "ignore hits it, or no target does")
            held.weights[part.parameter()] = "float"
    return held


def _make_fp8(held: Held, part: Part, leaf: str) -> None:
    """A module that the declaration makes FP8: its weight becomes codes, but for a tied head."""
    scale = part.parameter(leaf)
    tied = not part.leaves
    held.weights[part.parameter()] = "float" if tied else "fp8"
    others = [tensor for name in SCALES if name != leaf for tensor in part.leaves.get(name, ())]
    held.unexpected |= {part.parameter(tensor.name.rpartition(".")[2]) for tensor in others}
    if leaf in part.leaves:
        return
    held.missing.add(scale)
    if tied and leaf == "weight_scale_inv":
        return  # FP8Linear multiplies a float weight as it is
    what = "the tied head" if tied else f"{part.dtype() or 'no weight'} without {leaf}"
    file = next((tensors[0].file for tensors in part.leaves.values()), "config.json")
    held.wrong.append(
        Finding(
            "loads-garbage",
            file,
            part.module,
            "codes and scale, or an exclusion under its name in memory",
            f"{NAME}: {what} is made FP8 with a scale that is not in the checkpoint",
        )
    )


def _drop_scales(held: Held, part: Part, why: str) -> None:
    for tensor in part.scales():
        held.unexpected.add(part.parameter(tensor.name.rpartition(".")[2]))
    coded = [tensor for tensor in part.leaves.get("weight", ()) if tensor.dtype in CODES]
    if coded:
        held.wrong.append(
            Finding(
                "loads-garbage",
                coded[0].file,
                part.module,
                "an FP8 module, which takes the scale",
                f"{NAME}: its codes are taken for weights and its scale is dropped: {why}",
            )
        )


def _names(table: Mapping[str, Any], key: str) -> list[str] | None:
    """A list of names; None where the key is missing or null."""
    value = table.get(key)
    if value is None:
        return None
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _by_should_convert(patterns: list[str]) -> Matches:
    """transformers' rule: a pattern hits from the start to a dot, as an expression likewise, or as a suffix."""
    plain = frozenset(pattern for pattern in patterns if re.fullmatch(r"[\w.\-]*", pattern))
    costly = [pattern for pattern in patterns if pattern not in plain]
    compiled = [_compiled(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", pattern) for pattern in costly]

    def hit(name: str) -> bool:
        parents = {name[:i] for i, letter in enumerate(name) if letter == "."}
        suffixes = {name[i:] for i in range(len(name) + 1)}
        if not plain.isdisjoint({name} | parents | suffixes):
            return True
        return any(expression.match(name) for expression in compiled) or name.endswith(tuple(costly))

    return hit


def _by_match_name(patterns: list[str]) -> Matches:
    """compressed-tensors' rule: the name itself, `re:` and an expression for its beginning, or the class Linear."""
    plain = frozenset(pattern for pattern in patterns if not pattern.startswith("re:"))
    compiled = [
        _compiled(pattern.removeprefix("re:"), pattern) for pattern in patterns if pattern.startswith("re:")
    ]
    return lambda name: "Linear" in plain or name in plain or any(e.match(name) for e in compiled)


def _compiled(expression: str, pattern: str) -> re.Pattern[str]:
    """Raises UnaskedError for an expression that could run for ever."""
    compiled = safe_regex(pattern.removeprefix("re:"), expression)
    if compiled is None:
        raise UnaskedError(f"config.json excludes by {pattern[:60]!r}, which is too costly to be judged")
    return compiled
