"""A child as its metadata show it, and what every profile asks of it: which weights are quantized, and in what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from shardmill.pipeline.actions import Conversion, Convert
from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import Params
from shardmill.pipeline.plan.profiles.names import heads, in_memory
from shardmill.pipeline.plan.profiles.truth import stated
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.types import BlockShape, TensorRef

WEIGHT_SUFFIX = ".weight"
FLOATS = ("BF16", "F16", "F32")
_PACKED = (
    ".weight",
    ".weight_packed",
    ".qweight",
    "_blocks",
)  # ends of the names of packed codes, as published

# Modules that runtimes build without a place for block scales: vLLM 0.33.0's vocabulary loader asserts that
# every tensor has a row a token, and transformers keeps output embeddings as they are.
VOCABULARY = ("lm_head", "embed_tokens", "word_embeddings", "embed_in", "embed_out", "wte")


@dataclass(frozen=True, slots=True)
class Child:
    """The checkpoint that a plan makes, from metadata alone."""

    recipe: Recipe
    config: Mapping[str, Any]  # the parent's config.json
    tensors: Mapping[str, TensorRef]
    conversions: Mapping[str, Conversion]  # weight -> its action

    @property
    def stated(self) -> dict[str, Any]:
        """What the parent says of its quantization, wherever it says so; {} where it says nothing."""
        return stated(self.config)


def module_of(weight: str) -> str:
    """`a.b.weight` and `a.b.weight_packed` -> `a.b`."""
    return weight.removesuffix("_packed").removesuffix(WEIGHT_SUFFIX)


def entries(child: Child, profile: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Module -> (format, what the profile says of it), of every weight that is converted to a quantized format."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for weight, action in child.conversions.items():
        if isinstance(action, Convert) and action.to != "bf16":
            spelling = formats()[action.to].spelling(profile)
            if spelling and spelling.entry:
                found[module_of(weight)] = (action.to, spelling.entry(action.params))
        elif not isinstance(action, Convert) and (block := action.block_made):
            spelling = formats()["fp8-block"].spelling(profile)
            if spelling and spelling.entry:
                entry = spelling.entry(Params(block=(block.rows, block.cols)))
                found[module_of(weight)] = ("fp8-block", entry)
    return found


def blocks(child: Child) -> dict[str, BlockShape]:
    """Weight -> block, of every block-FP8 weight of the child: those that are converted and those passed on."""
    found = {weight: block for weight, action in child.conversions.items() if (block := action.block_made)}
    if block := _stated_block(child.stated):
        found |= dict.fromkeys(passed_on_codes(child), block)
    return found


def passed_on_codes(child: Child) -> Iterator[str]:
    """FP8 weights with scales beside them that the child has from its parent as they are."""
    for name, ref in child.tensors.items():
        if ref.dtype == "F8_E4M3" and name.endswith(WEIGHT_SUFFIX) and name not in child.conversions:
            yield name


def _stated_block(said: Mapping[str, Any]) -> BlockShape | None:
    """The block that a parent of DeepSeek's or compressed-tensors' form declares for all its weights."""
    sides = said.get("weight_block_size")
    groups = said.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        sides = sides or (weights.get("block_structure") if isinstance(weights, dict) else None)
    if isinstance(sides, list) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides):
        return BlockShape(*sides)
    return None


def unquantized(child: Child) -> list[str]:
    """Modules that hold a float matrix, sorted: what a loader must not expect codes of.

    Listed beside them: the names under which a runtime fuses several of them. Stacked experts without a `.weight`
    (`mlp.experts.gate_up_proj`) are listed by their module, unless something below it has codes: a loader takes a
    listed module for all that lies in it.
    """
    with_codes = {
        prefix
        for weight in (*blocks(child), *child.conversions)
        for prefix in accumulate(weight.split("."), "{}.{}".format)
    }
    modules: set[str] = set()
    for name, ref in child.tensors.items():
        if ref.dtype not in FLOATS or len(ref.shape) < 2:
            continue
        home = name.rpartition(".")[0]
        if name.endswith(WEIGHT_SUFFIX):
            modules.update((module_of(name), *fused_names(module_of(name), child.recipe)))
        elif not name.endswith(("_scale", "_scale_inv")):
            modules.add(home if len(ref.shape) > 2 and home not in with_codes else name)
    held = {module_of(name) for name in child.tensors if name.endswith(_PACKED)}
    modules.update(heads(held, child.config))
    return sorted({name for module in modules for name in in_memory(module)})


def fused_names(module: str, recipe: Recipe) -> Iterator[str]:
    """The names of fused modules that runtimes build `module` into."""
    parent, _, own = module.rpartition(".")
    for group in recipe.fused:
        if own in group.members():
            yield from (f"{parent}.{name}" for name in group.runtime_names)


def vocabulary_problems(child: Child, profile: str) -> Iterator[str]:
    for weight in (
        *blocks(child),
        *(name for name, made in child.conversions.items() if is_quantizing(made)),
    ):
        if module_of(weight).rpartition(".")[2] in VOCABULARY:
            yield (
                f"{weight}: the profile {profile!r} has no quantized vocabulary matrices, its loaders expect them as "
                f"floats; keep it, or choose 'modelopt-mixed' and the patched runtime"
            )


def is_quantizing(action: Conversion) -> bool:
    """Whether an action leaves a weight in a format other than floats and block FP8."""
    return isinstance(action, Convert) and action.to not in ("bf16", "fp8-block")


def passed_on_problems(child: Child, profile: str, scale_suffix: str) -> Iterator[str]:
    """Quantized tensors that the child has from its parent and that the profile can't declare."""
    for name in passed_on_codes(child):
        scales = child.tensors.get(name + scale_suffix)
        block = _stated_block(child.stated)
        if scales is None or block is None or scales.shape != block.grid(child.tensors[name].shape):
            yield (
                f"{name}: is FP8 from the parent, but not with scales {name}{scale_suffix} of the one block that its "
                f"config declares, as the profile {profile!r} needs; dequantize it or choose another profile"
            )
    for name, ref in child.tensors.items():
        if is_packed(name, ref) and name not in child.conversions:
            yield f"{name}: is packed {ref.dtype}, which the profile {profile!r} can't declare; choose 'modelopt-mixed'"


def is_packed(name: str, ref: TensorRef) -> bool:
    """Whether a tensor holds packed codes: NVFP4, MXFP4 or an integer format."""
    return ref.dtype in ("U8", "I8", "F4", "I32") and name.endswith(_PACKED)


def sample(problems: Iterable[str], shown: int = 3) -> list[str]:
    """The first few problems of a kind, and how many more there are."""
    told = list(problems)
    more = len(told) - shown
    return told if more <= 0 else [*told[:shown], f"... and {more} more like it"]
