"""The command recipes."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import click

from shardmill.pipeline.commands.options import json_option, show_json, show_next
from shardmill.pipeline.recipe.shipped import nearest_shipped, purpose, shipped


@click.command()
@click.argument("name", required=False)
@json_option
def recipes(name: str | None, as_json: bool) -> None:
    """List the recipes that come with shardmill, or print the one with NAME, to be copied and changed.

    Example: shardmill recipes qwen3-8b-fp8 > mine.toml
    """
    if name is not None:
        click.echo(_text(name), nl=False)
    elif as_json:
        known = {each: {"file": str(path), "purpose": purpose(path)} for each, path in shipped().items()}
        show_json("recipes", {"recipes": known})
    else:
        _show()


def _text(name: str) -> str:
    if name not in shipped():
        close = nearest_shipped(name)
        raise click.UsageError(
            f"no recipe {name!r} comes with shardmill; "
            + (f"the nearest are {', '.join(close)}" if close else "`shardmill recipes` lists them")
        )
    path = shipped()[name]
    text = path.read_text(encoding="utf-8")
    return re.sub(r'^extends = ".*"', lambda _: _extends(path), text, count=1, flags=re.MULTILINE)


def _extends(path: Path) -> str:
    """The line `extends` of the recipe at `path`, with a name that holds in any folder."""
    base = path.parent / str(tomllib.loads(path.read_text(encoding="utf-8"))["extends"])
    return f"extends = {json.dumps(str(base.resolve()))}"


def _show() -> None:
    for name, path in shipped().items():
        click.echo(f"{name}\n    {purpose(path)}")
    show_next("shardmill", "plan", "-c", "NAME", "--parent", "DIR")
