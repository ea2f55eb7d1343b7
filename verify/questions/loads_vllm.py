"""Which module of vLLM 0.33.0 takes each tensor, what that module can hold, what its loader refuses and why.

No vLLM is imported: `verify.formats.vllm_modules` holds its modules as tables. Two runtimes are known: vLLM as it
ships and vLLM with our runtime patch, which alone knows FP8_BLOCK.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from shardmill.verify.formats.declared import Declaration, declaration, names_of
from shardmill.verify.formats.excludes import safe_regex
from shardmill.verify.formats.fused import kind_of
from shardmill.verify.formats.schemes import FLOATS, SCALE_DTYPES, implied_block
from shardmill.verify.formats.vllm_families import FAMILIES
from shardmill.verify.formats.vllm_modules import (
    COMPRESSED_ALGOS,
    PATCHED_ALGOS,
    STOCK_ALGOS,
    STOCK_PACKED,
    Family,
    Holds,
    Row,
)
from shardmill.verify.questions.unasked import UnaskedError, no_table
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import Tensor
from shardmill.verify.rules.findings import Finding, Report

NAME = "vLLM 0.33.0"
RUNTIMES = ("stock", "patched")
DIVIDED = "rows of fused parts in multiples of"  # begins what a refusal of mere dimensions expects
CAST_SILENTLY = ("fp8", "fp8 by tensor", *COMPRESSED_ALGOS)
LABELS = {
    "in_proj_qkvbfg_a": "KDA in_proj",
    "fused_qkv_a_proj": "MLA a-projections",
    "w13": "expert gate and up",
}
_LEAVES = ("weight", "bias", *SCALE_DTYPES)
# Scales of the KV cache, which vLLM gives to its attention layers, and buffers that it computes itself.
PASSED_OVER = re.compile(
    r"\.(k_scale|v_scale|q_scale|prob_output_scale|[kv]_proj\.output_scale|rotary_emb\.inv_freq)$"
)
_NUMBERED = re.compile(r"^(\d{1,6})\.(.*)$")
_EXPERT = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")


@dataclass(slots=True)
class ModuleInput:
    """One module of vLLM and the tensors that it would be given."""

    module: str  # its name in vLLM
    holds: Holds
    parts: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # place -> leaf -> tensor
    names: dict[str, str] = field(default_factory=dict)  # place -> the checkpoint's module
    layer: str = ""


@dataclass(frozen=True, slots=True)
class NameList:
    """An exclusion list as vLLM matches it under `fp8` and compressed-tensors: whole names, and `re:` expressions."""

    names: frozenset[str]
    expressions: tuple[re.Pattern[str], ...]
    banks: frozenset[str]  # names up to `.experts` of the entries that name an expert or a bank

    @classmethod
    def read(cls, declared: Declaration | None) -> Self:
        texts = [pattern.text for pattern in declared.excludes.patterns] if declared is not None else []
        regexes = [safe_regex(text[3:]) for text in texts if text.startswith("re:")]
        banks = frozenset(f"{text.partition('.experts')[0]}.experts" for text in texts if ".experts" in text)
        return cls(frozenset(texts), tuple(regex for regex in regexes if regex is not None), banks)

    def hits(self, name: str, *, regex: bool) -> bool:
        return name in self.names or (regex and any(found.match(name) for found in self.expressions))


@dataclass(frozen=True, slots=True)
class Loader:
    """A model class under one runtime, with the checkpoint's declaration."""

    family: Family
    patched: bool
    declared: Declaration | None
    trunk_layers: int
    excluded: NameList
    without: frozenset[str] = frozenset()  # rows that this config's model does not have

    @property
    def algos(self) -> Mapping[str, tuple[tuple[str, ...], int | None]]:
        if self.declared is not None and self.declared.method == "compressed-tensors":
            return COMPRESSED_ALGOS
        return PATCHED_ALGOS if self.patched else STOCK_ALGOS


