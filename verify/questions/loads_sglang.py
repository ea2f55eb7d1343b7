"""What a checkpoint becomes in SGLang 0.5.23, weight by weight, without SGLang.

A module that the config quantizes has the parameters of its method. One that no tensor fills stays as memory was, and
a tensor that no parameter takes is dropped: many of SGLang's classes say neither. That is what this question is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardmill.verify.formats.excludes import NAME_CHARS_MAX
from shardmill.verify.formats.schemes import FLOATS
from shardmill.verify.formats.sglang_families import family_of
from shardmill.verify.formats.sglang_methods import (
    BLOCKED,
    COMPRESSED,
    FLOAT,
    IN_BANKS,
    METHODS,
    MXFP4_LEAVES,
    PACKED_IN_BYTES,
    Parameters,
)
from shardmill.verify.formats.sglang_modules import (
    BY_COLUMNS,
    BY_ROWS,
    MLA_PACKED,
    Branch,
    Family,
    Holds,
    Row,
    one_more,
)
from shardmill.verify.questions.sglang_config import Asked, Method, RefusedError, method_of
from shardmill.verify.questions.unasked import UnaskedError
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

NAME = "SGLang 0.5.23"
CODES = ("F8_E4M3", "F8_E5M2", "U8", "I32")
WHOLE = "a parameter of the model"
# Scales of the KV cache, which have a default, and buffers that SGLang computes itself.
PASSED_OVER = re.compile(r"\.(k_scale|v_scale|q_scale|[kv]_proj\.output_scale|rotary_emb\.inv_freq)$")
_NUMBERED = re.compile(r"^(\d{1,6})\.(.*)$")
_EXPERT = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")
_STACKED = re.compile(r"^(.*\.experts\.(?:gate_up|down)_proj)_(\w+)$")


@dataclass(slots=True)
class Held:
    """What SGLang makes of a checkpoint. `error`: it raises, and the rest is empty."""

    weights: dict[str, str] = field(default_factory=dict)  # parameter -> its dtype in memory
    missing: set[str] = field(default_factory=set)  # parameters that no tensor fills
    unexpected: set[str] = field(default_factory=set)  # tensors that no parameter takes
    error: str = ""
    wrong: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class Module:
    """One module of SGLang and the tensors that it is given: part -> leaf -> tensors, of a bank one of each expert."""

    name: str
    listed: str
    holds: Holds
    parts: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)

    def branch(self) -> Branch:
        if self.holds in ("bank", "stack"):
            return "expert"
        whole = not {"", "q_a", "kv_a"}.isdisjoint(self.parts)  # the MLA's are joined before they are loaded
        return "single" if whole else "fused"

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for part, leaves in self.parts.items():
            yield from ((part, tensor) for tensor in leaves.get("weight", ()))

    def file(self) -> str:
        return next(iter(next(iter(self.parts.values())).values()))[0].file

    def groups(self) -> dict[str, list[str]]:
        """Prefix of its parameters -> the parts that fill one of them."""
        if self.holds not in ("bank", "stack"):
            return {"": list(self.parts)}
        found: dict[str, list[str]] = {}
        for part in self.parts:
            found.setdefault(f"{part.partition(' ')[0]}_", []).append(part)
        return found


def hold(checkpoint: Checkpoint) -> Held:
    """The prediction. Raises UnaskedError for an architecture or a declaration without a table."""
    kind = checkpoint.config.get("model_type")
    family = family_of(kind)
    if family is None:
        raise UnaskedError(f"no table of {NAME}'s modules for model_type {str(kind)[:60]!r}")
    said = checkpoint.quantization.get("quant_method")
    if family.methods and checkpoint.quantization and said not in family.methods:
        raise UnaskedError(f"no table of what {NAME} makes of {kind!r} under that quant_method")
    method = method_of(checkpoint, family)
    held = Held()
    modules = _modules(checkpoint, family, method, held)
    try:
        for module in modules:
            _fill(module, family, method, held)
        if family.packed is MLA_PACKED:
            _check_shared(modules, method)
        _untied(checkpoint, family, method, held)
    except RefusedError as error:
        return Held(error=str(error))
    return held


def _modules(checkpoint: Checkpoint, family: Family, method: Method, held: Held) -> list[Module]:
    """Every module that the checkpoint has tensors for; tensors without one are findings at once."""
    more = one_more("shared_experts") if _merges(checkpoint.config, method) else ()
    tables = [({row.name: row for row in (*layers.rows, *more)}, layers) for layers in family.layers]
    tops = {row.name: row for row in family.top}
    modules: dict[str, Module] = {}
    drawn = _trunk_layers(checkpoint.config) if family.draft else 1 << 30
    for tensor in checkpoint.tensors.values():
        if len(tensor.name) > NAME_CHARS_MAX or PASSED_OVER.search(tensor.name):
            continue
        found = _place(tensor.name, family, tables, tops, drawn)
        if found is None:
            held.unexpected.add(tensor.name)
            held.wrong.append(Finding("no-home", tensor.file, tensor.name, WHOLE, f"{NAME}: none takes it"))
            continue
        row, name, listed, leaf = found
        if name:
            module = modules.setdefault(name, Module(name, listed, row.holds))
            module.parts.setdefault(row.part, {}).setdefault(leaf, []).append(tensor)
    return list(modules.values())


def _merges(config: Mapping[str, Any], method: Method) -> bool:
    """Whether DeepSeek's class loads the shared expert as one more of its bank: of V3 and GLM-5 in their true sizes."""
    wide = config.get("n_routed_experts") == 256 and config.get("n_shared_experts") == 1
    return wide and config.get("model_type") in ("deepseek_v3", "glm_moe_dsa") and not method.apart


