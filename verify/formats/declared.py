"""What a quantization_config says, whoever wrote it: ModelOpt, DeepSeek-style fp8 or compressed-tensors.

Modules are listed one by one (`entries`, MIXED_PRECISION), or one kind holds for all Linears but the excluded ones.
Config names may be a loader's rather than the checkpoint's; `MAPPINGS` are the known ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardmill.verify.formats.excludes import Excludes
from shardmill.verify.rules.findings import Finding

CONFIG = "config.json"

# (a loader's prefix, the checkpoint's prefix): names of one module in vLLM's and transformers' model classes, and
# of the MTP draft, which vLLM builds as a model of its own.
MAPPINGS = (
    ("model.layers.", "model.language_model.layers."),
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("language_model.", ""),
    ("visual.", "model.visual."),
    ("model.visual.", "visual."),
    ("model.language_model.", "language_model.model."),
    ("model.", "language_model.model."),
)

# quant_algo of ModelOpt -> the kinds of shardmill.verify.formats.schemes that its loader reads.
ALGO_KINDS: Mapping[str, tuple[str, ...]] = {
    "NVFP4": ("nvfp4",),
    "W4A16_NVFP4": ("nvfp4",),
    "FP8_BLOCK": ("fp8-block",),
    "FP8_BLOCK_SCALES": ("fp8-block", "fp8-grid"),
    "FP8_PB_WO": ("fp8-pbwo", "fp8-grid"),
    "FP8": ("fp8-tensor",),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8-channel",),
    "MXFP8": ("mxfp8",),
}
FIXED_GROUP = {"FP8_PB_WO": 128, "FP8_BLOCK_SCALES": 128}

# (format, strategy) of a compressed-tensors group -> kinds. A grid of one block looks like a tensor's or a channel's.
COMPRESSED_KINDS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("float-quantized", "tensor"): ("fp8-tensor",),
    ("float-quantized", "channel"): ("fp8-channel", "fp8-tensor"),
    ("float-quantized", "block"): ("fp8-grid", "fp8-tensor", "fp8-channel"),
    ("nvfp4-pack-quantized", "tensor_group"): ("ct-nvfp4",),
    ("mxfp4-pack-quantized", "group"): ("mxfp4",),
    ("mxfp8-quantized", "group"): ("mxfp8",),
}


class Entry(NamedTuple):
    """What the config claims for one module: the algorithm and, where it has one, the side of a block or a group."""

    algo: str
    group: int | None


class Declaration(NamedTuple):
    method: str
    algo: str
    entries: Mapping[str, Entry] | None  # module -> claim, where modules are listed one by one
    kinds: tuple[str, ...]  # else, what every Linear that is not excluded must be; () = not known
    all_linears: bool  # `kinds` is claimed for every Linear, not only for modules that patterns name
    block: tuple[int, int] | None
    static_inputs: bool  # the loader reads an input scale for every quantized module
    weight_only: bool  # the config says that activations are not quantized
    excludes: Excludes
    bits: int | None = None  # of a weight's code, where one number holds for all
    group: int | None = None  # columns that share a scale, likewise; -1 = a whole row
    zeros_as_stored: bool = False  # of GPTQ: `gptq_v2`, whose zeros are not stored less one


def declaration(quantization: Mapping[str, Any]) -> tuple[Declaration, list[Finding]]:
    """Reads a quantization_config; what it can't use is a finding."""
    entries, findings = _entries(quantization.get("quantized_layers"))
    excludes, bad = Excludes.read(quantization)
    groups = _groups(quantization)
    method, algo = _text(quantization.get("quant_method")), _text(quantization.get("quant_algo")).upper()
    inputs = [group.get("input_activations") for group in groups]
    weight_only = algo == "W4A16_NVFP4" or (bool(groups) and all(item is None for item in inputs))
    declared = Declaration(
        method,
        algo,
        entries,
        _kinds(method, algo, quantization, groups),
        method != "compressed-tensors" or any(_targets_all(group) for group in groups),
        _block(quantization, groups),
        _static(method, algo, quantization, inputs) and not weight_only,
        weight_only,
        excludes,
        _number(quantization, groups, "num_bits", "bits"),
        _number(quantization, groups, "group_size", "group_size"),
        _text(quantization.get("checkpoint_format")).lower() == "gptq_v2",
    )
    return declared, findings + bad


