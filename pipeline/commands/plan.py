"""The command plan."""

from __future__ import annotations

import secrets
import shlex
import shutil
from pathlib import Path
from typing import Any

import click

from shardmill.pipeline.commands.options import (
    json_option,
    lossless_option,
    out_option,
    parent_option,
    recipe_option,
    show_json,
    source_option,
)
from shardmill.pipeline.commands.progress import meter
from shardmill.pipeline.commands.recipe import parent_words, planned
from shardmill.pipeline.container.hub import Mirror
from shardmill.pipeline.errors import PlanError
from shardmill.pipeline.plan.facts import plan_json
from shardmill.pipeline.recipe.shipped import is_shipped
from shardmill.pipeline.run.place import refuse_out
from shardmill.pipeline.run.probe import Probed, probe
from shardmill.pipeline.stages.job import Prepared, Settings, Watch

_SEED_BITS = 32  # enough that nobody can foresee the draw, few enough to type


@click.command()
@recipe_option
@parent_option
@source_option
@out_option(
    "Folder that a build would write; for the free disk, and whether a build can go there.", required=False
)
@click.option(
    "--probe", "probing", is_flag=True, help="Sample blocks: which families are copies of native FP8?"
)
@lossless_option
@click.option(
    "--seed", type=click.IntRange(0), help="Draw the blocks of --probe again, as a seed that it printed says."
)
@json_option
def plan(
    recipe: Path,
    parent: Path,
    sources: tuple[tuple[str, Path], ...],
    out: Path | None,
    probing: bool,
    lossless: bool,
    seed: int | None,
    as_json: bool,
) -> None:
    """What a build would make, from headers alone.

    Example: shardmill plan -c pipeline.toml --parent /data/parent --out /data/out
    """
    if seed is not None and not probing:
        raise click.UsageError("--seed is for --probe")
    prepared = planned(recipe, parent, sources=sources)
    if out is not None:
        refuse_out(parent, out)
    if lossless:
        refuse_losses(prepared, quiet=as_json)
    facts = plan_json(prepared.plan, prepared.parent)
    if out is not None:
        facts["disk"] = {"needed": prepared.plan.file_bytes, "free": _free(out)}
    if Mirror.of(parent):
        facts["upload"] = _upload(prepared)
    drawn = secrets.randbits(_SEED_BITS) if seed is None else seed
    probed: list[Probed] = probe(prepared.plan, prepared.parent, drawn) if probing else []
    if probing:
        facts["seed"] = drawn
        facts["probe"] = list(map(_sampled, probed))
    if as_json:
        show_json("plan", facts)
    else:
        from shardmill.pipeline.commands.plan_text import show_plan  # rich takes 0.05 s, which no JSON needs

        show_plan(prepared.plan.recipe, facts)
        for line in probed:
            click.echo(str(line))
        if probed:
            click.echo(f"sampled by seed {drawn}; the same blocks again: --probe --seed {drawn}")
        name = prepared.plan.recipe if is_shipped(recipe) else str(recipe)
        words = ["shardmill", "build", "-c", name, *parent_words(parent, dict(sources))]
        words += ["--out", str(out) if out else "OUT"]
        click.echo(f"Next:  {shlex.join(words)}")


def _sampled(probed: Probed) -> dict[str, Any]:
    return {
        "family": probed.family,
        "block": [probed.block.rows, probed.block.cols],
        "sampled": probed.sampled,
        "exact": probed.exact,
    }


def refuse_losses(prepared: Prepared, quiet: bool) -> None:
    """Reads what converts. Raises PlanError with every family of which a block loses something."""
    from shardmill.pipeline.run.lossless import problems

    with meter(quiet=quiet) as progress:
        progress.begin(sum(prepared.parent.tensors[name].bytes for name in prepared.plan.converted_from))
        if found := problems(prepared, Settings(lossless=True), Watch(progress.advance)):
            raise PlanError(found)


def _upload(prepared: Prepared) -> dict[str, int]:
    """Bytes of shards that `publish` would send, where the hub copies the parent's, and of all of them."""
    rewritten = [shard.header.file_bytes for shard in prepared.plan.shards if shard.rewritten]
    return {"bytes": sum(rewritten), "of": prepared.plan.file_bytes}


def _free(out: Path) -> int:
    place = out.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
