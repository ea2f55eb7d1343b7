"""The child's README: where it comes from, by which recipe, and what was changed. Derived from the plan alone."""

from __future__ import annotations

from collections.abc import Sequence

from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.types import FamilySummary


def child_readme(
    recipe: Recipe, families: Sequence[FamilySummary], key: str, rewritten: Sequence[str], files: int
) -> bytes:
    """README.md of the built checkpoint; holds no time, host or path, so equal plans give equal bytes."""
    repository = recipe.parent.repository or "a local checkpoint (no repository is named in the recipe)"
    revision = recipe.parent.revision or "not pinned"
    front = [f"base_model: {recipe.parent.repository}"] if recipe.parent.repository else []
    lines = [
        "---",
        *front,
        "library_name: safetensors",
        "tags: [fp8, shardmill]",
        "---",
        "",
        f"# {recipe.name}",
        "",
        f"Made by shardmill from {repository}, revision {revision}, by the recipe `{recipe.name}`.",
        f"{len(rewritten)} of {files} weight files were rewritten; the others are the parent's, byte for byte.",
        "",
        "| family | tensors | done | block | bytes before | bytes after | scale bytes |",
        "|---|---:|---|---|---:|---:|---:|",
        *(_row(family) for family in families if family.tensors),
        "",
        "Why the rest was kept:",
        "",
        *(f"- {family.name}: {family.reason}" for family in families if family.reason and family.tensors),
        "",
        f"Plan key: `{key}`. `shardmill.manifest.json` holds the digest of every file and tensor; check them with",
        "`shardmill verify integrity .`.",
        "",
    ]
    return "\n".join(lines).encode()


def _row(family: FamilySummary) -> str:
    block = f"[{family.block[0]},{family.block[1]}]" if family.block else ""
    return (
        f"| {family.name} | {family.tensors} | {family.action} | {block} "
        f"| {family.bytes_before} | {family.bytes_after} | {family.scale_bytes} |"
    )
