"""`verify sign` and `verify signature`: the commands."""

from __future__ import annotations

from pathlib import Path

import click

from shardmill.verify.commands.options import answer, as_json
from shardmill.verify.questions.signature import SigningError, check_signature, sign

_folder = click.argument(
    "folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
_key = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("sign")
@_folder
@click.option(
    "--private-key", required=True, type=_key, metavar="PEM", help="An elliptic-curve key (P-256, 384, 521)."
)
@click.option(
    "--password", envvar="SHARDMILL_KEY_PASSWORD", help="Of the key; better in SHARDMILL_KEY_PASSWORD."
)
@as_json
def sign_command(folder: Path, private_key: Path, password: str | None, as_json: bool) -> None:
    """Sign every published file in DIR, with a provenance statement.

    \b
    Example: shardmill verify sign build/checkpoint --private-key publisher.pem
    """
    try:
        report = sign(folder, private_key, password)
    except SigningError as error:
        raise click.UsageError(str(error)) from None
    answer(report, as_json)


@click.command("signature")
@_folder
@click.option(
    "--public-key", required=True, type=_key, metavar="PEM", help="The publisher's, got by another way."
)
@as_json
def signature_command(folder: Path, public_key: Path, as_json: bool) -> None:
    """Are the files in DIR those that the owner of a key signed?

    \b
    Example: shardmill verify signature build/checkpoint --public-key publisher.pub
    """
    try:
        report = check_signature(folder, public_key)
    except SigningError as error:
        raise click.UsageError(str(error)) from None
    answer(report, as_json)
