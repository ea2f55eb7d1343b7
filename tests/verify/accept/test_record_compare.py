"""Recording and judging, against answers that a real vLLM gave: resumable, bound to identities, failures apart."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from filelock import FileLock

from shardmill.verify.accept.client import Client
from shardmill.verify.accept.commands import accept
from shardmill.verify.accept.compare import compare, rule
from shardmill.verify.accept.gates import Gate
from shardmill.verify.accept.identity import ask_identity, checkpoint_digest
from shardmill.verify.accept.items import list_items
from shardmill.verify.accept.measure import Value, run_measures
from shardmill.verify.accept.protocol import read_protocol
from shardmill.verify.accept.record import Recorder, record_all
from shardmill.verify.accept.runs import RunError, append_row, read_run, start_run
from shardmill.verify.accept.speculation import SpeculationError, check_speculation
from shardmill.verify.accept.tokens import read_tokens
from tests.schemas import held
from tests.verify.accept.replay import RECORDED, replayed

pytest.importorskip("scipy", reason="comparing needs the extra `accept`")

SMALL = str(Path(__file__).parent / "small.toml")
TOKENS = str(RECORDED / "tokens.json")
PROTOCOL = read_protocol(SMALL)
FROZEN = read_tokens(Path(TOKENS), PROTOCOL)
WITH = ["--protocol", SMALL, "--tokens", TOKENS]


def ask(*words: object):
    return CliRunner().invoke(accept, [str(word) for word in words], catch_exceptions=False)


def patient(url: str) -> Client:
    return Client(url, timeout=5.0, wait=lambda attempt: 0.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The baseline twice and the test once, each from its recorded server."""
    folder = tmp_path_factory.mktemp("runs")
    for name, server in (("base", "parent"), ("again", "parent"), ("test", "child")):
        with replayed(server) as replay:
            result = ask("record", f"{replay.url}/v1", "-o", folder / name, *WITH, "--rung", "8666")
            assert result.exit_code == 1, (
                result.output
            )  # arithmetic needs a chat template, which the model has not
            assert "2 failed, 2 too long" in result.output
    return {name: folder / name for name in ("base", "again", "test")}


def compared(runs, *more: object) -> dict:
    result = ask("compare", runs["base"], runs["test"], *WITH, "--noise", runs["again"], *more, "--json")
    return held(result.stdout)


def test_the_noise_floor_of_a_deterministic_server_is_exact(runs):
    floor = compared(runs)["noise_floor"]
    assert floor["agreeing"] == floor["positions"] > 250
    assert floor["kl"] == {"mean": 0, "median": 0, "p99": 0, "max": 0}
    assert floor["logprob_delta"] == {"mean": 0, "interval": [0, 0], "rms": 0, "max": 0}
    assert floor["first_choice_outside_top_k"] == 0


def test_a_block_fp8_build_is_told_from_its_parent(runs):
    said = compared(runs)
    scored = said["scored"]
    assert 0.5 < scored["agreeing"] / scored["positions"] < 0.9
    assert scored["wilson"][0] < scored["agreeing"] / scored["positions"] < scored["wilson"][1]
    assert scored["by_document"] is not None
    assert 0.005 < scored["kl"]["mean"] < 0.05
    assert scored["kl"]["median"] <= scored["kl"]["p99"] <= scored["kl"]["max"]
    delta = scored["logprob_delta"]
    assert delta["interval"][0] < delta["mean"] < delta["interval"][1]
    assert abs(delta["mean"]) < delta["rms"] < delta["max"]


def test_gates_fail_pass_and_give_the_verdict(runs):
    said = compared(runs)
    assert {gate["gate"]: gate["outcome"] for gate in said["gates"]} == {
        "top1_agreement >= 0.95": "FAIL",
        "mean_kl <= 0.05": "PASS",
        "soak_served >= 1": "PASS",
    }
    assert said["verdict"] == "FAIL"


def test_ten_documents_without_any_difference_do_not_show_an_agreement_of_95_percent(runs):
    result = ask("compare", runs["base"], runs["again"], *WITH)
    assert result.exit_code == 1
    assert result.output.startswith("INCONCLUSIVE")
    assert re.search(r"INCONCLUSIVE: top1_agreement >= 0\.95: 1\.0000 .*; .* add documents", result.output)


def test_probes_are_measured_before_and_after_the_soak(runs):
    measures = compared(runs)["measures"]
    for phase in ("before", "after"):
        assert measures[phase]["needles"]["n"] == 2
        assert measures[phase]["decode_c1"]["value"] > 0
        assert measures[phase]["decode_c2"]["value"] > 0
    assert measures["run"]["soak_served"] == {"hits": 2, "n": 2, "documents": 2, "design_effect": 1.0}
    assert len(compared(runs)["soak_seconds"]) == 2


