"""`shardmill toy-parent`: a parent checkpoint to try everything on."""

from __future__ import annotations

from pathlib import Path

import click

from shardmill.pipeline.commands.options import show_next
from shardmill.pipeline.toy.sizes import SIZES


@click.command("toy-parent")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--size",
    "name",
    type=click.Choice(list(SIZES)),
    default="tiny",
    show_default=True,
    help="; ".join(f"{size.name}: {size.purpose}" for size in SIZES.values()) + ".",
)
def toy_parent(folder: Path, name: str) -> None:
    """Make a parent checkpoint in DIR that has the structure of GLM-5.3-Flash's and is made of integers.

    The same size gives the same bytes everywhere. A folder that already holds it whole is left as it is.

    Example: shardmill toy-parent build/toy-parent --size tiny
    """
    from shardmill.pipeline.commands.progress import meter
    from shardmill.pipeline.toy.write import check_folder, is_whole, toy_headers, write_parent

    size = SIZES[name]
    check_folder(folder, size)
    headers = toy_headers(size)
    file_bytes = sum(header.file_bytes for header in headers)
    tensors = sum(len(header.tensors) for header in headers)
    what = f"{folder}: toy parent {name}: {len(headers)} files, {tensors:,} tensors, {file_bytes:,} bytes"
    if is_whole(folder, headers):
        click.echo(f"{what}; already there, nothing to do.")
    else:
        with meter(quiet=False) as progress:
            progress.begin(file_bytes)
            write_parent(folder, size, headers, progress.advance)
        click.echo(f"{what}{', all but the headers holes' if size.sparse else ''}.")
    show_next("shardmill", "plan", "-c", "glm-5.3-flash-fp8", "--parent", str(folder))
