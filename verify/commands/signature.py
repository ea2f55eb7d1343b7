"""`verify sign` and `verify signature`: the commands."""

from __future__ import annotations

from pathlib import Path

import click

from shardmill.verify.commands.output import Output, answer, output_options
from shardmill.verify.questions.signature import check_signature, sign
from shardmill.verify.questions.signers import (
    Believed,
    Identity,
    KeyFile,
    PublicKey,
    Signer,
    SigningError,
    Token,
    Verifier,
)
from shardmill.verify.reading.source import Folder

_folder = click.argument(
    "folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
_key = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("sign")
@_folder
@click.option("--private-key", type=_key, metavar="PEM", help="An elliptic-curve key (P-256, 384, 521).")
@click.option(
    "--password", envvar="SHARDMILL_KEY_PASSWORD", help="Of the key; better in SHARDMILL_KEY_PASSWORD."
)
@click.option("--pkcs11", metavar="URI", help="A key in a hardware token: pkcs11:token=...;object=...")
@click.option(
    "--keyless", is_flag=True, help="Sign as who you are, by Sigstore: it opens a browser to log in."
)
@click.option("--ambient", is_flag=True, help="With --keyless: the identity that a CI job has.")
@click.option(
    "--identity-token", envvar="SIGSTORE_ID_TOKEN", metavar="JWT", help="With --keyless: from elsewhere."
)
@output_options
def sign_command(
    folder: Path,
    private_key: Path | None,
    password: str | None,
    pkcs11: str | None,
    keyless: bool,
    ambient: bool,
    identity_token: str | None,
    output: Output,
) -> None:
    """Sign every published file in DIR, with a provenance statement.

    \b
    Example: shardmill verify sign build/checkpoint --private-key publisher.pem
    """
    signers: list[Signer] = [KeyFile(private_key, password)] if private_key else []
    signers += [Token(pkcs11)] if pkcs11 else []
    signers += [Identity(ambient, identity_token)] if keyless else []
    if len(signers) != 1:
        raise click.UsageError("give one of --private-key, --pkcs11 and --keyless.")
    if ambient and not keyless:
        raise click.UsageError("--ambient belongs to --keyless.")
    try:
        report = sign(folder, signers[0])
    except SigningError as error:
        raise click.UsageError(str(error)) from None
    answer(report, output, Folder(folder))


@click.command("signature")
@_folder
@click.option("--public-key", type=_key, metavar="PEM", help="The publisher's, got by another way.")
@click.option("--identity", metavar="NAME", help="Of a keyless signature: the publisher's mail or workflow.")
@click.option("--issuer", metavar="URL", help="Of a keyless signature: who says that it is --identity.")
@output_options
def signature_command(
    folder: Path, public_key: Path | None, identity: str | None, issuer: str | None, output: Output
) -> None:
    """Are the files in DIR those that the publisher signed?

    \b
    Example: shardmill verify signature build/checkpoint --public-key publisher.pub
    """
    verifiers: list[Verifier] = [PublicKey(public_key)] if public_key else []
    verifiers += [Believed(identity, issuer)] if identity and issuer else []
    if len(verifiers) != 1 or bool(identity) != bool(issuer):
        raise click.UsageError("give --public-key, or --identity and --issuer.")
    try:
        report = check_signature(folder, verifiers[0])
    except SigningError as error:
        raise click.UsageError(str(error)) from None
    answer(report, output, Folder(folder))
