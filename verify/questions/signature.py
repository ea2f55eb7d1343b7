"""Signs a folder and checks signatures, by the OpenSSF model-signing library.

The signature covers every published file, the manifest and the provenance statement among them; dotfiles and state
folders are left out of it. Who signs with a key file also signs the statement by itself, in a DSSE envelope, as the
tools of in-toto and SLSA read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.provenance import (
    PROVENANCE,
    lacks_sha256,
    stated_version,
    statement_bytes,
    this_version,
)
from shardmill.verify.questions.signers import (
    KeyFile,
    PublicKey,
    Signer,
    SigningError,
    Verifier,
    library,
    signing,
    verifying,
)
from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.atomic import write_whole
from shardmill.verify.reading.bounded_json import BadJsonError
from shardmill.verify.reading.checkpoint import open_checkpoint
from shardmill.verify.reading.file_pass import FileJob
from shardmill.verify.reading.manifest import MANIFEST, Manifest
from shardmill.verify.reading.source import Folder, read
from shardmill.verify.reading.stream import stream
from shardmill.verify.rules.findings import Finding, Report

SIGNATURE = "model.sig"
ENVELOPE = "provenance.intoto.jsonl"  # the statement in a DSSE envelope, one line
ENVELOPE_BYTES_MAX = 64 << 20
IGNORED = (SIGNATURE, ".shardmill", ".cache", ".git", ".gitattributes", ".gitignore")

UNSIGNED_MAX = 100  # files that are named


def sign(folder: Path, signer: Signer) -> Report:
    """Writes the provenance statement (where there is a manifest) and the signature. Refuses a faulty checkpoint.

    Raises SigningError where the key, token or identity can't be used; the folder's signature is then as it was.
    """
    model_signing = library()
    config = signing(signer, model_signing)
    manifest = open_checkpoint(Folder(folder), Report("sign")).manifest
    # Who signs a manifest vouches for its digests.
    report = integrity(Folder(folder), read_data=manifest is not None)
    report.question = "sign"
    if manifest is None and (folder / PROVENANCE).exists():
        expected = "no statement where there is no manifest to compare it with"
        report.add(Finding("provenance-differs", PROVENANCE, "", expected, "a statement of something else"))
    if manifest is not None:
        report.add(*_unproven(manifest))
    if any(finding.severity == "error" for finding in report.findings):
        return report
    if manifest is not None:
        _state(folder, statement_bytes(manifest, this_version()), signer)
    staged = folder / f".{SIGNATURE}.new"
    try:
        config.set_hashing_config(_hashing(model_signing)).sign(folder, staged)
    except Exception as error:  # of a token's driver, or Sigstore's servers
        staged.unlink(missing_ok=True)
        raise SigningError(f"{folder}: could not be signed: {' '.join(str(error).split())[:300]}.") from None
    staged.replace(folder / SIGNATURE)
    report.facts["signed"] = str(folder / SIGNATURE)
    return report


def _state(folder: Path, statement: bytes, signer: Signer) -> None:
    """Writes the statement; in an envelope too where the key is at hand, else removes an older envelope."""
    write_whole(folder / PROVENANCE, statement)
    if isinstance(signer, KeyFile):
        from shardmill.verify.questions.dsse import KeyFileError, private_key, seal

        try:
            write_whole(folder / ENVELOPE, seal(statement, private_key(signer.path, signer.password)))
        except KeyFileError as error:
            raise SigningError(str(error)) from None
    else:
        (folder / ENVELOPE).unlink(missing_ok=True)


def check_signature(folder: Path, verifier: Verifier) -> Report:
    """The signature against the files, and the provenance statement against the manifest."""
    model_signing = library()
    report = Report("signature")
    if not (folder / SIGNATURE).is_file():
        report.add(Finding("signature-missing", SIGNATURE, "", "a signature", "none"))
        report.leaves_out("provenance", "there is no signature")
        return report
    config = verifying(verifier, model_signing)
    try:
        config.set_hashing_config(_hashing(model_signing, links=_links_stay(folder))).verify(
            folder, folder / SIGNATURE
        )
    except Exception as error:  # the library raises many kinds; every one of them means: not vouched for
        said = " ".join(str(error).split()) or type(error).__name__
        report.add(
            Finding("signature-bad", SIGNATURE, "", "the signed files, signed by the one named", said[:300])
        )
    report.add(*_unsigned(folder))
    report.checks("signature")
    report.add(*_provenance_faults(folder, report), *_subject_faults(folder))
    report.add(*_envelope_faults(folder, verifier, report))
    return report


def _envelope_faults(folder: Path, verifier: Verifier, report: Report) -> list[Finding]:
    """The envelope, where there is one, against the statement beside it and the key."""
    if not (folder / ENVELOPE).is_file():
        return []
    if not isinstance(verifier, PublicKey):
        report.leaves_out("envelope", "a key signed it, and none was given")
        return []
    from shardmill.verify.questions.dsse import BadEnvelopeError, KeyFileError, public_key, unseal

    source = Folder(folder)
    files = source.files()
    try:
        data = read(source, ENVELOPE, 0, min(files[ENVELOPE], ENVELOPE_BYTES_MAX))
        body = unseal(data, [public_key(verifier.path)]).body
    except (BadEnvelopeError, KeyFileError) as error:
        return [
            Finding("provenance-differs", ENVELOPE, "", "the statement, signed with this key", str(error))
        ]
    report.checks("envelope")
    if PROVENANCE in files and body != read(source, PROVENANCE, 0, files[PROVENANCE]):
        return [Finding("provenance-differs", ENVELOPE, "", f"what {PROVENANCE} says", "another statement")]
    return []


def _unsigned(folder: Path) -> list[Finding]:
    """Files in state folders, which no signature covers, that are not the state that hub clients keep there."""
    cache = folder / ".cache"
    own = cache / "huggingface"
    strangers = [path for path in cache.rglob("*") if not path.is_dir() and not path.is_relative_to(own)]
    expected = "only the hub client's own records in a folder that is not signed"
    return [
        Finding("signature-bad", str(path.relative_to(folder)), "", expected, "an unsigned file")
        for path in sorted(strangers)[:UNSIGNED_MAX]
    ]


def _subject_faults(folder: Path) -> list[Finding]:
    """The manifest's sha256, which the statement repeats, against the files: a signature vouches for both."""
    source = Folder(folder)
    manifest = open_checkpoint(source, Report("signature")).manifest
    if manifest is None:
        return []
    files = source.files()
    jobs = [
        FileJob(path, files[path], True, ())
        for path, record in manifest.files.items()
        if record.sha256 is not None and path in files
    ]
    return [
        Finding("file-digest", result.file, "", str(manifest.files[result.file].sha256), result.sha256)
        for result in stream(source, jobs).values()
        if result.sha256 != manifest.files[result.file].sha256
    ]


