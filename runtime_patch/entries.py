"""Which entry of a MIXED_PRECISION manifest speaks about a module of vLLM.

The manifest's keys are checkpoint names (`model.language_model.layers.0.self_attn.q_proj`). vLLM asks with its
own module names, and those differ in four ways: the prefix (`language_model.model.`, `visual.`), the draft
layer's `.mtp_block.`, fused modules (`in_proj_qkvbfg_a` is six checkpoint modules), and whole banks of experts.
One canonical spelling of both sides makes the answer a dictionary lookup; 38,000 entries cost one pass.

Pure names: neither vLLM nor torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from shardmill.runtime_patch.errors import PatchError

BLOCK_FP8 = "FP8_BLOCK"
BLOCKS = (32, 128)  # the block sides that a kernel exists for; blocks are square

# vLLM's fused module -> the checkpoint modules whose rows it holds, in order.
FUSED: dict[str, tuple[str, ...]] = {
    "in_proj_qkvbfg_a": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("qkv",),  # the vision tower's own spelling; not fused on disk
}

_PREFIXES = ("model.language_model.", "language_model.model.", "model.visual.", "visual.", "model.")


@dataclass(frozen=True, slots=True)
class Entry:
    """What the manifest says of one module: the algorithm, and the side of its square block or group."""

    algorithm: str
    group_size: int | None

    @property
    def block(self) -> int | None:
        return self.group_size if self.algorithm == BLOCK_FP8 else None


def canonical(name: str) -> str:
    """The one spelling under which checkpoint names and vLLM's module names meet.

    `model.language_model.layers.45.x`, `model.layers.45.mtp_block.x` and `language_model.model.layers.45.x`
    are `text.layers.45.x`; `model.visual.merger` is `visual.merger`; any `….lm_head` is `lm_head`.
    """
    if name == "lm_head" or name.endswith(".lm_head"):
        return "lm_head"
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            tower = "visual." if "visual" in prefix else "text."
            return tower + name[len(prefix) :].replace(".mtp_block.", ".", 1)
    return name


class Entries:
    """The manifest's entries under their canonical names. Immutable once made."""

    __slots__ = ("_banks", "_modules")

    def __init__(self, modules: Mapping[str, Entry], banks: Mapping[str, frozenset[Entry]]) -> None:
        self._modules = modules
        self._banks = banks

    @classmethod
    def read(cls, quantized_layers: Mapping[str, Mapping[str, Any]]) -> Self:
        """Raises PatchError where two spellings of one module disagree or a block has no kernel."""
        modules: dict[str, Entry] = {}
        banks: dict[str, set[Entry]] = {}
        for name, fields in quantized_layers.items():
            entry = _entry(name, fields)
            module = canonical(name)
            if modules.setdefault(module, entry) != entry:
                raise PatchError(
                    f"the manifest names {name} twice with different treatment: {modules[module]} and {entry}"
                )
            bank, dot, _ = module.partition(".experts.")
            if dot:
                banks.setdefault(bank + ".experts", set()).add(entry)
        return cls(modules, {bank: frozenset(found) for bank, found in banks.items()})

    @property
    def has_blocks(self) -> bool:
        """Whether any module is block FP8 as this project writes it: only then does the plugin step in."""
        return any(entry.block for entry in self._modules.values())

    def blocks(self) -> frozenset[int]:
        return frozenset(entry.block for entry in self._modules.values() if entry.block)

    def problems(self) -> list[str]:
        """A sentence for each fused module and bank of experts that the manifest treats in two ways."""
        parents = {module.rpartition(".")[0] for module in self._modules}
        found = []
        for prefix in sorted({f"{parent}.{leaf}" for parent in parents for leaf in FUSED} | set(self._banks)):
            try:
                self.find(prefix)
            except PatchError as error:
                found.append(str(error))
        return found

    def find(self, prefix: str) -> Entry | None:
        """The entry of vLLM's module `prefix`, or None where the manifest is silent about it.

        Raises PatchError where the members of a fused module are treated differently or one is missing: the
        module has one kernel and one scale layout, so half of its rows would be decoded wrongly.
        """
        module = canonical(prefix)
        if module in self._modules:
            return self._modules[module]
        parent, _, leaf = module.rpartition(".")
        if leaf in FUSED:
            return self._agreed(prefix, {m: self._modules.get(f"{parent}.{m}") for m in FUSED[leaf]})
        found = self._banks.get(module)
        if found is None:
            return None
        if len(found) > 1:
            raise PatchError(f"the experts of {prefix} are treated differently: {_spell(found)}")
        return next(iter(found))

    @staticmethod
    def _agreed(prefix: str, members: Mapping[str, Entry | None]) -> Entry | None:
        treatments = set(members.values())
        if len(treatments) == 1:
            return treatments.pop()
        told = ", ".join(f"{name} {_say(entry)}" for name, entry in members.items())
        raise PatchError(
            f"{prefix} is one module in vLLM, so its members need one treatment; the manifest says {told}. "
            "Convert or keep all of them together"
        )


def _entry(name: str, fields: Mapping[str, Any]) -> Entry:
    algorithm = str(fields.get("quant_algo", "")).upper()
    size = fields.get("group_size")
    if algorithm == BLOCK_FP8 and size not in BLOCKS:
        raise PatchError(
            f"{name} says {BLOCK_FP8} with group_size {size!r}; expected one of {', '.join(map(str, BLOCKS))}"
        )
    return Entry(algorithm, size if isinstance(size, int) else None)


def _say(entry: Entry | None) -> str:
    return "unquantized" if entry is None else f"{entry.algorithm} [{entry.group_size},{entry.group_size}]"


def _spell(found: frozenset[Entry]) -> str:
    return ", ".join(sorted(_say(entry) for entry in found))
