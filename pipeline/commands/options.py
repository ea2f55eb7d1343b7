"""The options that several commands share, and how they print JSON. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from shardmill.pipeline.commands.parent import NamedFolder, ParentFolder
from shardmill.pipeline.commands.printable import printable

F = TypeVar("F", bound=Callable[..., Any])

parent_option = click.option(
    "--parent",
    type=ParentFolder(),
    required=True,
    help="Folder of the parent checkpoint, or hf://org/repo@revision.",
)
source_option = click.option(
    "--source",
    "sources",
    type=NamedFolder(),
    multiple=True,
    help="Where a [[source]] of the recipe is; may be given for each.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
lossless_option = click.option(
    "--lossless",
    is_flag=True,
    help="Count every block of every conversion, and refuse where one does not decode to the parent's numbers.",
)
paranoid_option = click.option(
    "--paranoid", is_flag=True, help="Ignore cached file stats and re-hash everything."
)


def renamed_option(new: str, *letters: str, old: str, **settings: Any) -> Callable[[F], F]:
    """An option `new` of a path. Its `old` name works for one more release, hidden from --help, with a notice."""
    name = new.removeprefix("--")
    kept = f"shardmill.{name}"

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            tell(f"{old} is now called {new}; the old name works for one more release")
            ctx.meta[kept] = value

    def choose(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        value = ctx.meta.get(kept, value)
        if value is None and settings.get("required"):
            raise click.MissingParameter(ctx=ctx, param=param)
        return value

    # Eager options are read first, so that `choose` knows what `keep` has kept.
    shown = {key: value for key, value in settings.items() if key != "required"}
    main = click.option(*letters, new, name, callback=choose, **shown)
    hidden = click.option(
        old, type=settings["type"], hidden=True, expose_value=False, is_eager=True, callback=keep
    )
    return lambda command: main(hidden(command))


class RecipeFile(click.ParamType):  # type: ignore[type-arg]  # no generic before click 8.2
    """A recipe's file, or the name of one that comes with shardmill. A file of that name comes first."""

    name = "file|name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if path.is_dir():
            self.fail(f"{path}: is a directory; name the recipe's TOML file", param, ctx)
        if path.exists() or path.suffix == ".toml" or path.name != str(value):
            return path
        from shardmill.pipeline.recipe.shipped import nearest_shipped, shipped

        if str(value) in shipped():
            return shipped()[str(value)]
        close = nearest_shipped(str(value))
        return self.fail(
            f"{value}: is no file, and no recipe of that name comes with shardmill; "
            + (f"the nearest are {', '.join(close)}" if close else "`shardmill recipes` lists them"),
            param,
            ctx,
        )


recipe_option = renamed_option(
    "--recipe",
    "-c",
    old="--config",
    type=RecipeFile(),
    default=Path("pipeline.toml"),
    show_default=True,
    help="The recipe: a TOML file, or a name that `shardmill recipes` lists.",
)


def out_option(
    help: str = "Folder that the checkpoint is built in.", required: bool = True
) -> Callable[[F], F]:
    folder = click.Path(path_type=Path, file_okay=False)
    return click.option("-o", "--out", type=folder, required=required, help=help)


def show_json(kind: str, facts: dict[str, Any]) -> None:
    """Prints `facts` as every command prints JSON; its form, docs/schemas/KIND-1.json, is named first."""
    click.echo(json.dumps({"format": f"shardmill/{kind}/1", **facts}, indent=2))


def tell(line: str) -> None:
    """A note for people on standard error; nothing under `-q`."""
    if not is_quiet():
        click.echo(printable(line), err=True)


def teller() -> Callable[[str], None]:
    """A `tell` for other threads, which do not know what the user gave."""
    quiet = is_quiet()
    return lambda line: None if quiet else click.echo(printable(line), err=True)


def is_quiet() -> bool:
    """Whether the user gave `shardmill -q`."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().params.get("quiet"))


def show_next(*words: str) -> None:
    """The command that most people give next; not under `-q`."""
    if not is_quiet():
        click.echo(f"Next:  {' '.join(map(_quoted, words))}")


def _quoted(word: str) -> str:
    """As a shell reads it; a file's name that is no UTF-8 by its bytes."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return "$'" + "".join(f"\\x{byte:02x}" for byte in os.fsencode(word)) + "'"
    return shlex.quote(word)