def ask(checkpoint: Checkpoint, runtime: str | None, report: Report) -> list[Finding]:
    """What vLLM would say. Raises UnaskedError where no table holds the architecture or its declaration."""
    loader = _loader(checkpoint, runtime)
    report.facts["runtime"] = f"{NAME} with the runtime patch" if loader.patched else f"{NAME} as it ships"
    takers, found = assign(checkpoint, loader)
    verdicts: dict[str, int] = {}
    for module, (verdict, findings) in _verdicts(takers, loader):
        found += findings
        key = f"{kind_of(module)}: {verdict}"
        verdicts[key] = verdicts.get(key, 0) + 1
    report.facts["modules"] = {key: verdicts[key] for key in sorted(verdicts)}
    return [*found, *_group_sizes(loader)]


def complete(checkpoint: Checkpoint, runtime: str | None) -> bool:
    """Whether the model is whole beside what no module takes: each layer has the places that any other layer has."""
    loader = _loader(checkpoint, runtime)
    takers, _ = assign(checkpoint, loader)
    layers: dict[str, set[tuple[str, str]]] = {}
    for one in takers:
        bare = one.module.partition(f".{one.layer}.")[2] if one.layer else one.module
        inner = _EXPERT.sub("#", bare)
        layers.setdefault(one.layer, set()).update((inner, place) for place in one.parts)
    tops = layers.pop("", set())
    tied = any(row.module.endswith("lm_head") for row in loader.family.top_rows if _tied(checkpoint))
    asked = {(row.module, row.place) for row in loader.family.top_rows if row.name.count("visual") == 0}
    lacking = {(module, place) for module, place in asked - tops if not (tied and module.endswith("lm_head"))}
    every = set[tuple[str, str]]().union(*layers.values())
    return bool(layers) and not lacking and all(places == every for places in layers.values())


def _tied(checkpoint: Checkpoint) -> bool:
    text = checkpoint.config.get("text_config")
    places = (checkpoint.config, text if isinstance(text, dict) else {})
    return any(place.get("tie_word_embeddings") is True for place in places)


def _loader(checkpoint: Checkpoint, runtime: str | None) -> Loader:
    declared = declaration(checkpoint.quantization)[0] if checkpoint.quantization else None
    family = family_of(checkpoint)
    if family is None:
        raise no_table(NAME, checkpoint.config)
    if declared is not None and not _known(declared):
        raise UnaskedError(f"no table of what {NAME} makes of quant_method {declared.method[:60]!r}")
    patched = runtime == "patched" or (runtime is None and _needs_patch(declared))
    text = checkpoint.config.get("text_config", checkpoint.config)
    without = frozenset(row for row, key in family.only_with.items() if not text.get(key))
    return Loader(family, patched, declared, _trunk_layers(checkpoint), NameList.read(declared), without)


def _verdicts(takers: list[ModuleInput], loader: Loader) -> Iterator[tuple[str, tuple[str, list[Finding]]]]:
    return ((module_input.module, judge(module_input, loader)) for module_input in takers)


def modules(checkpoint: Checkpoint, runtime: str | None = None) -> dict[str, str]:
    """Module of vLLM -> what it becomes: "float", a kind such as "FP8 [128,128]", "refused" or "garbage"."""
    loader = _loader(checkpoint, runtime)
    return {module: word for module, (word, _) in _verdicts(assign(checkpoint, loader)[0], loader)}


def homeless(checkpoint: Checkpoint) -> list[str]:
    """The tensors that no module of vLLM takes."""
    return [finding.tensor for finding in assign(checkpoint, _loader(checkpoint, None))[1]]


def family_of(checkpoint: Checkpoint) -> Family | None:
    kind = checkpoint.config.get("model_type")
    return next((family for family in FAMILIES if kind in family.types), None)


def float_modules(checkpoint: Checkpoint) -> Callable[[str], bool]:
    """Whether a module of the checkpoint is one that vLLM builds without a quantization config, listed or not."""
    family = family_of(checkpoint)
    if family is None:
        return lambda _: False
    loader = Loader(family, False, None, _trunk_layers(checkpoint), NameList.read(None))
    tables = _tables(family)

    def built_float(module: str) -> bool:
        found = _place(f"{module}.weight", loader, *tables)
        return found is not None and found[0].stock == found[0].patched == "float"

    return built_float


