"""What a checkpoint becomes in SGLang 0.5.23, weight by weight, without SGLang.

A module that the config quantizes has the parameters of its method. One that no tensor fills stays as memory was, and
a tensor that no parameter takes is dropped: many of SGLang's classes say neither. That is what this question is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardmill.verify.formats.sglang_families import family_of
from shardmill.verify.formats.sglang_methods import (
    BLOCKED,
    COMPRESSED,
    FLOAT,
    IN_BANKS,
    METHODS,
    MXFP4_LEAVES,
    Parameters,
)
from shardmill.verify.formats.sglang_modules import MLA_PACKED, Family
from shardmill.verify.questions.sglang_config import NAME, Asked, Method, method_of
from shardmill.verify.questions.sglang_lists import RefusedError
from shardmill.verify.questions.sglang_place import Module, modules_of
from shardmill.verify.questions.sglang_refused import (
    check_blocks,
    check_joined,
    check_merged,
    check_shared,
    check_size,
)
from shardmill.verify.questions.unasked import UnaskedError
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding

CODES = ("F8_E4M3", "F8_E5M2", "U8", "I32")
WHOLE = "a parameter of the model"


@dataclass(slots=True)
class Held:
    """What SGLang makes of a checkpoint. `error`: it raises, and the rest is empty."""

    weights: dict[str, str] = field(default_factory=dict)  # parameter -> its dtype in memory
    missing: set[str] = field(default_factory=set)  # parameters that no tensor fills
    unexpected: set[str] = field(default_factory=set)  # tensors that no parameter takes
    error: str = ""
    wrong: list[Finding] = field(default_factory=list)


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
    modules, homeless = modules_of(checkpoint, family, method)
    for tensor in homeless:
        held.unexpected.add(tensor.name)
        held.wrong.append(Finding("no-home", tensor.file, tensor.name, WHOLE, f"{NAME}: none takes it"))
    try:
        for module in modules:
            _fill(module, family, method, held)
        if family.packed is MLA_PACKED:
            check_shared(modules, method)
        _untied(checkpoint, family, method, held)
    except RefusedError as error:
        return Held(error=str(error))
    return held


def _fill(module: Module, family: Family, method: Method, held: Held) -> None:
    """The module's parameters: which are filled, which are not, and which of its tensors are left over."""
    algo = method.algo(Asked(module.listed, module.holds))
    parameters = METHODS[algo] if algo else FLOAT
    if algo and module.holds == "merged":
        check_merged(module, algo, parameters)
    if "kv_a" in module.parts:
        check_joined(module, algo, parameters)
    if algo in BLOCKED:
        check_blocks(module, method)
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
            check_size(module, tensors[0], algo, leaf)
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


__all__ = ["NAME", "Held", "hold"]
