"""Runs that are incomplete, edited or nonsense: refused by file and line, or undecided; never a pass or a traceback."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardmill.verify.accept.commands import accept
from shardmill.verify.accept.identity import Identity
from shardmill.verify.accept.items import list_items
from shardmill.verify.accept.protocol import ProtocolError, read_protocol
from shardmill.verify.accept.rows import Row
from shardmill.verify.accept.runs import request_digest, start_run
from shardmill.verify.accept.tokens import Tokens, text_key, write_tokens

pytest.importorskip("scipy", reason="comparing needs the extra `accept`")

COUNT, LENGTH, TOP_K = 24, 30, 3
SCORED = LENGTH - 4
HEAD = f"""
name = "small"
[scoring]
top_k = {TOP_K}
skip_tokens = 4
[[gates]]
metric = "top1_agreement"
at_least = 0.9
[[gates]]
metric = "mean_kl"
at_most = 0.05
"""
DOCUMENTS = "".join(f'[[documents]]\nid = "d{i}"\ntext = "text {i}"\n' for i in range(COUNT))
Mangle = Callable[[list[Any]], list[Any]]


def entry(token: int, best: int) -> dict[str, dict[str, float]]:
    """A first choice of 0.8, two others, and the text's own token."""
    found = {str(best): {"logprob": math.log(0.8), "rank": 1}}
    found |= {str(2000 + j): {"logprob": math.log(0.085), "rank": j + 2} for j in range(2)}
    found.setdefault(str(token), {"logprob": math.log(0.02), "rank": 9})
    return found