def _tables(family: Family) -> tuple[dict[str, Row], dict[str, Row], dict[str, Row]]:
    """The rows by name: of a layer, of a vision block, of the top."""
    layer, block, top = ({row.name: row for row in rows} for rows in
                         (family.layer_rows, family.block_rows, family.top_rows))  # fmt: skip
    return layer, block, top


def _known(declared: Declaration) -> bool:
    """Whether `_resolve` follows the declaration: ModelOpt's, `fp8` in blocks or by tensor, compressed-tensors' FP8."""
    if declared.method == "compressed-tensors":
        return declared.all_linears and _compressed_algo(declared) in COMPRESSED_ALGOS
    return declared.method == "fp8" or declared.method.startswith("modelopt")


def _compressed_algo(declared: Declaration) -> str:
    return declared.kinds[0] if declared.kinds else ""


def _needs_patch(declared: Declaration | None) -> bool:
    entries = (declared.entries or {}) if declared is not None else {}
    return any(entry.algo == "FP8_BLOCK" for entry in entries.values())


def _trunk_layers(checkpoint: Checkpoint) -> int:
    text = checkpoint.config.get("text_config")
    value = (text if isinstance(text, dict) else checkpoint.config).get("num_hidden_layers")
    return value if type(value) is int else 1 << 30


def assign(checkpoint: Checkpoint, loader: Loader) -> tuple[list[ModuleInput], list[Finding]]:
    """Every tensor to its module; the ones that no module takes."""
    rows, blocks, tops = _tables(loader.family)
    takers: dict[str, ModuleInput] = {}
    homeless: list[Finding] = []
    for tensor in checkpoint.tensors.values():
        if PASSED_OVER.search(tensor.name) or tensor.name.startswith(loader.family.dropped):
            continue
        found = _place(tensor.name, loader, rows, blocks, tops)
        if found is None:
            homeless.append(Finding("no-home", tensor.file, tensor.name, "a parameter of the model", "none"))
            continue
        row, module, layer, own, leaf = found
        holds = row.patched if loader.patched else row.stock
        module_input = takers.setdefault(module, ModuleInput(module, holds, layer=layer))
        module_input.parts.setdefault(row.place, {})[loader.family.leaves.get(leaf, leaf)] = tensor
        module_input.names[row.place] = own
    order = {
        row.place: place for place, row in enumerate((*loader.family.layer_rows, *loader.family.top_rows))
    }
    for module_input in takers.values():
        module_input.parts = {
            place: module_input.parts[place] for place in sorted(module_input.parts, key=order.__getitem__)
        }
    return list(takers.values()), homeless


def _place(
    name: str, loader: Loader, rows: dict[str, Row], blocks: dict[str, Row], tops: dict[str, Row]
) -> tuple[Row, str, str, str, str] | None:
    """(row, vLLM module, layer, the checkpoint's module, leaf) of a tensor."""
    own, leaf = name, "weight"
    front, _, last = name.rpartition(".")
    if last in _LEAVES:
        own, leaf = front, last
    if own in tops:
        return tops[own], tops[own].module, "", own, leaf
    for prefixes, table in ((loader.family.layers, rows), (loader.family.blocks, blocks)):
        for prefix, runtime in prefixes.items():
            match = _NUMBERED.match(own.removeprefix(prefix)) if own.startswith(prefix) else None
            if match is None:
                continue
            number, inner = match.groups()
            expert = _EXPERT.search(inner)
            row = table.get(_EXPERT.sub("#", inner))
            if row is None or row.name in loader.without:
                return None
            if table is rows and int(number) >= loader.trunk_layers:
                runtime = loader.family.draft
            module = row.module.replace("#", expert[0]) if expert else row.module
            return row, f"{runtime}{number}.{module}", number, own, leaf
    return None


