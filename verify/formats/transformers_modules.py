"""What transformers 5.24 builds of an architecture, as tables: its Linears, its banks of experts, its names in memory.

A published checkpoint and the model in memory often name a module differently; an exclusion list is matched against
one of the two. Rows are held to the real transformers by `make loaders-test`. `#` stands for a layer's or a block's
number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

Renames = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model class. Names are those in memory; `renames` lead to them from a checkpoint's prefix."""

    types: tuple[str, ...]  # model_type values
    linears: tuple[str, ...]  # every torch.nn.Linear
    renames: Renames = ()
    bank: str = ""  # experts as one module of two stacked parameters, "" where there are none
    bank_biased: bool = False  # its FP8 form is refused
    subclassed: tuple[
        str, ...
    ] = ()  # of `linears`, those of a subclass of torch.nn.Linear, which `fp8` leaves alone
    kept: tuple[
        str, ...
    ] = ()  # ends of names that the class keeps in F32, which `fp8` then excludes, listed or not
    draft: str = ""  # prefix of layers that it drops: those of the draft model

    def name(self, published: str) -> str:
        """A checkpoint's name of a module or parameter, as the model in memory has it."""
        for old, new in self.renames:
            if old.startswith("."):
                published = published.replace(old, new)
            elif published.startswith(old):
                published = new + published[len(old) :]
                break
        return published


ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
MLA = (
    "self_attn.q_proj",
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_b_proj",
    "self_attn.o_proj",
)
INDEXER = tuple(f"self_attn.indexer.{part}" for part in ("wq_b", "wk", "weights_proj"))
SHARED = tuple(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down"))
SHARED_GATED = (
    *(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")),
    "mlp.shared_expert_gate",
)
DELTA_NET = tuple(f"linear_attn.{part}" for part in ("in_proj_qkvz", "in_proj_ba", "out_proj"))
BANK = "model.layers.#.mlp.experts"


def _decoder(*inner: str, prefix: str = "model.") -> tuple[str, ...]:
    return (*(f"{prefix}layers.#.{name}" for name in inner), "lm_head")


def _tower(prefix: str, *inner: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in inner)


LLAVA: Renames = (
    ("language_model.lm_head", "lm_head"),
    ("language_model.model.", "model.language_model."),
    ("vision_tower.vision_model.", "model.vision_tower."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
SIGLIP = _tower(
    "model.vision_tower.",
    *(f"encoder.layers.#.self_attn.{part}_proj" for part in ("q", "k", "v", "out")),
    *("encoder.layers.#.mlp.fc1", "encoder.layers.#.mlp.fc2"),
    *("head.attention.out_proj", "head.mlp.fc1", "head.mlp.fc2"),
)
PIXTRAL = _tower(
    "model.vision_tower.transformer.layers.#.",
    *(f"attention.{part}_proj" for part in "qkvo"),
    *(f"feed_forward.{part}_proj" for part in ("gate", "up", "down")),
)
QWEN_BLOCKS = _tower("model.visual.blocks.#.", "attn.qkv", "attn.proj")

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        (
            *("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
            *("cohere", "cohere2", "granite", "olmo2", "smollm3", "seed_oss"),
        ),
        _decoder(*ATTENTION, *MLP),
    ),
    Architecture(
        ("phi3",), _decoder("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    ),
    Architecture(("glm4",), _decoder(*ATTENTION, "mlp.gate_up_proj", "mlp.down_proj")),
    Architecture(
        ("mixtral", "minimax_m2"),
        _decoder(*ATTENTION),
        ((".block_sparse_moe.", ".mlp."),),
        BANK,
    ),
    Architecture(("qwen2_moe",), _decoder(*ATTENTION, *MLP, *SHARED_GATED), bank=BANK),
    Architecture(("qwen3_moe",), _decoder(*ATTENTION, *MLP), bank=BANK),
    Architecture(
        ("qwen3_next",), _decoder(*ATTENTION, *DELTA_NET, *MLP, *SHARED_GATED), bank=BANK, draft="mtp."
    ),
    Architecture(
        ("deepseek_v2", "deepseek_v3", "kimi_k2"),
        _decoder(*MLA, *MLP, *SHARED),
        bank=BANK,
        draft="model.layers.",
    ),
    Architecture(
        ("deepseek_v32", "glm_moe_dsa"),
        _decoder(*MLA, *INDEXER, *MLP, *SHARED),
        bank=BANK,
        kept=("indexer.weights_proj",),
        draft="model.layers.",
    ),
    Architecture(("glm4_moe",), _decoder(*ATTENTION, *MLP, *SHARED), bank=BANK, draft="model.layers."),
    Architecture(
        ("granitemoe",),
        _decoder(*ATTENTION),
        (
            (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
            (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
            (".block_sparse_moe.router.layer.", ".block_sparse_moe.router."),
        ),
        "model.layers.#.block_sparse_moe.experts",
    ),
    Architecture(("gpt_oss",), _decoder(*ATTENTION), bank=BANK, bank_biased=True),
    Architecture(
        ("gemma3",),
        (*_decoder(*ATTENTION, *MLP, prefix="model.language_model."), *SIGLIP),
        LLAVA,
        subclassed=("model.vision_tower.head.attention.out_proj",),
    ),
    Architecture(
        ("mistral3",),
        (
            *_decoder(*ATTENTION, *MLP, prefix="model.language_model."),
            *PIXTRAL,
            *_tower("model.multi_modal_projector.", "linear_1", "linear_2", "patch_merger.merging_layer"),
        ),
        LLAVA,
    ),
    Architecture(
        ("qwen2_5_vl",),
        (
            *_decoder(*ATTENTION, *MLP, prefix="model.language_model."),
            *QWEN_BLOCKS,
            *_tower("model.visual.blocks.#.", *MLP),
            "model.visual.merger.mlp.#",
        ),
        (
            ("model.language_model.", "model.language_model."),
            ("model.visual.", "model.visual."),
            ("visual.", "model.visual."),
            ("model.", "model.language_model."),
        ),
    ),
    Architecture(
        ("qwen3_vl",),
        (
            *_decoder(*ATTENTION, *MLP, prefix="model.language_model."),
            *QWEN_BLOCKS,
            *_tower("model.visual.blocks.#.", "mlp.linear_fc1", "mlp.linear_fc2"),
            *_tower("model.visual.merger.", "linear_fc1", "linear_fc2"),
            *_tower("model.visual.deepstack_merger_list.#.", "linear_fc1", "linear_fc2"),
        ),
    ),
)

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_EXPERT = re.compile(r"^(.*\.experts)\.\d+\.(\w+?)\.(\w+)$")
_STACKED = re.compile(r"^(.*\.experts)\.((?:gate_up|down)_proj)(_\w+)?$")
BANK_PARTS = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "w2": "down_proj",
}


def architecture_of(model_type: object) -> Architecture | None:
    return next((row for row in ARCHITECTURES if model_type in row.types), None)


def template(name: str) -> str:
    """A name with `#` for each number."""
    return _NUMBER.sub("#", name)


def parameter(row: Architecture, tensor: str) -> tuple[str, str, str]:
    """(module in memory, part, leaf) of a tensor. Of a bank the part is its stacked parameter, else "".

    `model.layers.0.mlp.experts.3.up_proj.weight` is the leaf `weight` of the part `gate_up_proj` of its bank.
    """
    name = row.name(tensor)
    if row.bank:
        for found in _bank_names(name):
            if template(found[0]) == row.bank:
                return found
    module, _, leaf = name.rpartition(".")
    return module, "", leaf


def _bank_names(name: str) -> Iterator[tuple[str, str, str]]:
    single = _EXPERT.match(name)
    if single and single[2] in BANK_PARTS:
        yield single[1], BANK_PARTS[single[2]], single[3]
    stacked = _STACKED.match(name)
    if stacked:
        yield stacked[1], stacked[2], f"weight{stacked[3] or ''}"