class Bench:
    """A protocol, its tokens and runs of it in a folder."""

    def __init__(self, folder: Path, more: str = "") -> None:
        self.folder = folder
        self.path = folder / "p.toml"
        self.path.write_text(more + HEAD + DOCUMENTS)
        self.protocol = read_protocol(str(self.path))
        rnd = random.Random(1)
        texts = {
            text_key(f"text {i}"): tuple(rnd.randrange(1000) for _ in range(LENGTH)) for i in range(COUNT)
        }
        self.tokens = Tokens(self.protocol.digest, texts)
        write_tokens(folder / "t.json", self.tokens)

    def run(
        self, name: str, answered: int = COUNT, mangle: Mangle = list, wrong: bool = False, at: str = ""
    ) -> Path:
        """The first `answered` documents were answered, the others timed out; every tenth first choice is another."""
        folder = self.folder / (at or name)
        who = Identity("m", "0.33.0", 4096, {}, False, name, "", "")
        start_run(folder, who, self.protocol.digest, self.tokens.digest)
        rows: list[Any] = []
        for i, item in enumerate(list_items(self.protocol, self.tokens, 4096)):
            prompt = item.body["prompt"]
            bests = [1501 if wrong else 1500 if place % 10 == 0 else t for place, t in enumerate(prompt)]
            entries = mangle([None] + [entry(t, b) for t, b in zip(prompt[1:], bests[1:], strict=True)])
            answer = {"choices": [{"prompt_logprobs": entries}]} if i < answered else None
            failure = None if i < answered else "timeout"
            row = Row(item.id, item.kind, request_digest(item), who.digest, answer, failure, "", 1, 1.0 + i)
            rows.append(asdict(row))
        write(folder, rows)
        return folder

    def compare(self, base: Path, test: Path, *more: str):
        words = ["compare", str(base), str(test), "--protocol", str(self.path)]
        words += ["--tokens", str(self.folder / "t.json"), *more]
        return CliRunner().invoke(accept, words, catch_exceptions=False)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def write(folder: Path, rows: list[Any]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_equal_answers_of_two_servers_pass(bench):
    result = bench.compare(bench.run("a"), bench.run("b"))
    assert result.exit_code == 0
    assert result.output.startswith("PASS")


@pytest.mark.parametrize("answered", [0, 1, 3, 23])
def test_what_was_not_answered_is_undecided_and_told_in_the_verdict(bench, answered):
    result = bench.compare(bench.run("a"), bench.run("b", answered))
    assert result.exit_code == 1
    head = result.output.splitlines()
    assert head[0].startswith("INCONCLUSIVE")
    assert head[1] == f"Not answered by the test, in no score: score: timeout {COUNT - answered}"


def test_answers_that_only_the_baseline_lacks_count_as_well(bench):
    result = bench.compare(bench.run("a", 20), bench.run("b"), "--json")
    said = json.loads(result.stdout)
    assert said["verdict"] == "INCONCLUSIVE"
    assert said["not_answered"] == {"baseline": {"score: timeout": 4}, "test": {}}
    gate = said["gates"][0]
    assert (gate["outcome"], gate["answered"], gate["asked"]) == ("INCONCLUSIVE", 20 * SCORED, 24 * SCORED)
    assert "520 of 624 positions were answered, at least 98% are needed" in gate["why"]


def test_rows_that_were_taken_away_are_not_answered(bench):
    base, test = bench.run("a"), bench.run("b")
    write(test, rows_of(test)[:-2])
    result = bench.compare(base, test)
    assert result.exit_code == 1
    assert "score: not recorded 2" in result.output.splitlines()[1]


def test_a_protocol_may_ask_for_fewer_answers(tmp_path):
    bench = Bench(tmp_path, "answered_at_least = 0.9\n")
    result = bench.compare(bench.run("a"), bench.run("b", 22))
    assert result.output.startswith("PASS")
    assert "score: timeout 2" in result.output.splitlines()[1]


def test_a_run_is_not_compared_with_itself(bench):
    base = bench.run("a")
    result = bench.compare(base, base)
    assert (result.exit_code, "are one recording" in result.output) == (2, True)


def test_a_copy_of_a_run_is_the_same_recording(bench):
    base, copy = bench.run("a"), bench.folder / "copy"
    copy.mkdir()
    for name in ("run.json", "rows.jsonl"):
        (copy / name).write_bytes((base / name).read_bytes())
    assert bench.compare(base, copy).exit_code == 2


def test_a_tail_of_other_tokens_does_not_pass_as_no_divergence(bench):
    def other(entries: list[Any]) -> list[Any]:
        return [
            e and {(str(int(k) + 5000) if k in ("2000", "2001") else k): v for k, v in e.items()}
            for e in entries
        ]

    result = bench.compare(bench.run("a"), bench.run("b", mangle=other), "--json")
    assert json.loads(result.stdout)["scored"]["kl"]["mean"] > 0.05
    assert result.exit_code == 1


def test_a_first_choice_that_the_other_does_not_show_is_told_in_the_verdict(bench):
    result = bench.compare(bench.run("a"), bench.run("b", wrong=True))
    assert result.output.startswith("FAIL")
    assert "First choice outside the other's top K: at 624 of 624 positions" in result.output


def at(place: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    """Change the first shown token of an entry of the first row."""

    def edit(row: dict[str, Any]) -> None:
        first = next(iter(entries(row)[place].values()))
        first.update(changes)

    return edit


def entries(row: dict[str, Any]) -> list[Any]:
    return row["answer"]["choices"][0]["prompt_logprobs"]


def set_(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda row: row.update(changes)


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a log probability of NaN": (at(5, logprob=math.nan), "NaN is not JSON"),
    "a log probability of -inf": (at(5, logprob=-math.inf), "-Infinity is not JSON"),
    "a log probability above 0": (at(5, logprob=3.0), "expected a log probability, got 3.0"),
    "a log probability of text": (at(5, logprob="x"), "expected a log probability, got 'x'"),
    "a log probability of true": (at(5, logprob=True), "expected a log probability, got True"),
    "a bad number in what is not scored": (at(2, logprob=3.0), "entry 2: expected a log probability"),
    "no rank": (lambda row: [v.pop("rank") for v in entries(row)[5].values()], "expected a rank"),
    "ranks exchanged": (
        lambda row: [v.update(rank={1: 2, 2: 1}.get(v["rank"], v["rank"])) for v in entries(row)[5].values()],
        "rank 1 is not the likeliest",
    ),
    "more than all probability": (at(5, logprob=0.0), "add to more than 1"),
    "an entry of null": (lambda row: entries(row).__setitem__(5, None), "entry 5 lacks"),
    "an entry that is a number": (lambda row: entries(row).__setitem__(5, 7), "entry 5 lacks"),
    "an entry that is a list": (lambda row: entries(row).__setitem__(5, [1]), "entry 5 lacks"),
    "a token that is no number": (
        lambda row: entries(row)[5].update(x={"logprob": -9.0, "rank": 30}),
        "'x' is no token id",
    ),
    "an entry too few": (lambda row: entries(row).pop(), f"{LENGTH - 1} entries for {LENGTH} tokens"),
    "an entry too many": (lambda row: entries(row).append(None), f"{LENGTH + 1} entries for {LENGTH} tokens"),
    "entries that are a number": (
        lambda row: row["answer"]["choices"][0].update(prompt_logprobs=5),
        "0 entries",
    ),
    "fewer choices than asked": (
        lambda row: [e.pop("2000") for e in entries(row) if e],
        f"shows 2 of the {TOP_K} likeliest tokens",
    ),
    "an answer that is a number": (set_(answer=5), "'answer': expected null or an object, got 5"),
    "an answer without choices": (set_(answer={}), "0 entries"),
    "choices that are a number": (set_(answer={"choices": 5}), "0 entries"),
    "no answer and no failure": (set_(answer=None), "no failure, and no answer either"),
    "seconds that are text": (set_(seconds="x"), "'seconds': expected a number from 0 on, got 'x'"),
    "seconds below 0": (set_(seconds=-1), "'seconds': expected"),
    "attempts that are true": (set_(attempts=True), "'attempts': expected a count, got True"),
    "a failure of no kind": (set_(failure="tired"), "'failure': expected"),
    "a kind of no kind": (set_(kind="scores"), "'kind': expected"),
    "an id that is a list": (set_(id=["a"]), "'id': expected a text"),
    "a token twice": (
        lambda row: entries(row)[5].update(
            {f"0{next(iter(entries(row)[5]))}": {"logprob": -9.0, "rank": 30}}
        ),
        "entry 5 shows one token twice",
    ),
    "counters beyond any count": (set_(counters={"drafts": 1e300}), "'counters': expected"),
    "counters that are text": (set_(counters={"drafts": "5"}), "'counters': expected"),
    "another server": (set_(identity="0" * 64), "was answered by another server"),
    "another request": (set_(request="0" * 64), "the answer to another request"),
    "an item that is not asked": (set_(id="score/d99/0"), "does not ask this"),
    "an item of another kind": (set_(kind="greedy"), "does not ask this"),
    "an unknown key": (set_(x=1), "has the unknown key 'x'"),
    "a key missing": (lambda row: row.pop("detail"), "lacks 'detail'"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_row_is_refused_by_file_and_line(bench, name):
    edit, message = EDITS[name]
    base, test = bench.run("a"), bench.run("b")
    rows = rows_of(test)
    edit(rows[COUNT - 2])
    write(test, rows)
    result = bench.compare(base, test)
    assert result.exit_code == 2, result.output
    assert f"{test}/rows.jsonl:{COUNT - 1}: " in result.output
    assert message in result.output


@pytest.mark.parametrize("more", ["", "--noise", "--variant"])
def test_every_run_of_a_comparison_is_read_as_strictly(bench, more):
    base, test, edited = (
        bench.run("a"),
        bench.run("b"),
        bench.run("c" if more == "--variant" else "a", at="x"),
    )
    rows = rows_of(edited)
    entries(rows[0]).pop()
    write(edited, rows)
    words = [base, test, more, str(edited)] if more else [edited, test]
    result = bench.compare(*words)
    assert (result.exit_code, f"{edited}/rows.jsonl:1: " in result.output) == (2, True)


FILES: dict[str, tuple[str, bytes, str]] = {
    "rows that are not UTF-8": ("rows.jsonl", b"\xff\xfe\n", "rows.jsonl:1: not a row: not UTF-8"),
    "a deeply nested row": (
        "rows.jsonl",
        b"[" * 100_000 + b"\n",
        "rows.jsonl:1: not a row: nested too deeply",
    ),
    "a row that is a list": ("rows.jsonl", b"[]\n", "rows.jsonl:1: not a row: expected an object"),
    "an empty line": ("rows.jsonl", b"\n", "rows.jsonl:1: not a row"),
    "a key twice": ("rows.jsonl", b'{"id": "a", "id": "b"}\n', "the key 'id' twice"),
    "an incomplete row": ("rows.jsonl", b'{"id": "sc', "rows.jsonl:1: an incomplete row; run `record` again"),
    "notes that are no JSON": ("notes.json", b"{", "notes.json: cannot be read"),
    "notes that are a list": ("notes.json", b"[]", "notes.json: expected one JSON object, got list"),
    "notes with NaN": ("notes.json", b'{"least_free_mib": NaN}', "notes.json: cannot be read: NaN"),
    "notes with text": ("notes.json", b'{"least_free_mib": "x"}', "must be a number"),
    "a head that is no JSON": ("run.json", b"{", "run.json: cannot be read"),
    "a head that is a list": ("run.json", b"[]", "run.json: not as `record` writes it"),
    "a head of another format": ("run.json", b'{"format": "x"}', "run.json: format 'x'; this version reads"),
    "a head without an identity": (
        "run.json",
        b'{"format": "shardmill/accept-run/1", "identity": 5, "protocol": "", "tokens": ""}',
        "run.json: identity: expected an object, got 5",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_record_did_not_write_is_refused_by_name(bench, name):
    file, data, message = FILES[name]
    base, test = bench.run("a"), bench.run("b")
    (test / file).write_bytes(data)
    result = bench.compare(base, test)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", ["m"]),
        ("max_model_len", "4096"),
        ("max_model_len", 1),
        ("max_model_len", -7),
        ("max_model_len", 10**30),
        ("max_model_len", True),
        ("flags", {"a": 1}),
        ("rung", None),
    ],
)
def test_an_identity_of_another_type_is_refused_by_key(bench, key, value):
    base, test = bench.run("a"), bench.run("b")
    head = json.loads((test / "run.json").read_text())
    head["identity"][key] = value
    (test / "run.json").write_text(json.dumps(head))
    result = bench.compare(base, test)
    assert (result.exit_code, f"run.json: identity.{key}" in result.output) == (2, True)


def test_answers_appended_after_the_true_ones_are_refused(bench):
    base, test = bench.run("a"), bench.run("b", wrong=True)
    mine, theirs = rows_of(test), rows_of(base)
    write(test, mine + [{**row, "identity": mine[0]["identity"]} for row in theirs])
    result = bench.compare(base, test)
    assert result.exit_code == 2
    assert f"rows.jsonl:{COUNT + 1}: score/d0/0 was answered on line 1 already" in result.output


def test_a_failure_that_was_asked_again_counts_by_its_last_row(bench):
    base, test = bench.run("a"), bench.run("b")
    rows = rows_of(test)
    write(test, [{**rows[0], "answer": None, "failure": "timeout"}, *rows])
    assert bench.compare(base, test).exit_code == 0


def test_rows_that_are_a_folder_are_refused(bench):
    base, test = bench.run("a"), bench.run("b")
    (test / "rows.jsonl").unlink()
    (test / "rows.jsonl").mkdir()
    result = bench.compare(base, test)
    assert (result.exit_code, "rows.jsonl: not a file" in result.output) == (2, True)


def test_tokens_of_another_tokenizer_than_the_runs_are_refused(bench):
    base, test = bench.run("a"), bench.run("b")
    tokens = json.loads((bench.folder / "t.json").read_text())
    tokens["ids"] = {key: [token + 1 for token in ids] for key, ids in tokens["ids"].items()}
    (bench.folder / "t.json").write_text(json.dumps(tokens))
    result = bench.compare(base, test)
    assert (result.exit_code, f"{base}: was asked other tokens than these" in result.output) == (2, True)


@pytest.mark.parametrize("variant", ["a", "b"])
def test_a_variant_is_a_recording_of_its_own(bench, variant):
    base, test = bench.run("a"), bench.run("b")
    result = bench.compare(base, test, "--variant", str(bench.folder / variant))
    assert (result.exit_code, "are one recording" in result.output) == (2, True)


@pytest.mark.parametrize("sentence", ["no number", "{0} {x}", "{number:>999999999}"])
def test_a_needle_without_its_number_is_refused(tmp_path, sentence):
    (tmp_path / "p.toml").write_text(f'name = "x"\n[probes]\nneedle_sentence = "{sentence}"\n')
    with pytest.raises(ProtocolError, match=r"p\.toml: probes\.needle_sentence must hold"):
        read_protocol(str(tmp_path / "p.toml"))


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b'{"protocol": 1, "ids": {"a": ["x"]}}', b'{"protocol": "p"}', b"\xff"]
)
def test_tokens_that_freeze_did_not_write_are_refused(bench, data):
    base, test = bench.run("a"), bench.run("b")
    (bench.folder / "t.json").write_bytes(data)
    result = bench.compare(base, test)
    assert (result.exit_code, "t.json: " in result.output) == (2, True)
