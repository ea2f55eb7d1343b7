"""The child's README: where it comes from, by which recipe, and what was changed. Derived from the plan alone."""

from __future__ import annotations

from collections.abc import Sequence

from shardmill.pipeline.actions import ACTIONS
from shardmill.pipeline.container.card import items
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.types import FamilySummary, Parent

_SERVED = ("ForCausalLM", "ForConditionalGeneration")


def child_readme(
    recipe: Recipe,
    parent: Parent,
    families: Sequence[FamilySummary],
    key: str,
    rewritten: Sequence[str],
    files: int,
) -> bytes:
    """README.md of the built checkpoint; holds no time, host or path, so equal plans give equal bytes."""
    repository = recipe.parent.repository or "a local checkpoint (no repository is named in the recipe)"
    revision = recipe.parent.revision or "not pinned"
    lines = [
        "---",
        *_front(recipe, parent, families),
        "---",
        "",
        f"# {recipe.name}",
        "",
        f"Made by shardmill from {repository}, revision {revision}, by the recipe `{recipe.name}`.",
        _rewritten(len(rewritten), files),
        *_sources(recipe, parent),
        "shardmill rewrites published safetensors checkpoints and proves what it wrote.",
        "",
        *_loading(parent),
        "## What was done",
        "",
        "| family | tensors | action | block | bytes before | bytes after | scale bytes |",
        "|---|---:|---|---|---:|---:|---:|",
        *(_row(family) for family in families if family.tensors),
        "",
        "Why the rest was kept:",
        "",
        *(f"- {family.name}: {family.reason}" for family in families if family.reason and family.tensors),
        "",
        f"Plan key: `{key}`. `shardmill.manifest.json` holds the digest of every file and tensor; check them with",
        "`shardmill verify integrity .`. No quality was measured: `shardmill verify accept` compares served models.",
        "",
    ]
    return "\n".join(lines).encode()


def _front(recipe: Recipe, parent: Parent, families: Sequence[FamilySummary]) -> list[str]:
    """The card's front matter: the parent's licence, languages and tags, and what the child is."""
    quantized = any(ACTIONS[family.action].encodes and family.tensors for family in families)
    front = []
    if recipe.parent.repository:
        front.append(f"base_model: {recipe.parent.repository}")
        front += ["base_model_relation: quantized"] if quantized else []
    kept = dict(parent.card)
    tags = items(kept.pop("tags", "tags:"))
    ours = ["fp8", "shardmill"] if quantized else ["shardmill"]
    known = "transformers" if "model_type" in parent.config else "safetensors"
    library = kept.pop("library_name", f"library_name: {known}")
    tags = list(dict.fromkeys([*tags, *ours]))
    return [*front, *kept.values(), library, f"tags: [{', '.join(tags)}]"]


def _sources(recipe: Recipe, parent: Parent) -> list[str]:
    """A line for each checkpoint beside the parent."""
    return [
        f"{sum(origin.source == table.name for origin in parent.origins.values()):,} tensors come from "
        f"{table.repository or f'another checkpoint ({table.name})'}"
        + (f", revision {table.revision}." if table.revision else ", not pinned.")
        for table in recipe.source
    ]


def _rewritten(rewritten: int, files: int) -> str:
    if rewritten == files:
        return "Its weight file was rewritten." if files == 1 else f"All {files} weight files were rewritten."
    return f"{rewritten} of {files} weight files were rewritten; the others are the parent's, byte for byte."


def _loading(parent: Parent) -> list[str]:
    """How to load it: vLLM's command, where the model generates text."""
    architectures = parent.config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if not any(isinstance(name, str) and name.endswith(_SERVED) for name in names):
        return []
    code = " --trust-remote-code" if "auto_map" in parent.config else ""
    return [
        "## How to load it",
        "",
        f"    vllm serve FOLDER{code}",
        "",
        "config.json declares what is quantized. `shardmill verify loads .` says which loaders take every tensor.",
        "",
    ]


def _row(family: FamilySummary) -> str:
    block = f"[{family.block[0]},{family.block[1]}]" if family.block else ""
    return (
        f"| {family.name} | {family.tensors:,} | {family.action} | {block} "
        f"| {family.bytes_before:,} | {family.bytes_after:,} | {family.scale_bytes:,} |"
    )
