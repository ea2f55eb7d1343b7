"""`verify sbom`: the command."""

from __future__ import annotations

from pathlib import Path

import click

from shardmill.verify.questions.bill_of_materials import bill_of_materials
from shardmill.verify.reading.atomic import write_whole


@click.command("sbom")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write it.  [default: standard output]",
)
def sbom_command(folder: Path, out: Path | None) -> None:
    """Write what the checkpoint in DIR consists of as a CycloneDX 1.6 bill of materials (JSON).

    It names every file with its sha256, the parent, the licence, and each group of tensors with its number format.

    \b
    Example: shardmill verify sbom build/checkpoint -o checkpoint.cdx.json
    """
    text, faults = bill_of_materials(folder)
    if faults:
        raise click.ClickException(
            f"{folder}: {faults[0].file}: {faults[0].rule.sentence} `shardmill verify integrity` says more."
        )
    if out is None:
        click.echo(text)
        return
    if out.resolve().is_relative_to(folder.resolve()):
        raise click.UsageError(f"--out {out} is inside the checkpoint, whose files it lists; choose another.")
    try:
        write_whole(out, (text + "\n").encode())
    except OSError as error:
        raise click.UsageError(f"{out}: can't be written: {error.strerror}; choose another --out.") from None
