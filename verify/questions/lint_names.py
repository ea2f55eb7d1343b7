"""Sanity of names: exclusion lists that match, fused groups treated alike, no layer, expert or scale name amiss."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from shardmill.verify.formats.declared import CONFIG, MAPPINGS, Declaration
from shardmill.verify.formats.excludes import NAME_CHARS_MAX, Excludes, Pattern
from shardmill.verify.formats.fused import fused_groups, fused_names, kind_of
from shardmill.verify.formats.schemes import FLOATS, Linear
from shardmill.verify.questions.loads_vllm import float_modules
from shardmill.verify.questions.stacks import Stacks, stacks_of
from shardmill.verify.questions.tied import text_of
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.rules.findings import Finding

_LAYER = re.compile(r"^(.*\blayers)\.(\d{1,6})\.")
_EXPERT = re.compile(r"^(.*\bexperts)\.(\d{1,6})\.")

LITERAL_NAMES_MAX = 100_000  # modules up to which every known name of each is looked at
WORK_MAX = 20_000_000  # names against patterns, about ten seconds
NEAR_PAIRS_MAX, NEAR_CHARS_MAX = 10_000, 48  # of names that are compared for a hint
EXPERTS_NAMED_MAX = 10_000  # missing experts of all banks that are named; the rest is one count
MISSING_MAX = 100  # layers, or experts of a bank, that are named one by one

# Two-dimensional weights that are no Linear, or that no engine quantizes whatever the config says.
NOT_LINEAR = re.compile(r"embed|norm|\bwte\b|\bwpe\b|relative_attention_bias|position|conv")
# Left unquantized by the engines' model code for DeepSeek-style fp8 and compressed-tensors, listed or not.
LEFT_BY_ENGINES = re.compile(r"(^|\.)(lm_head|head|gate|eh_proj|weights_proj|router|classifier|score)$")


@dataclass(frozen=True)
class Names:
    """What the rules look at."""

    checkpoint: Checkpoint
    linears: Mapping[str, Linear]
    declared: Declaration | None
    modules: tuple[str, ...]  # that have a weight of two axes or more

    @cached_property
    def stacks(self) -> Stacks:
        return stacks_of(self.checkpoint.tensors)

    @property
    def text_config(self) -> Mapping[str, object]:
        return text_of(self.checkpoint.config)

    @property
    def whole(self) -> bool:
        """Whether every file of weights could be read; else what is missing is a file, not a tensor."""
        checkpoint = self.checkpoint
        named = set(checkpoint.index.weight_map.values()) if checkpoint.index is not None else set()
        here = {file for file in checkpoint.files if file.endswith(".safetensors") and "/" not in file}
        return (named | here) - checkpoint.copies <= checkpoint.headers.keys()

    def count(self, *keys: str) -> int:
        """The first of these whole numbers that the config has, else 0."""
        for key in keys:
            value = self.text_config.get(key)
            if type(value) is int:
                return value
        return 0


def names_of(checkpoint: Checkpoint, linears: Mapping[str, Linear], declared: Declaration | None) -> Names:
    modules = tuple(
        name.removesuffix(".weight")
        for name, tensor in checkpoint.tensors.items()
        if name.endswith(".weight") and len(tensor.shape) >= 2
    )
    known = set(modules)
    packed = (module for module, linear in linears.items() if linear.weight and module not in known)
    return Names(checkpoint, linears, declared, (*modules, *packed))


def name_faults(names: Names) -> Iterator[Finding]:
    for rule in RULES:
        yield from rule(names)


def known_names(module: str) -> Iterator[str]:
    """The names under which an engine may look for a module: its own, mapped ones, fused ones of each."""
    mapped = [
        module,
        *(loader + module.removeprefix(own) for loader, own in MAPPINGS if module.startswith(own)),
    ]
    for name in mapped:
        yield name
        yield from fused_names(name)


def excludes_match(names: Names) -> Iterator[Finding]:
    """Every exclusion should hit a module under some known name; a list of which none does is a fault."""
    declared = names.declared
    if declared is None or not declared.excludes.patterns:
        return
    known = {known for module in _representatives(names.modules) for known in known_names(module)}
    literal = set(names.modules)
    if declared.excludes.numbered and len(literal) < LITERAL_NAMES_MAX:
        literal = {known for module in names.modules for known in known_names(module)}
    work = WORK_MAX
    idle = []
    for pattern in declared.excludes.patterns:
        names_of_it = literal if pattern.numbered else known
        if pattern.repeats > 1:
            work -= sum(pattern.cost(name) for name in names_of_it if len(name) < NAME_CHARS_MAX)
        else:
            work -= len(names_of_it)
        if work > 0 and not _hits(pattern, known, literal):
            idle.append(pattern)
    strange = [pattern for pattern in idle if not LEFT_BY_ENGINES.search(pattern.text)]
    if strange and len(idle) == len(declared.excludes.patterns):
        got = f"0 of {len(idle):,} match; the first is {idle[0].text!r}"
        yield Finding("excludes-all-idle", CONFIG, "", "exclusions that match the checkpoint's modules", got)
        return
    leaves = sorted({name.rpartition(".")[2] for name in known})
    for pattern in idle:
        yield Finding(
            "exclude-idle", CONFIG, pattern.text, "a module", f"nothing{_near(pattern, leaves, len(idle))}"
        )


def _near(pattern: Pattern, leaves: list[str], idle: int) -> str:
    """`; near: gate_proj` where looking for it is cheap."""
    leaf = pattern.text.rpartition(".")[2]
    short = [known for known in leaves if len(known) <= NEAR_CHARS_MAX]
    if idle * len(short) > NEAR_PAIRS_MAX or len(leaf) > NEAR_CHARS_MAX:
        return ""
    near = difflib.get_close_matches(leaf, short, 3, 0.7)
    return f"; near: {', '.join(near)}" if near else ""


def _representatives(modules: Iterable[str]) -> Iterator[str]:
    """One module of each kind, its numbers as they are."""
    seen: set[str] = set()
    for module in modules:
        kind = kind_of(module)
        if kind not in seen:
            seen.add(kind)
            yield module


def _hits(pattern: Pattern, known: set[str], literal: set[str]) -> bool:
    if pattern.text in known or pattern.text in literal:
        return True
    if pattern.numbered and pattern.regex is None:
        return any(name.startswith(f"{pattern.text}.") for name in literal)
    pool = literal if pattern.numbered else known
    return any(pattern.matches(name) for name in pool if len(name) < NAME_CHARS_MAX)


def claimed_not_quantized(names: Names) -> Iterator[Finding]:
    """One kind is declared for all Linears, and one of them is neither quantized nor excluded."""
    declared = names.declared
    if declared is None or declared.entries is not None or not declared.kinds or not declared.all_linears:
        return
    if not names.linears:
        return
    engines_leave = declared.method in ("fp8", "compressed-tensors")
    verdicts: dict[str, bool] = {}
    built_float = float_modules(names.checkpoint)
    for module in names.modules:
        weight = names.checkpoint.tensors.get(f"{module}.weight")
        if (
            weight is None
            or weight.dtype not in FLOATS
            or len(weight.shape) != 2
            or NOT_LINEAR.search(module)
        ):
            continue
        if (engines_leave and LEFT_BY_ENGINES.search(module)) or built_float(module):
            continue
        if not _excluded(declared.excludes, module, verdicts):
            kinds = " or ".join(declared.kinds)
            expected = f"{kinds}, or an exclusion that matches it"
            yield Finding("claimed-not-quantized", weight.file, module, expected, f"{weight}, not excluded")


def _excluded(excludes: Excludes, module: str, verdicts: dict[str, bool]) -> bool:
    if excludes.numbered:
        return any(excludes.hits(known) for known in known_names(module))
    kind = kind_of(module)
    if kind not in verdicts:
        verdicts[kind] = any(excludes.hits(known) for known in known_names(module))
    return verdicts[kind]


def scale_names(names: Names) -> Iterator[Finding]:
    """`weight_scale` where the loader of the declared format wants `weight_scale_inv`, or the reverse."""
    declared = names.declared
    for module, linear in names.linears.items():
        wanted = _wanted_leaf(declared, module)
        for leaf in ("weight_scale", "weight_scale_inv"):
            if wanted and leaf != wanted and leaf in linear.scales and linear.kind.startswith("fp8"):
                scale = linear.scales[leaf]
                yield Finding("scale-name", scale.file, scale.name, f"{module}.{wanted}", scale.name)


def _wanted_leaf(declared: Declaration | None, module: str) -> str:
    if declared is None:
        return ""
    if declared.entries is not None:
        entry = declared.entries.get(module)
        algo = entry.algo if entry is not None else ""
    else:
        algo = declared.algo
    if declared.method == "compressed-tensors" or algo in ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN"):
        return "weight_scale"
    return "weight_scale_inv" if algo == "FP8_BLOCK" or (declared.method == "fp8" and declared.block) else ""


def fused_alike(names: Names) -> Iterator[Finding]:
    """Members of a fused module are all quantized alike, and all there."""
    usual: dict[tuple[str, str], set[str]] = {}
    groups = list(fused_groups(names.modules))
    for parent, group, members in groups:
        usual.setdefault((kind_of(parent), group.fused), set()).update(members)
    for parent, group, members in groups:
        treated = {member: _treatment(names, module) for member, module in members.items()}
        if len(set(treated.values())) > 1:
            got = ", ".join(f"{member} {how}" for member, how in treated.items())
            yield Finding(
                "fused-group-mixed", _file(names, members), f"{parent}.{group.fused}", "one treatment", got
            )
        absent = sorted(usual[kind_of(parent), group.fused] - members.keys())
        if absent:
            expected = f"{', '.join(absent)} beside {', '.join(members)}"
            yield Finding(
                "fused-member-missing", _file(names, members), f"{parent}.{group.fused}", expected, "none"
            )


def _treatment(names: Names, module: str) -> str:
    linear = names.linears.get(module)
    if linear is None or linear.weight is None:
        return "unquantized"
    entry = (names.declared.entries or {}).get(module) if names.declared is not None else None
    return f"{linear.kind} [{entry.group}]" if entry is not None and entry.group else linear.kind


def _file(names: Names, members: Mapping[str, str]) -> str:
    weight = names.checkpoint.tensors.get(f"{next(iter(members.values()))}.weight")
    return weight.file if weight is not None else ""


def layers_whole(names: Names) -> Iterator[Finding]:
    """Layers are 0, 1, 2 ... as many as the config says, and the MTP layers behind them."""
    stacks: dict[str, set[int]] = {}
    last = ""  # the front of the name before, which most names share
    for name in names.checkpoint.tensors:
        if last and name.startswith(last):
            continue
        match = _LAYER.match(name)
        if match:
            stacks.setdefault(match[1], set()).add(int(match[2]))
            last = match[0] if "layers." not in name[match.end() :] else ""
    if not stacks:
        return
    stack, layers = max(stacks.items(), key=lambda item: len(item[1]))
    trunk = names.count("num_hidden_layers")
    expected = trunk or max(layers) + 1
    for layer in islice((layer for layer in range(expected) if layer not in layers), MISSING_MAX):
        yield Finding(
            "layer-missing", "", f"{stack}.{layer}", f"layers 0 to {expected - 1}", "none of its tensors"
        )
    drafts = names.count("num_nextn_predict_layers", "mtp_num_hidden_layers")
    for layer in range(trunk, trunk + min(drafts, 100)) if trunk else ():
        if layer not in layers and not any(".mtp." in f".{name}" for name in names.checkpoint.tensors):
            expected_mtp = f"an MTP layer, as num_nextn_predict_layers {drafts} says"
            slug = "mtp-dropped" if _saved_by_transformers(names, stack, layer) else "mtp-missing"
            yield Finding(slug, "", f"{stack}.{layer}", expected_mtp, "none of its tensors")


def _saved_by_transformers(names: Names, stack: str, layer: int) -> bool:
    """transformers has no MTP layers, and drops them whole at each save; no list of the config names one then."""
    checkpoint = names.checkpoint
    if checkpoint.manifest is not None or "transformers_version" not in checkpoint.config:
        return False
    texts = [pattern.text for pattern in names.declared.excludes.patterns] if names.declared else []
    return not any(re.search(rf"\blayers\.{layer}\b", text) for text in texts)


def experts_whole(names: Names) -> Iterator[Finding]:
    """Each bank has experts 0, 1, 2 ... as many as the config says, each with what its siblings have."""
    banks: dict[str, dict[int, set[str]]] = {}
    front, leaves = "", set[str]()  # of the expert before, whose other tensors follow
    for name in names.checkpoint.tensors:
        if front and name.startswith(front) and "experts." not in (rest := name[len(front) :]):
            leaves.add(rest)
            continue
        match = _EXPERT.match(name) if "experts." in name else None
        if match:
            front, leaves = match[0], banks.setdefault(match[1], {}).setdefault(int(match[2]), set())
            leaves.add(name[match.end() :])
    said = names.count("n_routed_experts", "num_experts", "num_local_experts")
    count = said or max((len(experts) for experts in banks.values()), default=0)
    left, unnamed = EXPERTS_NAMED_MAX, 0
    for bank, experts in banks.items():
        if left <= 0:
            unnamed += len(experts) < count
            continue
        for expert in islice(
            (expert for expert in range(count) if expert not in experts), min(left, MISSING_MAX)
        ):
            left -= 1
            yield Finding(
                "expert-missing", "", f"{bank}.{expert}", f"experts 0 to {count - 1}", "none of its tensors"
            )
        whole = set().union(*experts.values())
        for expert, leaves in experts.items():
            lacking = sorted(leaf for leaf in whole - leaves if not leaf.endswith("input_scale"))
            if lacking:
                got = f"without {', '.join(lacking[:4])}"
                yield Finding("expert-incomplete", "", f"{bank}.{expert}", "what its siblings have", got)
    if unnamed:
        yield Finding("expert-missing", "", f"{unnamed:,} more banks", f"experts 0 to {count - 1}", "fewer")


RULES: tuple[Callable[[Names], Iterator[Finding]], ...] = (
    excludes_match,
    claimed_not_quantized,
    scale_names,
    fused_alike,
    layers_whole,
    experts_whole,
)
