"""`verify attested`: the command."""

from __future__ import annotations

from pathlib import Path

import click

from shardmill.verify.commands.output import Output, answer, output_options
from shardmill.verify.reading.source import Folder

_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("attested")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("verdicts", metavar="VERDICT...", type=_file, nargs=-1, required=True)
@click.option(
    "--public-key",
    "keys",
    required=True,
    multiple=True,
    type=_file,
    metavar="PEM",
    help="The key of one whose word counts; may be given more than once.",
)
@output_options
def attested_command(
    folder: Path, verdicts: tuple[Path, ...], keys: tuple[Path, ...], output: Output
) -> None:
    """Who vouches for what about the files in DIR? Each VERDICT is a file that --attest wrote.

    \b
    Example: shardmill verify attested build/checkpoint all.verdict.json --public-key judge.pub
    """
    try:
        from shardmill.verify.questions.attestation import attested
        from shardmill.verify.questions.dsse import KeyFileError

        try:
            report = attested(folder, list(verdicts), list(keys))
        except KeyFileError as error:
            raise click.UsageError(str(error)) from None
    except ImportError as error:
        raise click.UsageError(f"needs cryptography ({error}); `pip install cryptography`.") from None
    answer(report, output, Folder(folder))