def _place(
    name: str, family: Family, tables: list[tuple[dict[str, Row], Any]], tops: dict[str, Row], drawn: int
) -> tuple[Row, str, str, str] | None:
    """(row, module, the name that its config is asked with, leaf) of a tensor; of the draft's the module is ""."""
    for own, leaf in _readings(name):
        if own in tops:
            row = tops[own]
            return row, row.module, row.listed or row.module, leaf
        for rows, layers in tables:
            match = (
                _NUMBERED.match(own.removeprefix(layers.prefix)) if own.startswith(layers.prefix) else None
            )
            if match is None:
                continue
            number, inner = match.groups()
            if int(number) >= drawn:
                return layers.rows[0], "", "", leaf
            inside = rows.get(_EXPERT.sub("#", inner))
            if inside is None:
                continue
            row = inside
            asked = row.listed or row.module
            listed = asked if layers.listed is None else f"{layers.listed}{number}.{asked}"
            return row, f"{layers.memory}{number}.{row.module}", listed, leaf
    return None


def _readings(name: str) -> Iterator[tuple[str, str]]:
    """(module, leaf) that a tensor's name may mean: a raw parameter, its last word a leaf, a stacked bank's leaf."""
    own, _, leaf = name.rpartition(".")
    yield name, "weight"
    yield own, leaf
    stacked = _STACKED.match(name)
    if stacked:
        yield stacked[1], stacked[2]


def _trunk_layers(config: Mapping[str, Any]) -> int:
    text = config.get("text_config")
    value = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    return value if type(value) is int else 1 << 30


def _fill(module: Module, family: Family, method: Method, held: Held) -> None:
    """The module's parameters: which are filled, which are not, and which of its tensors are left over."""
    algo = method.algo(Asked(module.listed, module.holds))
    parameters = METHODS[algo] if algo else FLOAT
    if algo and module.holds == "merged":
        _check_merged(module, algo, parameters)
    if "kv_a" in module.parts:
        _check_joined(module, algo, parameters)
    if algo in BLOCKED:
        _check_blocks(module, method)
    for prefix, parts in module.groups().items():
        for leaf, dtype in parameters.items():
            name = f"{module.name}.{prefix}{leaf}"
            held.weights[name] = IN_BANKS.get(algo, {}).get(leaf, dtype) if prefix else dtype
            if not _fills(module, parts, leaf, family, algo):
                held.missing.add(name)
        for part in parts:
            _take(module, module.parts[part], part, algo, parameters, family, held)
    _judge(module, algo, parameters, held)


