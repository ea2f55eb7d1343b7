"""Signs a folder and checks signatures, by the OpenSSF model-signing library with keys that lie in files.

The signature covers every published file, the manifest and the provenance statement among them; dotfiles and state
folders are left out of it. Nothing is asked of a network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.provenance import PROVENANCE, statement, statement_bytes
from shardmill.verify.reading.atomic import write_whole
from shardmill.verify.reading.checkpoint import open_checkpoint
from shardmill.verify.reading.manifest import canonical
from shardmill.verify.reading.source import Folder, read
from shardmill.verify.rules.findings import Finding, Report

SIGNATURE = "model.sig"
IGNORED = (SIGNATURE, ".shardmill", ".cache", ".git", ".gitattributes", ".gitignore")


class SigningError(Exception):
    """Signing or checking can't be done here; the text is a sentence for people."""


def sign(folder: Path, private_key: Path, password: str | None) -> Report:
    """Writes the provenance statement (where there is a manifest) and the signature. Refuses a faulty checkpoint."""
    library = _library()
    report = integrity(Folder(folder), read_data=False)
    report.question = "sign"
    if any(finding.severity == "error" for finding in report.findings):
        return report
    manifest = open_checkpoint(Folder(folder), Report("sign")).manifest
    if manifest is not None:
        write_whole(folder / PROVENANCE, statement_bytes(manifest))
    try:
        signer = library.signing.Config().use_elliptic_key_signer(private_key=private_key, password=password)
    except (ValueError, TypeError, OSError) as error:
        raise SigningError(
            f"{private_key}: not a private key of a NIST curve that can be read: {error}."
        ) from None
    staged = folder / f".{SIGNATURE}.new"
    signer.set_hashing_config(_hashing(library)).sign(folder, staged)
    staged.replace(folder / SIGNATURE)
    report.facts["signed"] = str(folder / SIGNATURE)
    return report


def check_signature(folder: Path, public_key: Path) -> Report:
    """The signature against the files, and the provenance statement against the manifest."""
    library = _library()
    report = Report("signature")
    if not (folder / SIGNATURE).is_file():
        report.add(Finding("signature-missing", SIGNATURE, "", "a signature", "none"))
        return report
    try:
        verifier = library.verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except (ValueError, TypeError, OSError) as error:
        raise SigningError(
            f"{public_key}: not a public key of a NIST curve that can be read: {error}."
        ) from None
    try:
        verifier.set_hashing_config(_hashing(library)).verify(folder, folder / SIGNATURE)
    except Exception as error:  # the library raises many kinds; every one of them means: not vouched for
        said = " ".join(str(error).split()) or type(error).__name__
        report.add(
            Finding("signature-bad", SIGNATURE, "", "the signed files, signed with this key", said[:300])
        )
    report.checks("signature")
    report.add(*_provenance_faults(folder, report))
    return report


def _provenance_faults(folder: Path, report: Report) -> list[Finding]:
    source = Folder(folder)
    manifest = open_checkpoint(source, Report("signature")).manifest
    if manifest is None:
        report.leaves_out("provenance", "there is no manifest to compare it with")
        return []
    report.checks("provenance")
    size = source.files().get(PROVENANCE)
    if size is None:
        return [
            Finding("provenance-missing", PROVENANCE, "", "the statement that the manifest gives", "none")
        ]
    wanted = canonical(statement(manifest))
    if size != len(wanted) or read(source, PROVENANCE, 0, size) != wanted:
        return [
            Finding("provenance-differs", PROVENANCE, "", "the statement that the manifest gives", "another")
        ]
    return []


def _hashing(library: Any) -> Any:
    return library.hashing.Config().set_ignored_paths(paths=IGNORED, ignore_git_paths=True)


def _library() -> Any:
    try:
        import model_signing
    except ImportError as error:
        raise SigningError(
            f"needs model-signing ({error}); `pip install 'shardmill[sign]'` brings it."
        ) from None
    return model_signing