def test_failures_are_counted_apart_and_never_scored(runs):
    said = compared(runs)
    assert said["not_answered"]["test"] == {"arithmetic: http 4xx": 2, "needle: skipped": 2}
    assert "arithmetic" not in said["measures"]["before"]


def test_a_person_reads_the_noise_floor_above_the_result_and_the_card_holds_both(runs, tmp_path):
    words = [
        "compare",
        runs["base"],
        runs["test"],
        *WITH,
        "--noise",
        runs["again"],
        "--card",
        tmp_path / "card.md",
    ]
    text = ask(*words).output
    assert text.index("Noise floor") < text.index("the test against the baseline") < text.index("Gates:")
    card = (tmp_path / "card.md").read_text()
    assert "noise floor: baseline against itself | 100.00 %" in card
    assert re.search(r"top1_agreement \| 0\.\d{4} \| .* \| FAIL", card)
    assert "rung 8666" in card


def test_a_noise_run_of_another_server_is_refused(runs):
    base, again = read_run(runs["base"]), read_run(runs["again"])
    test, noise = read_run(runs["test"]), replace(again, identity=replace(again.identity, rung="6666"))
    with pytest.raises(RunError, match=r"not of the baseline's server: rung"):
        compare(base, test, PROTOCOL, [], noise=noise)


def test_greedy_chains_part_at_an_index_and_are_no_gate(runs):
    said = compared(runs)
    assert said["greedy"]["chains"] == 2
    assert said["greedy"]["median_index"] is not None
    assert not any("greedy" in gate["gate"] for gate in said["gates"])


def test_a_variant_is_paired_by_mcnemar(runs):
    variant = compared(runs, "--variant", runs["again"])["variant"]
    scored = compared(runs)["scored"]
    assert variant["only_test"] == 0
    assert variant["only_variant"] == scored["positions"] - scored["agreeing"]
    assert variant["p"] < 1e-6


def test_a_cut_recording_goes_on_and_asks_nothing_twice(tmp_path):
    with replayed("parent") as replay:
        client = patient(replay.url)
        identity = ask_identity(client)
        items = [i for i in list_items(PROTOCOL, FROZEN, identity.max_model_len) if i.kind == "score"]
        start_run(tmp_path / "run", identity, PROTOCOL.digest, FROZEN.digest)
        recorder = Recorder(client, identity, tmp_path / "run")
        recorder.record(items[:4])
        with (tmp_path / "run" / "rows.jsonl").open("a") as file:
            file.write('{"id": "score/cut')
        with pytest.raises(RunError, match=r"rows\.jsonl:5: an incomplete row"):
            read_run(tmp_path / "run")
        replay.asked.clear()
        start_run(tmp_path / "run", identity, PROTOCOL.digest, FROZEN.digest)
        run = recorder.record(items[:6])
    assert len(replay.asked) == 2
    assert [row.id for row in run.rows.values()] == [item.id for item in items[:6]]


def test_a_resumed_recording_asks_only_what_is_missing_or_failed(tmp_path):
    with replayed("parent") as replay:
        client = patient(replay.url)
        identity = ask_identity(client)
        items = [i for i in list_items(PROTOCOL, FROZEN, identity.max_model_len) if i.kind == "score"][:6]
        start_run(tmp_path / "run", identity, PROTOCOL.digest, FROZEN.digest)
        replay.faults = ["ok", "empty", "ok"]
        Recorder(client, identity, tmp_path / "run").record(items[:3])
        assert [row.failure for row in read_run(tmp_path / "run").rows.values()] == [None, "empty", None]
        replay.asked.clear()
        run = Recorder(client, identity, tmp_path / "run").record(items)
        assert len(replay.asked) == 4
        assert all(row.ok for row in run.rows.values())


def test_two_recordings_never_write_to_one_folder(tmp_path):
    with replayed("parent") as replay, FileLock(tmp_path / "run" / "recording.lock"):
        result = ask("record", replay.url, "-o", tmp_path / "run", *WITH, "--only", "score")
    assert result.exit_code == 2
    assert "another recording is writing here" in result.output
    assert "/v1/completions" not in replay.asked


def test_a_changed_request_of_the_same_name_is_asked_again(tmp_path):
    with replayed("parent") as replay:
        client = patient(replay.url)
        identity = ask_identity(client)
        item = next(i for i in list_items(PROTOCOL, FROZEN, identity.max_model_len) if i.kind == "score")
        start_run(tmp_path / "run", identity, PROTOCOL.digest, FROZEN.digest)
        recorder = Recorder(client, identity, tmp_path / "run")
        recorder.record([item])
        replay.asked.clear()
        recorder.record([replace(item, body={**item.body, "prompt_logprobs": 3})])
        assert len(replay.asked) == 1


