"""What was signed is vouched for byte by byte, and the provenance says what the manifest says."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.verify.zoo.clean import mixed_child, plain

pytest.importorskip("model_signing", reason="needs the extra `sign`")

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

from shardmill.verify.commands.group import verify
from shardmill.verify.questions.dsse import IN_TOTO, private_key, seal
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.provenance import PROVENANCE, statement, statement_bytes
from shardmill.verify.questions.signature import ENVELOPE, SIGNATURE, check_signature, sign
from shardmill.verify.questions.signers import (
    Believed,
    Identity,
    KeyFile,
    PublicKey,
    SigningError,
    Token,
    signing,
    verifying,
)
from shardmill.verify.reading.checkpoint import open_checkpoint
from shardmill.verify.reading.manifest import MANIFEST, canonical
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report


def _keys(folder: Path, name: str = "k") -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    public.write_bytes(
        key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path]:
    """A signed child, and the public key."""
    mixed_child().write(tmp_path / "c")
    private, public = _keys(tmp_path)
    report = sign(tmp_path / "c", KeyFile(private))
    assert report.findings == []
    return tmp_path / "c", public


def test_a_signed_checkpoint_is_vouched_for_and_still_whole(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    report = check_signature(folder, PublicKey(public))
    assert (report.findings, report.checked) == ([], ["signature", "provenance", "envelope"])
    assert integrity(Folder(folder)).findings == []


@pytest.mark.parametrize(
    "file", ["model-00001-of-00002.safetensors", "shardmill.manifest.json", PROVENANCE, "config.json"]
)
def test_any_changed_byte_is_found(signed: tuple[Path, Path], file: str) -> None:
    folder, public = signed
    data = bytearray((folder / file).read_bytes())
    data[-3] ^= 1
    (folder / file).write_bytes(data)
    assert "signature-bad" in {f.slug for f in check_signature(folder, PublicKey(public)).findings}


def test_an_added_file_is_found(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    (folder / "run.py").write_bytes(b"")
    assert [f.slug for f in check_signature(folder, PublicKey(public)).findings] == ["signature-bad"]


def test_another_key_does_not_vouch(signed: tuple[Path, Path], tmp_path: Path) -> None:
    _, other = _keys(tmp_path, "other")
    assert [f.slug for f in check_signature(signed[0], PublicKey(other)).findings] == [
        "signature-bad",
        "provenance-differs",  # the envelope, which the key did not sign either
    ]


def test_no_signature_and_a_malformed_one_are_findings(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    (folder / SIGNATURE).write_bytes(b"{}")
    assert [f.slug for f in check_signature(folder, PublicKey(public)).findings] == ["signature-bad"]
    (folder / SIGNATURE).unlink()
    assert [f.slug for f in check_signature(folder, PublicKey(public)).findings] == ["signature-missing"]


def test_the_provenance_names_parent_sources_recipe_and_files(signed: tuple[Path, Path]) -> None:
    folder, _ = signed
    manifest = json.loads((folder / "shardmill.manifest.json").read_text())
    said = json.loads((folder / PROVENANCE).read_text())
    assert {row["name"]: row["digest"]["sha256"] for row in said["subject"]} == {
        name: row["sha256"] for name, row in manifest["files"].items()
    }
    made = said["predicate"]["buildDefinition"]
    assert made["externalParameters"] == {"recipe": "zoo", "numerics": ["amax/1"]}
    sources = {k: v for shard in manifest["shards"].values() for k, v in shard["sources"].items()}
    assert made["internalParameters"]["sourceTensors"] == {"xxh3-128": sources}
    kept = {name for name, shard in manifest["shards"].items() if not shard["rewritten"]}
    revision = manifest["parent"]["revision"]
    parent = [("parent", {"gitCommit": revision})] if revision else []
    recipe = [("recipe", {"sha256": layer["sha256"]}) for layer in manifest["recipe"]["layers"]]
    passed_on = [(f"parent/{name}", {"sha256": manifest["files"][name]["sha256"]}) for name in sorted(kept)]
    found = [(row["name"], row["digest"]) for row in made["resolvedDependencies"]]
    assert found == [*parent, *recipe, *passed_on]


@pytest.mark.parametrize("repository", ["org/repo", None])
def test_in_totos_own_reader_takes_the_statement(signed: tuple[Path, Path], repository: str | None) -> None:
    """No field is unknown to the schemas of the statement and of SLSA's predicate; URIs are URIs."""
    pytest.importorskip("in_toto_attestation")
    from urllib.parse import urlsplit

    from google.protobuf.json_format import ParseDict
    from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
    from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
    from in_toto_attestation.v1.statement import Statement
    from in_toto_attestation.v1.statement_pb2 import Statement as Message

    manifest = open_checkpoint(Folder(signed[0]), Report("signature")).manifest
    assert manifest is not None
    revision = "0" * 40 if repository else None
    parent = {"repository": repository, "revision": revision}
    said = statement(manifest._replace(parent=parent, recipe_digests=("a" * 64,)), "1.2.3+local")
    read = Statement.copy_from_pb(ParseDict(said, Message()))
    read.validate()
    predicate = ParseDict(said["predicate"], provenance_pb2.Provenance())
    for row in predicate.build_definition.resolved_dependencies:
        ResourceDescriptor.copy_from_pb(row).validate()
        assert {"sha256", "gitCommit"} & set(row.digest)
    assert predicate.run_details.builder.version == {"shardmill": "1.2.3+local"}
    uris = [predicate.build_definition.build_type, predicate.run_details.builder.id]
    uris += [row.uri for row in predicate.build_definition.resolved_dependencies if row.uri]
    assert len(uris) == (3 if repository else 2)
    assert all(urlsplit(uri).scheme == "pkg" and "@" in uri for uri in uris)


