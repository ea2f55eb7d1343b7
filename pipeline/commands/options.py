"""The options that several commands share, and the plan that they begin with."""

from __future__ import annotations

from pathlib import Path

import click

from shardmill.pipeline.commands.parent import ParentFolder
from shardmill.pipeline.manifest.lock import load_lock, lock_path
from shardmill.pipeline.recipe import read as recipes
from shardmill.pipeline.run.prepare import prepare
from shardmill.pipeline.stages.job import Prepared

recipe_option = click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("pipeline.toml"),
    show_default=True,
    help="The recipe.",
)
parent_option = click.option(
    "--parent",
    type=ParentFolder(),
    required=True,
    help="Folder of the parent checkpoint, or hf://org/repo@revision.",
)
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder that the checkpoint is built in.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
paranoid_option = click.option(
    "--paranoid", is_flag=True, help="Believe no file's stat: hash everything again."
)


def planned(config: Path, parent: Path, paranoid: bool = False) -> Prepared:
    """The plan of the recipe at `config` for `parent`, held to the lock beside the recipe."""
    return prepare(recipes.load(config), parent, load_lock(lock_path(config)), paranoid)


def tell(line: str) -> None:
    click.echo(line, err=True)
