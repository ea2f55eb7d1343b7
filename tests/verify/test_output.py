"""A verdict says the same as text, JSON, SARIF, JUnit and signed statement; a bill of materials names all files."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest
from click.testing import CliRunner, Result

from shardmill.verify.commands.group import verify
from shardmill.verify.rules.table import RULES
from tests.schemas import held
from tests.verify.zoo.clean import mixed_child, plain


def _ask(*arguments: str) -> Result:
    return CliRunner().invoke(verify, list(arguments))


def _slugs(told: Result) -> list[str]:
    ids = {rule.id: rule.slug for rule in RULES.values()}
    return [ids[finding["rule"]] for finding in json.loads(told.stdout)["findings"]]


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """A child with an altered file and one that the manifest does not list."""
    folder = tmp_path / "c"
    mixed_child().write(folder)
    (folder / "tokenizer.json").write_bytes(b"{}  ")
    (folder / "more \x1b.txt").write_bytes(b"")
    return folder


def test_sarif_has_a_result_for_each_finding_and_a_rule_for_each_kind(faulty: Path) -> None:
    findings = json.loads(_ask("integrity", str(faulty), "--json").stdout)["findings"]
    said = _ask("integrity", str(faulty), "--format", "sarif")
    run = json.loads(said.stdout)["runs"][0]
    assert said.exit_code == 1
    assert [result["ruleId"] for result in run["results"]] == [finding["rule"] for finding in findings]
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
    assert {rule["id"] for rule in rules} == {finding["rule"] for finding in findings}
    assert {result["level"] for result in run["results"]} <= {"error", "warning", "note"}
    notes = [note["message"]["text"] for note in run["invocations"][0]["toolExecutionNotifications"]]
    assert any(note.startswith("not checked: parent") for note in notes)


def test_junit_fails_a_rule_with_findings_passes_what_was_checked_and_skips_the_rest(faulty: Path) -> None:
    verdict = held(_ask("integrity", str(faulty), "--json").stdout)
    suite = fromstring(_ask("integrity", str(faulty), "--format", "junit").stdout)
    cases = {case.attrib["name"]: case for case in suite}
    failed = {name for name, case in cases.items() if case.find("failure") is not None}
    worse = {finding["rule"] for finding in verdict["findings"] if finding["severity"] != "info"}
    assert {name.split()[0] for name in failed} == worse
    assert int(suite.attrib["failures"]) == len(failed)
    assert all(len(cases[topic]) == 0 for topic in verdict["checked"])
    assert all(cases[topic].find("skipped") is not None for topic in verdict["not_checked"])
    assert int(suite.attrib["tests"]) == len(suite)


@pytest.mark.parametrize("form", ["sarif", "junit"])
def test_a_question_that_was_not_asked_is_no_success(tmp_path: Path, form: str) -> None:
    plain().write(tmp_path / "c")
    said = _ask("all", str(tmp_path / "c"), "--format", form)
    assert "no --parent was given" in said.stdout
    assert _ask("all", str(tmp_path / "c"), "--format", form, "--strict").exit_code == 1


@pytest.mark.parametrize("form", ["text", "json", "sarif", "junit"])
def test_no_form_passes_a_control_character_on(faulty: Path, form: str) -> None:
    assert "\x1b" not in _ask("integrity", str(faulty), "--format", form).stdout


# --- signed verdicts ---------------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    pytest.importorskip("cryptography", reason="needs the extra `sign`")
    from tests.verify.test_signature import _keys

    return _keys(tmp_path)


def test_a_signed_verdict_says_what_was_asked_and_is_about_these_files(
    tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    folder, place = tmp_path / "c", tmp_path / "v.json"
    mixed_child().write(folder)
    asked = _ask("integrity", str(folder), "--attest", str(place), "--attest-key", str(keys[0]))
    assert asked.exit_code == 0, asked.output
    told = _ask("attested", str(folder), str(place), "--public-key", str(keys[1]), "--json")
    fact = json.loads(told.stdout)["facts"][str(place)]
    assert (told.exit_code, fact["question"], fact["verdict"]) == (0, "integrity", "clean")
    assert "digests" in fact["checked"]
    assert "parent" in fact["not checked"]


@pytest.mark.parametrize("change", ["altered", "added", "removed"])
def test_a_verdict_does_not_hold_for_other_files(
    tmp_path: Path, keys: tuple[Path, Path], change: str
) -> None:
    folder, place = tmp_path / "c", tmp_path / "v.json"
    mixed_child().write(folder)
    _ask("integrity", str(folder), "--attest", str(place), "--attest-key", str(keys[0]))
    if change == "altered":
        (folder / "tokenizer.json").write_bytes(b"{} ")
    elif change == "added":
        (folder / "new.txt").write_bytes(b"")
    else:
        (folder / "tokenizer.json").unlink()
    told = _ask("attested", str(folder), str(place), "--public-key", str(keys[1]), "--json")
    assert (told.exit_code, _slugs(told)) == (1, ["attestation-differs"])


@pytest.mark.parametrize(
    "damage", ["another key", "another verdict", "no verdict", "no envelope", "no JSON", "wrong shapes"]
)
def test_what_no_given_key_signed_as_a_verdict_vouches_for_nothing(
    tmp_path: Path, keys: tuple[Path, Path], damage: str
) -> None:
    from shardmill.verify.questions.dsse import private_key, seal
    from tests.verify.test_signature import _keys

    folder, place = tmp_path / "c", tmp_path / "v.json"
    plain().write(folder)
    signer = _keys(tmp_path, "other")[0] if damage == "another key" else keys[0]
    _ask("lint", str(folder), "--attest", str(place), "--attest-key", str(signer))
    if damage == "another verdict":
        value = json.loads(place.read_bytes())
        value["payload"] = value["payload"][:-8] + "AAAAAAAA"
        place.write_text(json.dumps(value))
    elif damage == "no verdict":
        place.write_bytes(seal(b'{"_type": "https://in-toto.io/Statement/v1"}', private_key(keys[0], None)))
    elif damage == "wrong shapes":
        body = {"_type": "https://in-toto.io/Statement/v1", "predicateType": "pkg:generic/shardmill/verdict@1",
                "subject": [{"name": 1, "digest": {"sha256": 2}}], "predicate": {"verdict": {}}}  # fmt: skip
        place.write_bytes(seal(json.dumps(body).encode(), private_key(keys[0], None)))
    elif damage != "another key":
        place.write_text("{}" if damage == "no envelope" else "{")
    told = _ask("attested", str(folder), str(place), "--public-key", str(keys[1]), "--json")
    assert (told.exit_code, _slugs(told)) == (1, ["attestation-bad"])


def test_in_totos_own_reader_takes_a_verdict(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    pytest.importorskip("in_toto_attestation")
    import base64

    from google.protobuf.json_format import ParseDict
    from in_toto_attestation.v1.statement_pb2 import Statement

    plain().write(tmp_path / "c")
    place = tmp_path / "v.json"
    _ask("lint", str(tmp_path / "c"), "--attest", str(place), "--attest-key", str(keys[0]))
    body = json.loads(base64.b64decode(json.loads(place.read_bytes())["payload"]))
    said = ParseDict(body, Statement())
    assert said.type == "https://in-toto.io/Statement/v1"
    assert {subject.name for subject in said.subject} == {p.name for p in (tmp_path / "c").iterdir()}


@pytest.mark.parametrize(
    "arguments",
    [["--attest", "v.json"], ["--attest", "{inside}", "--attest-key", "{key}"],
     ["--attest", "v.json", "--attest-key", "{not a key}"], ["--attest", "no/folder/v", "--attest-key", "{key}"]],
)  # fmt: skip
def test_a_verdict_that_cannot_be_signed_or_written_is_a_usage_error(
    tmp_path: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    plain().write(tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    places = {"{inside}": tmp_path / "c" / "v", "{key}": keys[0], "{not a key}": keys[1]}
    said = _ask("lint", str(tmp_path / "c"), *(str(places.get(each, each)) for each in arguments))
    assert (said.exit_code, "Traceback" in said.output, (tmp_path / "v.json").exists()) == (2, False, False)


# --- bill of materials -------------------------------------------------------------------------------------------


def test_the_bill_of_materials_names_every_file_and_every_number_format(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    mixed_child().write(folder)
    bill = json.loads(_ask("sbom", str(folder)).stdout)
    manifest = json.loads((folder / "shardmill.manifest.json").read_text())
    files = {
        part["name"]: part["hashes"][0]["content"] for part in bill["components"] if part["type"] == "file"
    }
    assert {name: row["sha256"] for name, row in manifest["files"].items()}.items() <= files.items()
    groups = [{row["name"]: row["value"] for row in part["properties"]} for part in bill["components"]
              if part["type"] == "data"]  # fmt: skip
    assert sum(int(group["shardmill:tensors"]) for group in groups) == sum(
        len(shard["tensors"]) for shard in manifest["shards"].values()
    )
    assert any("FP8" in group["shardmill:number-format"] for group in groups)
    assert _ask("sbom", str(folder)).stdout == json.dumps(bill, indent=2) + "\n"


def test_the_bill_of_materials_is_valid_by_its_schema(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx", reason="needs cyclonedx-python-lib[json-validation]")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    mixed_child().write(tmp_path / "c")
    (tmp_path / "c" / "README.md").write_text("---\nlicense: mit\n---\n")
    text = _ask("sbom", str(tmp_path / "c")).stdout
    assert '"name": "mit"' in text
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None


def test_a_checkpoint_with_errors_has_no_bill(tmp_path: Path) -> None:
    mixed_child().write(tmp_path / "c")
    (tmp_path / "c" / "model-00001-of-00002.safetensors").write_bytes(b"cut")
    said = _ask("sbom", str(tmp_path / "c"), "-o", str(tmp_path / "bill"))
    assert (said.exit_code, (tmp_path / "bill").exists()) == (1, False)