def test_a_statement_of_another_version_is_held_to_what_that_version_says(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    manifest = open_checkpoint(Folder(folder), Report("signature")).manifest
    assert manifest is not None
    (folder / PROVENANCE).write_bytes(statement_bytes(manifest, "99.0"))
    assert [f.slug for f in check_signature(folder, PublicKey(public)).findings] == [
        "signature-bad",
        "provenance-differs",  # the envelope holds the statement as it was signed
    ]
    (folder / PROVENANCE).write_bytes(statement_bytes(manifest, "no version at all"))
    assert [f.slug for f in check_signature(folder, PublicKey(public)).findings] == [
        "signature-bad",
        "provenance-differs",
        "provenance-differs",
    ]


def test_a_child_without_sha256s_is_not_signed_and_says_why(tmp_path: Path) -> None:
    mixed_child().write(tmp_path / "c")
    path = tmp_path / "c" / MANIFEST
    body = json.loads(path.read_text())
    del body["self"]
    for row in body["files"].values():
        row["sha256"] = None
    body["algorithms"]["file"] = "none"
    path.write_bytes(canonical({**body, "self": hashlib.sha256(canonical(body)).hexdigest()}))
    private, public = _keys(tmp_path)
    report = sign(tmp_path / "c", KeyFile(private))
    assert [f.slug for f in report.findings] == ["signing-no-sha256"]
    assert (report.exit_code, (tmp_path / "c" / SIGNATURE).exists()) == (1, False)
    assert not (tmp_path / "c" / PROVENANCE).exists()
    (tmp_path / "c" / SIGNATURE).write_bytes(b"{}")
    assert "signing-no-sha256" in {
        f.slug for f in check_signature(tmp_path / "c", PublicKey(public)).findings
    }


def test_a_statement_that_says_something_else_is_found_even_if_signed(tmp_path: Path) -> None:
    mixed_child().write(tmp_path / "c")
    private, public = _keys(tmp_path)
    sign(tmp_path / "c", KeyFile(private))
    (tmp_path / "c" / PROVENANCE).write_bytes(b"{}\n")
    from shardmill.verify.questions.signature import _hashing
    from shardmill.verify.questions.signers import library as installed

    library = installed()
    signer = library.signing.Config().use_elliptic_key_signer(private_key=private)
    signer.set_hashing_config(_hashing(library)).sign(tmp_path / "c", tmp_path / "c" / SIGNATURE)
    assert [f.slug for f in check_signature(tmp_path / "c", PublicKey(public)).findings] == [
        "provenance-differs",
        "provenance-differs",
    ]


def test_a_missing_statement_is_a_warning_even_if_the_rest_is_signed(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    (folder / PROVENANCE).unlink()
    assert [f.slug for f in check_signature(folder, PublicKey(public)).findings] == [
        "signature-bad",
        "provenance-missing",
    ]


def test_a_faulty_checkpoint_is_not_signed(tmp_path: Path) -> None:
    mixed_child().write(tmp_path / "c")
    (tmp_path / "c" / "tokenizer.json").write_bytes(b"{} ")
    report = sign(tmp_path / "c", KeyFile(_keys(tmp_path)[0]))
    assert report.exit_code == 1
    assert not (tmp_path / "c" / SIGNATURE).exists()


def test_a_checkpoint_without_manifest_is_signed_without_provenance(tmp_path: Path) -> None:
    plain().write(tmp_path / "c")
    private, public = _keys(tmp_path)
    sign(tmp_path / "c", KeyFile(private))
    report = check_signature(tmp_path / "c", PublicKey(public))
    assert (report.findings, list(report.not_checked)) == ([], ["provenance"])


def test_a_key_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    plain().write(tmp_path / "c")
    (tmp_path / "bad.pem").write_text("x")
    with pytest.raises(SigningError, match=r"bad\.pem"):
        sign(tmp_path / "c", KeyFile(tmp_path / "bad.pem"))
    result = CliRunner().invoke(
        verify, ["sign", str(tmp_path / "c"), "--private-key", str(tmp_path / "bad.pem")]
    )
    assert (result.exit_code, "Traceback" in result.output) == (2, False)


def test_the_statement_is_also_signed_by_itself_as_a_dsse_envelope(signed: tuple[Path, Path]) -> None:
    """An implementation that is not ours takes the signature, and finds the statement in it."""
    pytest.importorskip("securesystemslib")
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import SSlibKey

    folder, public = signed
    line = (folder / ENVELOPE).read_bytes()
    envelope = Envelope.from_dict(json.loads(line) | {"payloadType": IN_TOTO})
    key = SSlibKey.from_crypto(form.load_pem_public_key(public.read_bytes()))
    envelope.signatures = {key.keyid: next(iter(envelope.signatures.values()))}
    envelope.signatures[key.keyid].keyid = key.keyid
    envelope.verify([key], 1)
    assert envelope.payload == (folder / PROVENANCE).read_bytes()
    assert line.count(b"\n") == 1


@pytest.mark.parametrize("what", ["payload", "signature", "key", "type", "json"])
def test_an_envelope_that_says_or_is_signed_otherwise_is_found(
    signed: tuple[Path, Path], tmp_path: Path, what: str
) -> None:
    folder, public = signed
    value = json.loads((folder / ENVELOPE).read_bytes())
    if what == "payload":
        value["payload"] = base64.b64encode(b"{}").decode()
    elif what == "signature":
        value["signatures"] = []
    elif what == "key":
        value["signatures"][0]["sig"] = json.loads(seal(b"{}", private_key(_keys(tmp_path, "o")[0], None)))[
            "signatures"
        ][0]["sig"]
    elif what == "type":
        value["payloadType"] = "text/plain"
    data = b"{" if what == "json" else canonical(value)
    (folder / ENVELOPE).write_bytes(data)
    found = {(f.slug, f.file) for f in check_signature(folder, PublicKey(public)).findings}
    assert ("provenance-differs", ENVELOPE) in found


def test_the_tool_of_model_signing_itself_takes_what_we_sign_and_we_what_it_signs(tmp_path: Path) -> None:
    mixed_child().write(tmp_path / "c")
    private, public = _keys(tmp_path)
    sign(tmp_path / "c", KeyFile(private))
    tool = [sys.executable, "-m", "model_signing"]
    place = ["--signature", str(tmp_path / "c" / SIGNATURE)]
    theirs = [*tool, "verify", "key", str(tmp_path / "c"), *place, "--public_key", str(public)]
    assert subprocess.run(theirs, capture_output=True).returncode == 0
    (tmp_path / "c" / SIGNATURE).unlink()
    make = [*tool, "sign", "key", str(tmp_path / "c"), *place, "--private_key", str(private)]
    assert subprocess.run(make, capture_output=True).returncode == 0
    assert check_signature(tmp_path / "c", PublicKey(public)).findings == []


@pytest.mark.parametrize(
    ("who", "call", "arguments"),
    [
        (Identity(True), "use_sigstore_signer", {"use_ambient_credentials": True, "identity_token": None}),
        (Token("pkcs11:object=k"), "use_pkcs11_signer", {"pkcs11_uri": "pkcs11:object=k"}),
        (
            Believed("a@b", "https://c"),
            "use_sigstore_verifier",
            {"identity": "a@b", "oidc_issuer": "https://c"},
        ),
    ],
    ids=["keyless", "token", "believed"],
)
def test_tokens_and_identities_are_the_librarys_own_calls(
    monkeypatch: pytest.MonkeyPatch, who: Identity | Token | Believed, call: str, arguments: dict[str, object]
) -> None:
    """The installed library has the call, and it takes the arguments. Neither token nor Sigstore is reached here."""
    import model_signing

    config = model_signing.verifying.Config if isinstance(who, Believed) else model_signing.signing.Config
    inspect.signature(getattr(config, call)).bind(None, **arguments)
    heard: list[dict[str, object]] = []
    monkeypatch.setattr(config, call, lambda self, **said: heard.append(said) or self)
    verifying(who, model_signing) if isinstance(who, Believed) else signing(who, model_signing)
    assert heard == [arguments]


def test_a_signature_by_somebody_else_than_a_key_leaves_no_old_envelope(
    signed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import model_signing

    class Silent:
        def set_hashing_config(self, _: object) -> Silent:
            return self

        def sign(self, folder: Path, place: Path) -> None:
            place.write_text("{}")

    monkeypatch.setattr(model_signing.signing.Config, "use_pkcs11_signer", lambda self, **_: Silent())
    sign(signed[0], Token("pkcs11:object=k"))
    assert not (signed[0] / ENVELOPE).exists()


@pytest.mark.parametrize(
    "arguments",
    [["sign"], ["sign", "--keyless", "--pkcs11", "pkcs11:x"], ["sign", "--pkcs11", "pkcs11:x", "--ambient"],
     ["signature"], ["signature", "--identity", "a@b"]],
)  # fmt: skip
def test_who_signs_is_said_once(tmp_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(verify, [arguments[0], str(tmp_path), *arguments[1:]])
    assert (result.exit_code, "--" in result.output, "Traceback" in result.output) == (2, True, False)