def judge(module_input: ModuleInput, loader: Loader) -> tuple[str, list[Finding]]:
    """What the module becomes, in a word, and what its loader would refuse."""
    block = loader.declared.block if loader.declared is not None else None
    kinds = {place: _kind(leaves, block) for place, leaves in module_input.parts.items()}
    holds = module_input.holds
    if holds == "by 64":
        holds = "config" if _by_64(module_input) else "float"
    if holds in ("raw", "float") and _all_floats(kinds):
        return "float", []
    if holds == "float":
        return "refused", [
            _refuses(module_input, kinds, "floats: the module is built without a quantization config")
        ]
    if holds == "dequant":
        return _judge_dequant(module_input, kinds)
    return _judge_config(module_input, kinds, loader)


def _by_64(module_input: ModuleInput) -> bool:
    """Whether every side of the module's weights is a multiple of 64."""
    weights = [leaves["weight"] for leaves in module_input.parts.values() if "weight" in leaves]
    return all(side % 64 == 0 for weight in weights for side in weight.shape)


def _judge_dequant(module_input: ModuleInput, kinds: dict[str, str]) -> tuple[str, list[Finding]]:
    if _all_floats(kinds):
        return "float", []
    if all(kind in FLOATS or kind.startswith("FP8 [") for kind in kinds.values()):
        got = f"{_said(module_input, kinds)}: turned back into BF16 at load, no memory is saved"
        return "dequantized", [
            Finding("loads-dequantized", _file(module_input), module_input.module, "FP8 in memory", got)
        ]
    return "refused", [_refuses(module_input, kinds, "floats or block FP8 with a 2-D weight_scale_inv")]


def _judge_config(
    module_input: ModuleInput, kinds: dict[str, str], loader: Loader
) -> tuple[str, list[Finding]]:
    algo, trouble = _resolve(module_input, loader)
    if trouble:
        return "refused", [_refuses(module_input, kinds, trouble)]
    if algo == "":
        if _all_floats(kinds):
            return "float", []
        return "refused", [_refuses(module_input, kinds, "floats: by the config the module is unquantized")]
    if module_input.holds == "vocab":
        return "refused", [_refuses(module_input, kinds, "floats: the vocabulary's loader takes no scale")]
    leaves, axes = loader.algos[algo]
    for tensors in module_input.parts.values():
        lacking = [leaf for leaf in leaves if leaf not in tensors and leaf != "input_scale"]
        scale = tensors.get(leaves[1])
        wrong_axes = axes not in (None, 0) and scale is not None and len(scale.shape) != axes
        surplus = [leaf for leaf in tensors if leaf not in (*leaves, "bias", "input_scale")]
        if lacking or wrong_axes or surplus or _kind(tensors, None) in FLOATS:
            expected = f"{algo}: {', '.join(leaves)}" + (f" of {axes} axes" if axes else "")
            if _is_biased_bank(module_input, loader, algo):
                return "refused", [_refuses(module_input, kinds, "a bank of FP8 experts without biases")]
            if _all_floats(kinds) and algo in CAST_SILENTLY:
                return "garbage", [_garbage(module_input, kinds, expected)]
            return "refused", [_refuses(module_input, kinds, expected)]
    if len(set(kinds.values())) > 1:
        return "refused", [_refuses(module_input, kinds, "one treatment of all parts")]
    block = loader.declared.block if loader.declared is not None else None
    if block is not None and algo in ("fp8", "fp8-grid") and not _divides(module_input, block):
        return "refused", [_refuses(module_input, kinds, f"{DIVIDED} {block[0]}")]
    return next(iter(kinds.values())), []


def _is_biased_bank(module_input: ModuleInput, loader: Loader, algo: str) -> bool:
    return loader.family.bank_biased and algo in COMPRESSED_ALGOS and ".experts." in module_input.module