def _fills(module: Module, parts: list[str], leaf: str, family: Family, algo: str) -> bool:
    """Whether every part has the leaf, and in a bank every expert's gate and up."""
    if module.holds == "bank" and parts[0] != "w2" and len(parts) < 2:
        return False
    experts = max(len(tensors) for leaves in module.parts.values() for tensors in leaves.values())
    found = [
        sum(len(tensors) for name, tensors in module.parts[part].items() if _leaf(name, family, algo) == leaf)
        for part in parts
    ]
    return all(count >= (experts if module.holds == "bank" else 1) for count in found)


def _leaf(leaf: str, family: Family, algo: str) -> str:
    if algo == "mxfp4":
        return MXFP4_LEAVES.get(leaf, leaf)
    return "weight_scale" if leaf == "weight_scale_inv" and not family.scale_inv else leaf


def _take(
    module: Module,
    leaves: Mapping[str, list[Tensor]],
    part: str,
    algo: str,
    parameters: Parameters,
    family: Family,
    held: Held,
) -> None:
    for leaf, tensors in leaves.items():
        if leaf == "bias" and not (module.holds == "stack" and algo in COMPRESSED):
            continue
        if _leaf(leaf, family, algo) in parameters:
            _check_size(module, tensors[0], algo, leaf)
            if part == "kv_a" and tensors[0].shape == ():
                _drop_scalar(module, tensors[0], held)
            continue
        if module.branch() in family.loud:
            raise RefusedError(f"{tensors[0].name}: no parameter takes it, and the class raises")
        held.unexpected |= {tensor.name for tensor in tensors}


def _drop_scalar(module: Module, tensor: Tensor, held: Held) -> None:
    """DeepSeek's class joins the two a-projections, and keeps the first of two scalars."""
    held.unexpected.add(tensor.name)
    got = f"{NAME}: {tensor.name.rpartition('.')[2]} of q_a_proj is taken for both"
    held.wrong.append(Finding("loads-garbage", tensor.file, module.name, "a scale of each part", got))


def _check_size(module: Module, tensor: Tensor, algo: str, leaf: str) -> None:
    """Two codes a byte do not fit where one number was expected, nor floats where a class copies with care."""
    if leaf != "weight":
        return
    last = module.name.rpartition(".")[2] if module.branch() == "single" else ""
    padded = last in BY_COLUMNS and (algo in PACKED_IN_BYTES or not algo)
    downcast = algo and last in BY_ROWS and tensor.dtype in FLOATS
    if downcast or ((algo in PACKED_IN_BYTES) != (tensor.dtype == "U8") and not padded):
        raise RefusedError(
            f"{tensor.name}: {tensor.dtype} {list(tensor.shape)} does not fit {algo or 'a float'} weight"
        )


def _check_joined(module: Module, algo: str, parameters: Parameters) -> None:
    """DeepSeek's class puts the rows of the two a-projections together, of AWQ the columns, whatever they are."""
    for leaf in parameters:
        pair = [tensor for leaves in module.parts.values() for tensor in leaves.get(leaf, ())]
        across = {tensor.shape[-1] for tensor in pair if len(tensor.shape) == 2}
        if any(len(tensor.shape) == 1 for tensor in pair) or (algo != "awq" and len(across) > 1):
            raise RefusedError(f"{pair[0].name}: joined with the other a-projection's it does not fit")


def _check_shared(modules: list[Module], method: Method) -> None:
    """DeepSeek's class asks the down projection of its shared experts for the block of their FP8."""
    algos = {module.name: method.algo(Asked(module.listed, module.holds)) for module in modules}
    for name, algo in algos.items():
        if (
            name.endswith(".mlp.shared_experts.gate_up_proj")
            and METHODS.get(algo, FLOAT).get("weight") == "F8_E4M3"
        ):
            down = name.replace("gate_up_proj", "down_proj")
            if algos.get(down, algo) == "":
                raise RefusedError(f"{down}: a float beside FP8 gate and up of the shared experts")


