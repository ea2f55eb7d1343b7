"""Names that belong together across tools: a weight, what it became, and the tensors that a tool adds beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor

# What tools write beside, or in place of, `weight`: compressed-tensors, GPTQ and AWQ, bitsandbytes, Quark, FBGEMM, MLX.
_BESIDE = re.compile(
    r"\.(weight|weight_packed|qweight|weight_scale\w*|weight_global_scale|weight_zero_point|weight_shape|weight_g_idx"
    r"|qzeros|scales|biases|g_idx|scale|scale_weight|scale_input|activation_scale|input_scale\w*|input_zero_point"
    r"|input_global_scale|output_scale|output_zero_point|SCB|weight_format|qscale_\w+|comfy_quant"
    r"|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+))$"
)
_CACHE = re.compile(r"\.([kvq]_scale|[kvq]_zero_point|(prob_)?output_scale)$")
_STACKED = re.compile(r"_(blocks|scales|bias|scale_inv|scale)$")
_EXPERT = re.compile(r"(?<=\bexperts)\.\d+")
_NUMBERED = re.compile(r"^(.*?\.\d+)(\.|$)")


# Names of an expert's parts, in two generations of tools: Mixtral's and everybody else's.
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_PART = re.compile(r"^(.*\.experts\.\d+\.)(w[123])(\.[^.]+)$")
# Mistral's own layout, which transformers' names have no part in.
_NATIVE = re.compile(r"^(tok_embeddings|layers\.\d+\.(attention|feed_forward)\.w\w*)\.weight$")


def names_here(child: Checkpoint, parent: Checkpoint) -> dict[str, str]:
    """Parent's name -> name here, of what the manifest renames or a tool is known to rename."""
    if child.manifest is not None:
        return dict(child.manifest.renamed)
    modules = {name.rpartition(".")[0] for name in child.tensors if ".experts." in name}
    found: dict[str, str] = {}
    for name in parent.tensors:
        match = _PART.match(name) if ".experts." in name else None
        if match and f"{match[1]}{match[2]}" not in modules and f"{match[1]}{_PARTS[match[2]]}" in modules:
            found[name] = f"{match[1]}{_PARTS[match[2]]}{match[3]}"
    return found


def native_layout(child: Checkpoint, parent: Checkpoint) -> str:
    """Why names can't be compared, where one side alone has Mistral's own layout; "" where they can."""
    ours, theirs = (any(map(_NATIVE.match, each.tensors)) for each in (child, parent))
    if child.manifest is not None or ours == theirs or not child.tensors.keys().isdisjoint(parent.tensors):
        return ""
    side = "the child" if ours else "the parent"
    return f"{side} has Mistral's own layout, with other names and q and k rows in another order"


def container_of(name: str) -> str:
    """The block that a tensor is part of: its first numbered layer, else the module that holds it."""
    match = _NUMBERED.match(name)
    return match[1] if match else name.rpartition(".")[0]


def belongs_to(name: str, parent: Mapping[str, Tensor], child: Mapping[str, Tensor]) -> bool:
    """Whether a tensor that the parent lacks is part of what a tool made of one of the parent's weights."""
    match = _BESIDE.search(name)
    if match is not None:
        module = name[: match.start()]
        front, _, part = module.rpartition(".")
        if any(part == new and f"{front}.{old}.weight" in parent for old, new in _PARTS.items()):
            return True
        if f"{module}.weight" in parent:
            return True
        name = f"{module}.weight"
    if _CACHE.search(name):  # beside an attention module, or one of its projections
        module = name.rpartition(".")[0]
        attention = module.rpartition(".")[0] if module.endswith("_proj") else module
        return any(
            f"{attention}.{proj}.weight" in parent for proj in ("k_proj", "qkv_proj", "query_key_value")
        )
    if _EXPERT.search(name):
        bank = name[: _EXPERT.search(name).start()]  # type: ignore[union-attr]
        return any(f"{bank}.{leaf}" in parent for leaf in ("gate_up_proj", "down_proj", "w1", "w2"))
    return _STACKED.sub("", name) in parent


def unfused(theirs: Tensor, child: Mapping[str, Tensor]) -> bool:
    """Whether a stack of experts [E, ...] has its experts one by one in the child."""
    bank, _, _ = theirs.name.rpartition(".")
    if len(theirs.shape) != 3 or not bank.endswith("experts"):
        return False
    return any(
        name.startswith(f"{bank}.0.") or (name.startswith(f"{theirs.name}_") and _STACKED.search(name))
        for name in child
    )