def names_of(module: str) -> Iterator[str]:
    """The names in the checkpoint that a config's name may mean, the same one first."""
    yield module
    for loader, own in MAPPINGS:
        if module.startswith(loader):
            yield own + module.removeprefix(loader)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _entries(listed: Any) -> tuple[dict[str, Entry] | None, list[Finding]]:
    if listed is None:
        return None, []
    if not isinstance(listed, dict):
        return None, [Finding("config-json", CONFIG, "quantized_layers", "an object", repr(listed)[:80])]
    entries, findings = {}, []
    for module, row in listed.items():
        algo = row.get("quant_algo") if isinstance(row, dict) else None
        group = row.get("group_size") if isinstance(row, dict) else None
        if isinstance(algo, str) and (group is None or (type(group) is int and 0 < group < 1 << 32)):
            entries[module] = Entry(algo.upper(), group)
        else:
            findings.append(
                Finding("config-json", CONFIG, module, "quant_algo and group_size", repr(row)[:80])
            )
    return entries, findings


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = quantization.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _targets_all(group: Mapping[str, Any]) -> bool:
    targets = group.get("targets")
    return isinstance(targets, list) and "Linear" in targets


def _weights(group: Mapping[str, Any]) -> Mapping[str, Any]:
    weights = group.get("weights")
    return weights if isinstance(weights, dict) else {}


def _kinds(
    method: str, algo: str, quantization: Mapping[str, Any], groups: list[Mapping[str, Any]]
) -> tuple[str, ...]:
    if method == "fp8":
        # DeepSeek-V4's experts are FP4 under this declaration; nothing in it says so.
        return (
            ("fp8-block", "mxfp4") if quantization.get("weight_block_size") else ("fp8-tensor", "fp8-channel")
        )
    if method == "compressed-tensors":
        kinds: list[str] = []
        for group in groups:
            form = _text(group.get("format")) or _text(quantization.get("format"))
            found = COMPRESSED_KINDS.get((form, _text(_weights(group).get("strategy"))))
            if found is None:
                return ()
            kinds += found
        return tuple(dict.fromkeys(kinds))
    return ALGO_KINDS.get(algo, ())


def _block(quantization: Mapping[str, Any], groups: list[Mapping[str, Any]]) -> tuple[int, int] | None:
    structures = [_weights(group).get("block_structure") for group in groups]
    for value in (quantization.get("weight_block_size"), *(structures if len(structures) == 1 else ())):
        if (
            isinstance(value, list)
            and len(value) == 2
            and all(type(s) is int and 0 < s < 1 << 32 for s in value)
        ):
            return value[0], value[1]
    return None


def _number(
    quantization: Mapping[str, Any], groups: list[Mapping[str, Any]], of_group: str, key: str
) -> int | None:
    """A whole number that every group's weights give alike, or that the config gives at its top."""
    given = [_weights(group).get(of_group) for group in groups] or [quantization.get(key)]
    value = given[0]  # a list of two in AutoRound's blocks, and anything at all in a hostile file
    alike = all(type(each) is int and each == value for each in given)
    return value if alike and isinstance(value, int) and -1 <= value < 1 << 31 else None


def _static(method: str, algo: str, quantization: Mapping[str, Any], inputs: list[Any]) -> bool:
    """Whether the declared path reads a stored input scale. NVFP4 always does; compressed-tensors if not dynamic."""
    if method == "fp8":
        return quantization.get("activation_scheme") == "static"
    if method == "compressed-tensors":
        return any(isinstance(item, dict) and item.get("dynamic") in (False, "local") for item in inputs)
    return algo in ("NVFP4", "FP8", "MIXED_PRECISION")