def test_a_gate_is_ruled_by_its_worst_phase():
    protocol = replace(PROTOCOL, gates=(Gate("replacement_characters", at_most=0),))
    phases = {"before": {"replacement_characters": Value(0)}, "after": {"replacement_characters": Value(2)}}
    assert [r.outcome for r in rule(protocol, phases)] == ["FAIL"]
    assert [r.outcome for r in rule(protocol, {"before": phases["before"], "after": {}})] == ["PASS"]
    assert [r.outcome for r in rule(protocol, {})] == ["NOT MEASURED"]


def test_a_server_that_answers_bit_for_bit_the_same_is_neutral_and_another_is_not(runs):
    gates = read_protocol("neutral").gates
    protocol = replace(PROTOCOL, gates=gates)
    items = list_items(PROTOCOL, FROZEN, 1024)
    again, test = (
        compare(read_run(runs["base"]), read_run(runs[n]), protocol, items) for n in ("again", "test")
    )
    assert [r.outcome for r in again.rulings] == ["PASS", "PASS"]
    assert [r.outcome for r in test.rulings] == ["FAIL", "FAIL"]


def test_a_run_of_another_protocol_is_not_judged_by_this_one(runs):
    base, test = read_run(runs["base"]), read_run(runs["test"])
    with pytest.raises(RunError, match="recorded with another protocol"):
        compare(base, replace(test, protocol="other"), PROTOCOL, [])
    with pytest.raises(RunError, match="asked different tokens"):
        compare(base, replace(test, tokens="other"), PROTOCOL, [])


def test_a_folder_of_another_server_is_refused_and_says_what_differs(runs, tmp_path):
    run = read_run(runs["base"])
    with pytest.raises(RunError, match=r"rung: '8666' against '6666'"):
        start_run(runs["base"], replace(run.identity, rung="6666"), run.protocol, run.tokens)
    with pytest.raises(RunError, match="protocol: "):
        start_run(runs["base"], run.identity, "another", run.tokens)


def test_a_row_of_another_identity_is_refused(runs, tmp_path):
    run = read_run(runs["base"])
    start_run(tmp_path / "mixed", run.identity, run.protocol, run.tokens)
    append_row(tmp_path / "mixed", replace(next(iter(run.rows.values())), identity="0" * 64))
    with pytest.raises(RunError, match="answered by another server"):
        read_run(tmp_path / "mixed")


def test_runs_of_another_protocol_are_not_compared(runs):
    result = ask("compare", runs["base"], runs["test"], "--protocol", "published", "--tokens", TOKENS)
    assert result.exit_code == 2
    assert "frozen for another protocol" in result.output


def checkpoint(folder: Path, digest: str) -> Path:
    (folder / ".shardmill").mkdir(parents=True, exist_ok=True)
    (folder / "shardmill.manifest.json").write_text(json.dumps({"self": digest}))
    return folder


def test_a_changed_checkpoint_makes_its_runs_stale(tmp_path):
    folder = checkpoint(tmp_path / "model", "a" * 64)
    with replayed("parent") as replay:
        ask("record", replay.url, "-o", tmp_path / "run", *WITH, "--only", "score", "--checkpoint", folder)
    assert ask("stale", tmp_path / "run", "--checkpoint", folder).exit_code == 0
    checkpoint(folder, "b" * 64)
    result = ask("stale", tmp_path / "run", "--checkpoint", folder)
    assert (result.exit_code, "stale: recorded with another checkpoint" in result.output) == (1, True)
    refused = ask("compare", tmp_path / "run", tmp_path / "run", *WITH, "--checkpoint", folder)
    assert "is stale" in refused.output
    with replayed("parent") as replay:
        words = [
            "record",
            replay.url,
            "-o",
            tmp_path / "run",
            *WITH,
            "--only",
            "score",
            "--checkpoint",
            folder,
        ]
        assert "holds a run of another server or protocol" in ask(*words).output


