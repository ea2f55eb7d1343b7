"""The commands delta and apply."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shardmill.pipeline.commands.options import json_option, out_option, show_json
from shardmill.pipeline.commands.progress import counted, human

_CHECKPOINT = click.Path(path_type=Path, file_okay=False, exists=True)


@click.command()
@click.argument("old", type=_CHECKPOINT)
@click.argument("new", type=_CHECKPOINT)
@out_option("Folder that the delta is written as; it must not exist, or be empty.")
@json_option
def delta(old: Path, new: Path, out: Path, as_json: bool) -> None:
    """Write what turns the checkpoint OLD into NEW: whole small files, and the tensors that OLD lacks.

    Example: shardmill delta /data/child-1 /data/child-2 --out /data/1-to-2
    """
    from shardmill.pipeline.delta.write import write_delta

    written = write_delta(old, new, out)
    files, changes = written.delta.files, written.delta.changes
    ways = {
        how: sum(file.how == how for file in files.values()) for how in ("same", "whole", "patch", "shard")
    }
    facts: dict[str, Any] = {
        "out": str(out),
        "bytes": written.bytes,
        "new_bytes": sum(file.bytes for file in files.values()),
        "files": ways,
        **asdict(changes),
    }
    if as_json:
        show_json("delta", facts)
        return
    click.echo(
        f"{out}: {human(written.bytes)} for a checkpoint of {human(facts['new_bytes'])}: "
        f"{counted(ways['same'], 'file')} unchanged, {ways['shard']} made of tensors, "
        f"{ways['whole'] + ways['patch']} sent"
    )
    click.echo(
        f"tensors: {len(changes.changed):,} changed, {len(changes.added):,} added, {len(changes.removed):,} removed, "
        f"{len(changes.renamed or ()):,} renamed"
    )
    for name in changes.removed_files:
        click.echo(f"removed: {name}")
    for before, after in (changes.renamed_files or {}).items():
        click.echo(f"renamed: {before} -> {after}")


@click.command("apply")
@click.argument("old", type=_CHECKPOINT)
@click.argument("delta_folder", metavar="DELTA", type=_CHECKPOINT)
@out_option("Folder that the new checkpoint is written as; it must not exist, or be empty.")
@click.option(
    "--passthrough",
    type=click.Choice(["copy", "reflink", "hardlink"]),
    default="hardlink",
    show_default=True,
    help="How an unchanged file is passed on; copied where the file systems can't. A hard link is OLD's own file: "
    "editing one edits both.",
)
@json_option
def apply_command(old: Path, delta_folder: Path, out: Path, passthrough: Any, as_json: bool) -> None:
    """Make exactly the checkpoint that DELTA was made for, from OLD; every file is proven by its manifest.

    Example: shardmill apply /data/child-1 /data/1-to-2 --out /data/child-2
    """
    from shardmill.pipeline.delta.apply import apply_delta

    applied = apply_delta(old, delta_folder, out, passthrough)
    if as_json:
        show_json("apply", {"out": str(out), **asdict(applied)})
        return
    click.echo(
        f"made {out}: {human(applied.bytes)}, {counted(applied.made, 'file')} made, {applied.linked} linked, "
        f"{applied.copied} copied; every file is what its manifest states"
    )