def _provenance_faults(folder: Path, report: Report) -> list[Finding]:
    source = Folder(folder)
    manifest = open_checkpoint(source, Report("signature")).manifest
    if manifest is None:
        report.leaves_out("provenance", "there is no manifest to compare it with")
        if (folder / PROVENANCE).exists():
            expected = "a manifest that gives this statement"
            return [Finding("provenance-differs", PROVENANCE, "", expected, "no manifest")]
        return []
    report.checks("provenance")
    if unproven := _unproven(manifest):
        return unproven
    size = source.files().get(PROVENANCE)
    if size is None:
        return [
            Finding("provenance-missing", PROVENANCE, "", "the statement that the manifest gives", "none")
        ]
    if not _says_so(source, size, manifest):
        return [
            Finding("provenance-differs", PROVENANCE, "", "the statement that the manifest gives", "another")
        ]
    return []


def _says_so(source: Folder, size: int, manifest: Manifest) -> bool:
    """Whether the statement is what the version that it names makes of the manifest."""
    # Versions are short: what is twice as long as this version's statement is another, and is not read.
    if size > 2 * len(statement_bytes(manifest, this_version())):
        return False
    data = read(source, PROVENANCE, 0, size)
    try:
        version = stated_version(bounded_json.loads(data))
    except BadJsonError:
        return False
    return version is not None and data == statement_bytes(manifest, version)


def _unproven(manifest: Manifest) -> list[Finding]:
    """Why a checkpoint can't be vouched for: files that its manifest names by no cryptographic digest."""
    names = lacks_sha256(manifest)
    got = f"none for {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "") if names else ""
    return [Finding("signing-no-sha256", MANIFEST, "", "a sha256 of every file", got)] if names else []


def _hashing(library: Any, links: bool = False) -> Any:
    config = library.hashing.Config().set_ignored_paths(paths=IGNORED, ignore_git_paths=True)
    return config.set_allow_symlinks(True) if links else config


def _links_stay(folder: Path) -> bool:
    """Whether all links end where `integrity` follows them: in the folder, or in the blobs of a hub's cache."""
    source = Folder(folder)
    source.files()
    return not any(finding.slug == "link-leaves-folder" for finding in source.findings())