def test_a_checkpoint_without_a_manifest_is_bound_by_its_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    before = checkpoint_digest(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert before.startswith("files:")
    assert checkpoint_digest(tmp_path) != before


SPECULATING = 'vllm:spec_decode_num_drafts_total{engine="0"} 10\n'


def test_scoring_is_refused_while_a_draft_is_on(tmp_path):
    with replayed("parent") as replay:
        replay.metrics += SPECULATING
        result = ask("record", replay.url, "-o", tmp_path / "run", *WITH)
    assert result.exit_code == 2
    assert "speculative decoding on" in result.output
    assert not (tmp_path / "run").exists()


def test_scoring_with_a_draft_is_allowed_once_equality_is_shown(runs):
    with replayed("parent") as replay:
        replay.metrics += SPECULATING
        identity = ask_identity(patient(replay.url))
        items = list_items(PROTOCOL, FROZEN, identity.max_model_len)
        check_speculation(patient(replay.url), identity, items, read_run(runs["base"]))
        with pytest.raises(SpeculationError, match="change with speculation on"):
            check_speculation(patient(replay.url), identity, items, read_run(runs["test"]))


def test_the_drafts_acceptance_is_what_the_counters_gain_by_each_request(tmp_path):
    """Each answer of this server adds a hundred drafts and eighty accepted tokens to its counters."""
    with replayed("parent") as replay:
        page = replay.metrics

        def count() -> None:
            times = len(replay.asked)
            replay.metrics = (
                page
                + SPECULATING.replace("10", str(10 + 100 * times))
                + (
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {9 + 80 * times}\n'
                )
            )

        count()
        replay.answered = count
        client = patient(replay.url)
        identity = ask_identity(client)
        start_run(tmp_path / "run", identity, PROTOCOL.digest, FROZEN.digest)
        items = [i for i in list_items(PROTOCOL, FROZEN, 1024) if i.kind == "greedy"]
        run = record_all(Recorder(client, identity, tmp_path / "run"), items)
    assert identity.speculation
    assert [row.counters for row in run.rows.values()] == [{"drafts": 100.0, "position 0": 80.0}] * 4
    measured = run_measures(run)["mtp_acceptance"]
    assert (measured.by_document, measured.sizes) == ((160, 160), (200, 200))


@pytest.mark.parametrize("line", ["name{} abc", "vllm:spec_decode_num_drafts_total NaN", "<html>"])
def test_a_bad_metrics_page_is_refused_by_address_and_line(tmp_path, line):
    with replayed("parent") as replay:
        replay.metrics = f"plain 3\n{line}\n"
        words = ["record", replay.url, "-o", tmp_path / "run", *WITH, "--only", "greedy"]
        result = ask(*words)
    assert result.exit_code == 2
    assert f"{replay.url}/metrics: " in result.output


def test_tokens_are_frozen_by_the_servers_own_tokenizer(tmp_path):
    with replayed("parent") as replay:
        result = ask("freeze", replay.url, "--protocol", SMALL, "-o", tmp_path / "tokens.json")
    assert result.exit_code == 0
    assert (tmp_path / "tokens.json").read_text() == Path(TOKENS).read_text()


def test_the_identity_holds_version_limit_and_cache_flags(runs):
    identity = read_run(runs["base"]).identity
    assert (identity.model, identity.version, identity.max_model_len) == ("small", "0.32.0", 1024)
    assert identity.flags["enable_prefix_caching"] == "True"
    assert identity.rung == "8666"


def test_every_row_carries_the_runs_identity(runs):
    run = read_run(runs["test"])
    assert {row.identity for row in run.rows.values()} == {run.identity.digest}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["record", "http://127.0.0.1:9", "-o", "x", *WITH], "is the server up"),
        (["record", "http://127.0.0.1:9", "-o", "x", "--protocol", SMALL], "make them with"),
        (["record", "http://127.0.0.1:9", "-o", "x", *WITH, "--only", "scores"], "'scores' is not one of"),
        (["record", "http://127.0.0.1:9", "-o", "x", *WITH, "--flag", "tp"], "give NAME=VALUE"),
        (["record", "file:///etc", "-o", "x", *WITH], "give the server's address"),
        (["compare", "nowhere", "nowhere", *WITH], "no run here"),
        (["plan", "--protocol", "no-such"], "shipped are default, neutral, published"),
        (["plan", "--truth", "0.9"], "never passes"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(words, message):
    result = ask(*words)
    assert result.exit_code == 2
    assert message in result.output


def test_comparing_without_scipy_names_the_extra(runs, monkeypatch):
    monkeypatch.setattr("shardmill.verify.accept.commands.find_spec", lambda name: None)
    result = ask("compare", runs["base"], runs["test"], *WITH)
    assert result.exit_code == 2
    assert "pip install scipy" in result.output


def test_plan_prints_the_published_figures_with_their_intervals():
    text = ask("plan", "--protocol", "published", "--truth", "0.9557").output
    assert "259/271 = 95.57 %, interval 92.4-97.5" in text
    assert "11,915 positions" in text
