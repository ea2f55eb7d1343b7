"""The command pin."""

from __future__ import annotations

from pathlib import Path

import click

from shardmill.pipeline.commands.options import (
    json_option,
    parent_option,
    recipe_option,
    show_json,
    source_option,
)
from shardmill.pipeline.commands.progress import human
from shardmill.pipeline.commands.recipe import load_recipe
from shardmill.pipeline.container.atomic import write_whole
from shardmill.pipeline.manifest.lock import lock_facts, lock_path
from shardmill.pipeline.recipe.shipped import is_shipped
from shardmill.pipeline.run.pin import pin as make_lock
from shardmill.pipeline.run.pin_built import read_by_build
from shardmill.pipeline.run.prepare import prepare


@click.command()
@recipe_option
@parent_option
@source_option
@click.option("--read-all", is_flag=True, help="Compute every digest, even where the download noted one.")
@click.option(
    "--built",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Take what the build in DIR has read of this parent, and read it not again: a sha256 of what was passed on, "
    "of other shards a digest that is not cryptographic.",
)
@json_option
def pin(
    recipe: Path,
    parent: Path,
    sources: tuple[tuple[str, Path], ...],
    read_all: bool,
    built: Path | None,
    as_json: bool,
) -> None:
    """Write the parent's lock file beside the recipe: size and sha256 of each file.

    Later plans and builds hold their parent to it. Commit it with the recipe.

    Example: shardmill pin -c pipeline.toml --parent /data/parent
    """
    if is_shipped(recipe):
        raise click.UsageError(
            "a lock goes beside your own recipe; copy this one first: shardmill recipes NAME > mine.toml"
        )
    if built and read_all:
        raise click.UsageError("--built reads nothing again and --read-all reads all; leave one out")
    loaded = load_recipe(recipe)
    prepared = prepare(loaded, parent, sources=dict(sources))
    lock = make_lock(
        prepared.parent,
        prepared.checkpoint.recipe,
        lambda line: None if as_json else click.echo(line, err=True),
        read_all,
        read_by_build(built, prepared) if built else None,
    )
    path = lock_path(recipe)
    write_whole(path, lock.to_json())
    facts = lock_facts(lock)
    if as_json:
        show_json("pin", {"lock": str(path), **facts})
    else:
        click.echo(f"pinned {facts['files']} files, {human(facts['bytes'])}, in {path}")
        if facts["without_sha256"]:
            click.echo(
                f"{facts['without_sha256']} of them by xxh3 alone, which is not cryptographic: the build rewrote them"
            )