def _check_merged(module: Module, algo: str, parameters: Parameters) -> None:
    """Its loader divides a weight of that name and scales with as many rows; a scale of the whole does not fit."""
    if "weight" not in parameters:
        raise RefusedError(f"{module.name}: {algo} gives it no weight for its loader to divide")
    for tensor in (one for leaf in parameters for one in module.parts[""].get(leaf, ())):
        if len(tensor.shape) < 2 and tensor.shape in ((), (1,)):
            raise RefusedError(f"{tensor.name}: {list(tensor.shape)} does not fit one scale for each part")


def _check_blocks(module: Module, method: Method) -> None:
    """Every part of a fused module must be whole blocks."""
    for part, tensor in module.weights():
        if len(tensor.shape) < 2:
            continue
        rows = tensor.shape[-1] if part == "w2" else tensor.shape[-2]
        for each in method.joint(module.name) if module.branch() == "single" else [rows]:
            if each % method.block[0]:
                block = method.block[0]
                raise RefusedError(f"{tensor.name}: {each} rows do not divide into blocks of {block}")


def _judge(module: Module, algo: str, parameters: Parameters, held: Held) -> None:
    """Wrong numbers without an error: a parameter of the module stays empty, or codes are taken for numbers."""
    empty = sorted({name for name in held.missing if name.rpartition(".")[0] == module.name})
    coded = [tensor for _, tensor in module.weights() if tensor.dtype in CODES]
    if algo and empty:
        lacking = empty[0].rpartition(".")[2]
        held.wrong.append(
            Finding(
                "loads-garbage",
                module.file(),
                module.name,
                f"{algo}: {', '.join(parameters)}",
                f"{NAME}: no tensor that the class takes fills {lacking}, which stays as memory was",
            )
        )
    elif not algo and coded:
        held.wrong.append(
            Finding(
                "loads-garbage",
                coded[0].file,
                module.name,
                "a module that its config quantizes",
                f"{NAME}: its {coded[0].dtype} codes are taken for weights, and scales are dropped",
            )
        )
    elif not algo and empty and not coded:
        held.wrong.append(
            Finding(
                "no-home", module.file(), module.name, "a float weight", f"{NAME}: the float module gets none"
            )
        )


def _is_asked(family: Family) -> bool:
    """Whether the class asks its config for a method of the head."""
    return any(row.module == family.head and row.holds == "head" for row in family.top)


def _untied(checkpoint: Checkpoint, family: Family, method: Method, held: Held) -> None:
    """The head of a class that knows no tied one, where the checkpoint has none."""
    if any(name.startswith(f"{family.head}.") for name in held.weights):
        return
    text = checkpoint.config.get("text_config")
    places = (checkpoint.config, text if isinstance(text, dict) else {})
    said = [
        place["tie_word_embeddings"] for place in places if isinstance(place.get("tie_word_embeddings"), bool)
    ]
    if family.tied == "embedding" or not (said and said[0]):
        return
    algo = method.algo(Asked(family.head, "head")) if _is_asked(family) else ""
    parameters = dict(METHODS[algo] if algo else FLOAT)
    if family.tied == "weight":
        parameters.pop("weight")
    for leaf, dtype in parameters.items():
        held.weights[f"{family.head}.{leaf}"] = dtype
        held.missing.add(f"{family.head}.{leaf}")
    if not parameters:
        return
    held.wrong.append(
        Finding(
            "loads-garbage",
            "config.json",
            family.head,
            "a head of its own",
            f"{NAME}: the class makes a head beside the embedding, and its {', '.join(parameters)} stay as memory was",
        )
    )


__all__ = ["FLOATS", "NAME", "Held", "hold"]