def _divides(module_input: ModuleInput, block: tuple[int, int]) -> bool:
    """Whether no block spans two parts: of a Linear all but the last must divide, of experts all."""
    weights = [leaves["weight"] for leaves in module_input.parts.values() if "weight" in leaves]
    if any(len(weight.shape) < 2 for weight in weights):
        return False
    if ".experts." not in module_input.module:
        return all(weight.shape[0] % block[0] == 0 for weight in weights[:-1])
    if module_input.module.endswith(".w2"):
        return weights[0].shape[-1] % block[1] == 0
    return all(weight.shape[-2] % block[0] == 0 for weight in weights)


def _resolve(module_input: ModuleInput, loader: Loader) -> tuple[str, str]:
    """(the algorithm that the config gives this module, "" for none; what the config makes the loader refuse)"""
    declared = loader.declared
    if declared is None:
        return "", ""
    if declared.entries is not None:
        return _resolve_listed(module_input, loader, declared)
    excluded = {
        place: _excluded(own, module_input.module, loader, declared)
        for place, own in module_input.names.items()
    }
    if any(excluded.values()) and not all(excluded.values()):
        kept = ", ".join(place for place, out in excluded.items() if not out)
        return "", f"all parts or none excluded (not {kept})"
    if all(excluded.values()):
        return "", ""
    if declared.method in ("fp8", "compressed-tensors"):
        if module_input.holds == "vocab":
            return "", ""  # neither quantizes the vocabulary's modules
        if declared.method == "fp8":
            return ("fp8" if declared.block else "fp8 by tensor"), ""
        return _compressed_algo(declared), ""
    algo = "W4A16_NVFP4" if declared.algo == "NVFP4" and declared.weight_only else declared.algo
    return (algo, "") if algo in STOCK_ALGOS else ("", "")


def _excluded(own: str, module: str, loader: Loader, declared: Declaration) -> bool:
    """Whether vLLM takes a part for excluded. `own`: its module in the checkpoint, `module`: in vLLM."""
    for part, listed in loader.family.listed_as.items():
        own, module = own.replace(part, listed), module.replace(part, listed)
    parent = module.rpartition(".")[0]
    shard = f"{parent}.{own.rpartition('.')[2]}"
    if declared.method == "fp8":
        bank, experts, _ = module.partition(".experts")
        if experts:
            return not loader.excluded.banks.isdisjoint(
                (f"{bank}.experts", f"{own.partition('.experts')[0]}.experts")
            )
        return any(loader.excluded.hits(name, regex=False) for name in (own, shard, module))
    if declared.method == "compressed-tensors":
        bank, experts, _ = module.partition(".experts.")
        if experts:  # the first expert speaks for its bank; stacked ones are asked for as if they were single
            part = own.rpartition(".")[2] if ".experts." in own else "gate_proj"
            front = own.partition(".experts.")[0] if ".experts." in own else bank
            own, shard = f"{front}.experts.0.{part}", f"{bank}.experts.0.{part}"
        return loader.excluded.hits(own, regex=False) or any(
            loader.excluded.hits(name, regex=True) for name in (shard, module)
        )
    names = (own, shard, module, module.removeprefix("language_model."))
    return any(declared.excludes.hits(name) for name in names)


def _resolve_listed(module_input: ModuleInput, loader: Loader, declared: Declaration) -> tuple[str, str]:
    entries = declared.entries or {}
    known = PATCHED_ALGOS if loader.patched else STOCK_ALGOS
    packed = (
        loader.patched or "" in module_input.names or module_input.module.rpartition(".")[2] in STOCK_PACKED
    )
    found: dict[str, str] = {}
    for place, own in module_input.names.items():
        entry = next(
            (entries[name] for name in _entry_names(own, module_input, loader) if name in entries), None
        )
        algo = entry.algo if entry is not None and packed else ""
        found[place] = algo if algo in known else ""
    if len(set(found.values())) > 1:
        said = ", ".join(f"{place} {algo or 'unlisted'}" for place, algo in found.items())
        return "", f"the same quant_algo for all parts, not {said}"
    return next(iter(found.values())), ""


