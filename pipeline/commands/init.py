"""The command init."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardmill.pipeline.commands.options import (
    json_option,
    lossless_option,
    renamed_option,
    show_json,
    show_next,
)
from shardmill.pipeline.commands.parent import ParentFolder
from shardmill.pipeline.commands.printable import printable
from shardmill.pipeline.commands.progress import human
from shardmill.pipeline.container.hub import Mirror, place_of
from shardmill.pipeline.errors import PlanError, RecipeError

if TYPE_CHECKING:
    from shardmill.pipeline.init.draft import RecipeDraft

_CACHED = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)/snapshots/(?P<revision>[0-9a-f]{40})$")


@click.command()
@click.argument("parent", metavar="DIR", type=ParentFolder())
@renamed_option(
    "--out",
    "-o",
    old="--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("pipeline.toml"),
    show_default=True,
    help="The recipe to write.",
)
@click.option(
    "--profile",
    type=click.Choice(["fp8", "compressed-tensors", "modelopt-mixed", "modelopt"]),
    help="What the result declares; by default what suits the parent, fp8 for a plain model.",
)
@click.option(
    "--to",
    "aim",
    default="fp8",
    show_default=True,
    metavar="FORMAT",
    help="fp8 (in blocks), bf16 (undoes what is quantized), or a number format: nvfp4, mxfp8, fp8-channel, ...",
)
@click.option(
    "--name", help="The recipe's name; by default the repository's or folder's, and what it becomes."
)
@lossless_option
@click.option("--force", is_flag=True, help="Replace a recipe that exists.")
@json_option
def init(
    parent: Path,
    out: Path,
    profile: str | None,
    aim: Any,
    name: str | None,
    lossless: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Look at the checkpoint in DIR (headers and config alone) and write a recipe for it.

    What converts is counted, what is kept has a reason, and what is not known is kept and named here.

    Example: shardmill init /data/Qwen3-8B -o qwen3-8b.toml && shardmill plan -c qwen3-8b.toml --parent /data/Qwen3-8B
    """
    from shardmill.pipeline.formats import formats
    from shardmill.pipeline.init.doubts import doubts
    from shardmill.pipeline.recipe.tables import Recipe
    from shardmill.pipeline.stages.job import Checkpoint
    from shardmill.pipeline.stages.scan import scan

    known = ["fp8", *(name for name, form in formats().items() if form.encode)]
    if aim not in known:
        raise RecipeError([f"--to {aim}: is no format that can be written; choose from {', '.join(known)}"])
    if out.exists() and not force:
        raise RecipeError([f"{out}: exists already; choose another --out, or give --force to replace it"])
    headers = scan(Checkpoint(Recipe.model_construct(), parent))
    made = _drafted(headers, parent, name, profile, aim, lossless)
    if lossless:
        _refuse_losses(made.text, parent, quiet=as_json)
    out.write_text(made.text, encoding="utf-8")
    (_show_json if as_json else _show)(made, out, parent, [*doubts(headers), *_unread(made, out)])


def _drafted(
    headers: Any, parent: Path, name: str | None, profile: str | None, aim: Any, lossless: bool
) -> RecipeDraft:
    """The draft. Raises PlanError where a name of the parent can stand in no glob."""
    from shardmill.pipeline.init.draft import default_profile, draft

    repository, revision = _origin(parent)
    base = _written((repository or parent.resolve().name).rpartition("/")[2].lower())
    try:
        return draft(
            headers,
            _written(name or f"{base}-{aim}"),
            profile or default_profile(headers, aim),
            aim,
            repository,
            revision,
            must_convert=True,
            lossless=lossless,
        )
    except (ValueError, IndexError) as error:
        odd = next(
            (name for name in headers.tensors if set(name) & set("{}*") or not name.isprintable()), "?"
        )
        sentence = (
            f"{parent}: no recipe can be drafted ({type(error).__name__}): a name such as {odd!r} means something else "
            f"in a glob, or does not print; write the recipe by hand, with `*` in its place"
        )
        raise PlanError([sentence]) from None


def _refuse_losses(text: str, parent: Path, quiet: bool) -> None:
    """Plans the draft and counts its blocks. Raises PlanError with every family of which one loses something."""
    from shardmill.pipeline.commands.plan import refuse_losses
    from shardmill.pipeline.recipe.tables import Recipe
    from shardmill.pipeline.run.prepare import prepare

    refuse_losses(prepare(Recipe.model_validate(tomllib.loads(text)), parent), quiet)


def _written(name: str) -> str:
    """A name as a recipe can hold it: a folder's may have letters that are no UTF-8, or do not print."""
    return "".join(sign if sign.isprintable() else "-" for sign in name)


def _origin(parent: Path) -> tuple[str | None, str | None]:
    """The repository and commit that a folder holds, where it says so: a hub's sparse mirror or cache."""
    if mirror := Mirror.of(parent):
        return mirror.repository, parent.name
    cached = _CACHED.search(parent.absolute().as_posix())
    return (f"{cached['org']}/{cached['name']}", cached["revision"]) if cached else (None, None)


def _show_json(made: Any, out: Path, parent: Path, warnings: Sequence[str]) -> None:
    families = {family.name: [family.action, family.tensors, family.reason] for family in made.plan.families}
    facts = {
        "recipe": str(out),
        "families": families,
        "unknown": list(made.unknown),
        "warnings": list(warnings),
        "tensor_bytes": made.plan.tensor_bytes,
        "loads_at": {str(at.tensor_parallel): at.reason or "yes" for at in made.plan.loads},
    }
    show_json("init", facts)


def _unread(made: RecipeDraft, out: Path) -> list[str]:
    """What stops the draft's plan until a person decides."""
    if not made.unread:
        return []
    sentence = (
        f"plan refuses this recipe as it is: {made.unread}; if transformers need not read the result, remove the # "
        f"before `loaders` in {out}; else draft with another --profile or --to"
    )
    return [sentence]


def _largest_left(made: Any) -> str:
    kept = max(
        (f for f in made.plan.families if f.action == "keep"), key=lambda f: f.bytes_before, default=None
    )
    return f"; the largest family that stays is {kept.name!r}, {human(kept.bytes_before)}" if kept else ""


def _show(made: Any, out: Path, parent: Path, warnings: Sequence[str]) -> None:
    plan = made.plan
    before = sum(family.bytes_before for family in plan.families)
    click.echo(
        f"{out}, profile {made.profile}: {len(plan.conversions):,} weights convert, {made.share:.0%} of the bytes; "
        f"{human(before)} become {human(plan.tensor_bytes)}{_largest_left(made)}"
    )
    for family in plan.families:
        why = f": {family.reason}" if family.reason else ""
        click.echo(f"  {family.action:10} {family.tensors:7,}  {family.name}{why}")
    sizes = [str(at.tensor_parallel) for at in plan.loads if at.reason is None]
    click.echo(f"loads at tensor-parallel size {', '.join(sizes) or 'none'}")
    for at in plan.loads:
        if at.reason:
            click.echo(f"  not at {at.tensor_parallel}: {at.reason}")
    if made.unknown:
        click.echo("not known, and so kept; a person may know better:")
        for glob in made.unknown:
            click.echo(f"  {glob}")
    for sentence in warnings:
        click.echo(f"warning: {printable(sentence)}")
    show_next("shardmill", "plan", "-c", str(out), "--parent", place_of(parent))
