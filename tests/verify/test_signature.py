"""What was signed is vouched for byte by byte, and the provenance says what the manifest says."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.verify.zoo.clean import mixed_child, plain

pytest.importorskip("model_signing", reason="needs the extra `sign`")

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

from shardmill.verify.commands.group import verify
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.provenance import PROVENANCE, statement, statement_bytes
from shardmill.verify.questions.signature import SIGNATURE, SigningError, check_signature, sign
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
    report = sign(tmp_path / "c", private, None)
    assert report.findings == []
    return tmp_path / "c", public


def test_a_signed_checkpoint_is_vouched_for_and_still_whole(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    report = check_signature(folder, public)
    assert (report.findings, report.checked) == ([], ["signature", "provenance"])
    assert integrity(Folder(folder)).findings == []


@pytest.mark.parametrize(
    "file", ["model-00001-of-00002.safetensors", "shardmill.manifest.json", PROVENANCE, "config.json"]
)
def test_any_changed_byte_is_found(signed: tuple[Path, Path], file: str) -> None:
    folder, public = signed
    data = bytearray((folder / file).read_bytes())
    data[-3] ^= 1
    (folder / file).write_bytes(data)
    assert "signature-bad" in {f.slug for f in check_signature(folder, public).findings}


def test_an_added_file_is_found(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    (folder / "run.py").write_bytes(b"")
    assert [f.slug for f in check_signature(folder, public).findings] == ["signature-bad"]


def test_another_key_does_not_vouch(signed: tuple[Path, Path], tmp_path: Path) -> None:
    _, other = _keys(tmp_path, "other")
    assert [f.slug for f in check_signature(signed[0], other).findings] == ["signature-bad"]


def test_no_signature_and_a_malformed_one_are_findings(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    (folder / SIGNATURE).write_bytes(b"{}")
    assert [f.slug for f in check_signature(folder, public).findings] == ["signature-bad"]
    (folder / SIGNATURE).unlink()
    assert [f.slug for f in check_signature(folder, public).findings] == ["signature-missing"]


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
    said = statement(replace(manifest, parent=parent, recipe_digests=("a" * 64,)), "1.2.3+local")
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
    assert [f.slug for f in check_signature(folder, public).findings] == ["signature-bad"]
    (folder / PROVENANCE).write_bytes(statement_bytes(manifest, "no version at all"))
    assert [f.slug for f in check_signature(folder, public).findings] == [
        "signature-bad",
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
    report = sign(tmp_path / "c", private, None)
    assert [f.slug for f in report.findings] == ["signing-no-sha256"]
    assert (report.exit_code, (tmp_path / "c" / SIGNATURE).exists()) == (1, False)
    assert not (tmp_path / "c" / PROVENANCE).exists()
    (tmp_path / "c" / SIGNATURE).write_bytes(b"{}")
    assert "signing-no-sha256" in {f.slug for f in check_signature(tmp_path / "c", public).findings}


def test_a_statement_that_says_something_else_is_found_even_if_signed(tmp_path: Path) -> None:
    mixed_child().write(tmp_path / "c")
    private, public = _keys(tmp_path)
    sign(tmp_path / "c", private, None)
    (tmp_path / "c" / PROVENANCE).write_bytes(b"{}\n")
    from shardmill.verify.questions.signature import _hashing, _library

    library = _library()
    signer = library.signing.Config().use_elliptic_key_signer(private_key=private)
    signer.set_hashing_config(_hashing(library)).sign(tmp_path / "c", tmp_path / "c" / SIGNATURE)
    assert [f.slug for f in check_signature(tmp_path / "c", public).findings] == ["provenance-differs"]


def test_a_missing_statement_is_a_warning_even_if_the_rest_is_signed(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    (folder / PROVENANCE).unlink()
    assert [f.slug for f in check_signature(folder, public).findings] == [
        "signature-bad",
        "provenance-missing",
    ]


def test_a_faulty_checkpoint_is_not_signed(tmp_path: Path) -> None:
    mixed_child().write(tmp_path / "c")
    (tmp_path / "c" / "tokenizer.json").write_bytes(b"{} ")
    report = sign(tmp_path / "c", _keys(tmp_path)[0], None)
    assert report.exit_code == 1
    assert not (tmp_path / "c" / SIGNATURE).exists()


def test_a_checkpoint_without_manifest_is_signed_without_provenance(tmp_path: Path) -> None:
    plain().write(tmp_path / "c")
    private, public = _keys(tmp_path)
    sign(tmp_path / "c", private, None)
    report = check_signature(tmp_path / "c", public)
    assert (report.findings, list(report.not_checked)) == ([], ["provenance"])


def test_a_key_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    plain().write(tmp_path / "c")
    (tmp_path / "bad.pem").write_text("x")
    with pytest.raises(SigningError, match=r"bad\.pem"):
        sign(tmp_path / "c", tmp_path / "bad.pem", None)
    result = CliRunner().invoke(
        verify, ["sign", str(tmp_path / "c"), "--private-key", str(tmp_path / "bad.pem")]
    )
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