def _entry_names(own: str, module_input: ModuleInput, loader: Loader) -> Iterator[str]:
    """Under which names the entry of a part is looked for. The draft is a model of its own, with its own prefix."""
    draft = module_input.layer and int(module_input.layer) >= loader.trunk_layers
    name = own
    if draft and loader.family.layers:
        prefix = next(iter(loader.family.layers))
        name = own.replace(prefix, loader.family.draft, 1)
    yield name
    if not draft or loader.patched:
        yield own
        yield from names_of(own)
    bank = name.partition(".experts.")
    if bank[1]:
        yield f"{bank[0]}.experts"


def _kind(leaves: dict[str, Tensor], block: tuple[int, int] | None) -> str:
    """`BF16`, `NVFP4`, `FP8 [32,32]` ... of one part. `block`: what config.json declares, which a grid may fit."""
    weight = leaves.get("weight")
    if weight is None:
        return leaves["bias"].dtype if list(leaves) == ["bias"] else "scales alone"
    if weight.dtype in FLOATS:
        scales = sorted(set(leaves) & set(SCALE_DTYPES))
        return f"{weight.dtype} with {', '.join(scales)}" if scales else weight.dtype
    if weight.dtype == "U8":
        return "NVFP4"
    scale = leaves.get("weight_scale_inv", leaves.get("weight_scale"))
    if scale is not None and weight.dtype != "U8" and len(scale.shape) == len(weight.shape) == 2:
        return f"FP8 [{','.join(map(str, _sides(weight.shape, scale.shape, block)))}]"
    named = leaves.get("weight_scale", scale)
    return (
        f"FP8 with a {len(named.shape)}-D {named.name.rpartition('.')[2]}"
        if named is not None
        else "FP8 bare"
    )


def _sides(shape: tuple[int, ...], grid: tuple[int, ...], block: tuple[int, int] | None) -> list[int]:
    """The block that a grid means: the declared one where it fits. 576 rows in 5 blocks may be 116 or 128 each."""
    if block is not None and all(
        -(-size // side) == blocks for size, side, blocks in zip(shape, block, grid, strict=True)
    ):
        return list(block)
    return [implied_block(size, blocks) for size, blocks in zip(shape, grid, strict=True)]


def _all_floats(kinds: dict[str, str]) -> bool:
    return all(kind in FLOATS for kind in kinds.values())


def _refuses(module_input: ModuleInput, kinds: dict[str, str], expected: str) -> Finding:
    return Finding(
        "loader-refuses",
        _file(module_input),
        module_input.module,
        expected,
        f"{_said(module_input, kinds)}: loader refuses",
    )


def _garbage(module_input: ModuleInput, kinds: dict[str, str], expected: str) -> Finding:
    got = f"{_said(module_input, kinds)}: {NAME} casts it to FP8 and leaves its scale as memory was"
    return Finding("loads-garbage", _file(module_input), module_input.module, expected, got)


def _said(module_input: ModuleInput, kinds: dict[str, str]) -> str:
    """`layers.0 q,k,v FP8 [32,32], b float`: parts of one treatment together."""
    by_kind: dict[str, list[str]] = {}
    for place, kind in kinds.items():
        by_kind.setdefault(kind, []).append(place)
    label = LABELS.get(module_input.module.rpartition(".")[2])
    where = (f"{label}: " if label else "") + (f"layers.{module_input.layer} " if module_input.layer else "")
    return where + ", ".join(
        f"{','.join(filter(None, places))} {kind}".strip() for kind, places in by_kind.items()
    )


def _file(module_input: ModuleInput) -> str:
    return next(iter(next(iter(module_input.parts.values())).values())).file


def _group_sizes(loader: Loader) -> Iterator[Finding]:
    """Stock takes one group_size for all block-FP8 entries, and raises on two even where they are Linears."""
    entries = (loader.declared.entries or {}) if loader.declared is not None else {}
    for algo in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):
        sizes = sorted({entry.group for entry in entries.values() if entry.algo == algo and entry.group})
        if len(sizes) > 1:
            yield Finding("loader-refuses", "config.json", algo, "one group_size for all entries", str(sizes))
