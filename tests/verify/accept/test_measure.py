"""Probes by themselves: what is asked, and what an answer counts for."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.verify.accept.client import Reply
from shardmill.verify.accept.diverge import diverge
from shardmill.verify.accept.gates import judge_proportion
from shardmill.verify.accept.identity import Identity
from shardmill.verify.accept.items import Item, filler_ids, list_items
from shardmill.verify.accept.measure import (
    Median,
    Proportion,
    Value,
    probe_measures,
    replacement_count,
    run_measures,
    worst_gram,
)
from shardmill.verify.accept.pictures import SIDE, draw_pictures
from shardmill.verify.accept.protocol import (
    Probes,
    Protocol,
    ProtocolError,
    needle_number,
    parse_protocol,
    read_protocol,
)
from shardmill.verify.accept.record import fault_of, keep
from shardmill.verify.accept.rows import Row
from shardmill.verify.accept.runs import Run
from shardmill.verify.accept.score import read_positions
from shardmill.verify.accept.tokens import Tokens, text_key

WORDS = [
    "choices",
    "text",
    "message",
    "content",
    "token_ids",
    "finish_reason",
    "prompt_logprobs",
    "logprobs",
    "top_logprobs",
    "completion_tokens",
    "prompt_tokens",
    "logprob",
    "rank",
    "1",
    "2",
]
WHO = Identity("m", "v", 0, {}, False, "", "", "")


def protocol(**probes: object) -> Protocol:
    return replace(parse_protocol("here", {"name": "p"}), probes=Probes(**probes))


def frozen(p: Protocol) -> Tokens:
    """A token a character."""
    return Tokens(p.digest, {text_key(text): tuple(map(ord, text)) for text in p.texts()})


def row(
    id_: str, kind: str, text: str = "", ids: list[int] | None = None, seconds: float = 1.0, **usage: int
) -> Row:
    answer = {"choices": [{"text": text, "token_ids": ids or []}], "usage": usage}
    return Row(id_, kind, "", WHO.digest, answer, None, "", 1, seconds)


def run(*rows: Row, **notes: object) -> Run:
    return Run(None, WHO, "", "", notes, {r.id: r for r in rows})


@pytest.mark.parametrize(
    ("tokens", "worst"), [([], 0), ([1, 2, 3], 0), ([1, 2, 3, 4], 1), ([1, 2, 3, 4] * 12, 12), ([7] * 15, 12)]
)
def test_the_worst_4gram_is_the_count_of_the_most_frequent(tokens, worst):
    assert worst_gram(tokens) == worst


def test_a_generation_shorter_than_2700_tokens_shows_no_repetition():
    measured = [
        probe_measures(
            run(row("repetition/before/9", "repetition", ids=list(range(n)))), protocol(), [], "before"
        )
        for n in (2699, 2700)
    ]
    assert measured == [{}, {"worst_4gram": Value(1)}]


def test_a_replacement_character_at_the_very_end_is_the_token_limits():
    assert [replacement_count(t) for t in ("안녕", "안\ufffd녕", "안녕\ufffd", "\ufffd안\ufffd\ufffd")] == [
        0,
        1,
        0,
        1,
    ]


def test_needles_lie_at_their_depths_in_a_prompt_of_exactly_the_length():
    p = protocol(
        filler="abcdefg",
        needle_lengths=(200,),
        needle_depths=(0.0, 0.5, 1.0),
        needle_sentence="<{number}>",
        needle_question="?",
        needle_tokens=8,
    )
    (item,) = [i for i in list_items(p, frozen(p), 0) if i.kind == "needle"]
    text = "".join(map(chr, item.body["prompt"]))
    assert len(text) == 200
    places = [text.index(f"<{needle_number(p.probes, i)}>") for i in range(3)]
    assert places[0] == 0
    assert places[1] == pytest.approx(100, abs=10)
    assert text.endswith(f"<{needle_number(p.probes, 2)}>?")


def test_another_salt_hides_other_numbers():
    assert needle_number(Probes(needle_salt="1"), 0) != needle_number(Probes(needle_salt="2"), 0)


def test_a_needle_is_found_with_or_without_its_commas():
    p = protocol(needle_depths=(0.1, 0.9), needle_sentence="{number}")
    first = needle_number(p.probes, 0)
    measured = probe_measures(run(row("needle/before/9", "needle", f"It is {first:,}.")), p, [], "before")
    assert measured["needles"] == Proportion((1,), (2,))


def test_a_prompt_that_the_server_cannot_hold_is_skipped_and_says_why():
    p = protocol(filler="abc", repetition_contexts=(500,), repetition_prompt="!", repetition_tokens=100)
    items = list_items(p, frozen(p), limit=550)
    assert [i.too_long for i in items] == ["600 tokens exceed the server's 550"]
    assert [i.too_long for i in list_items(p, frozen(p), limit=600)] == [""]


def test_windows_are_cut_to_the_servers_limit_and_cover_the_document_once():
    data = {
        "documents": [{"id": "d", "token_ids": list(range(100))}],
        "scoring": {"window_tokens": 64, "skip_tokens": 1},
    }
    p = parse_protocol("here", data)
    windows = [item.body["prompt"] for item in list_items(p, Tokens(p.digest, {}), limit=41)]
    assert [len(w) for w in windows] == [40, 40, 20]
    assert [token for window in windows for token in window] == list(range(100))


def test_each_soak_prompt_begins_elsewhere_so_that_no_cached_prefix_serves_it():
    p = protocol(filler="abcdefghijklmnopqrstuvwxyz", soak_prompts=3, soak_tokens=1000)
    prompts = [i.body["prompt"] for i in list_items(p, frozen(p), 0) if i.kind == "soak"]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 3
    assert {len(prompt) for prompt in prompts} == {1000}


def test_probes_come_before_and_after_a_soak_and_once_without():
    asked = {"greedy_prompts": ("x",), "filler": "abc"}
    with_soak = protocol(**asked, soak_prompts=1, soak_tokens=10)
    assert [i.id for i in list_items(with_soak, frozen(with_soak), 0)] == [
        "greedy/before/0",
        "soak/0",
        "greedy/after/0",
    ]
    assert [i.id for i in list_items(protocol(**asked), frozen(protocol(**asked)), 0)] == ["greedy/before/0"]


def test_filler_repeats_from_where_it_is_told():
    p = protocol(filler="abc")
    assert "".join(map(chr, filler_ids(frozen(p), "abc", 7, turn=1))) == "bcabcab"


def test_speed_is_all_tokens_over_wall_time_without_the_warm_up():
    p = protocol(speed_rounds=3, speed_warm_up=1, speed_tokens=100, speed_concurrency=(1, 4), filler="a")
    items = list_items(p, frozen(p), 0)
    seconds = {0: 50.0, 1: 1.0, 2: 2.0, 3: 4.0}
    rows = [
        row(f"speed/before/c1/{i}", "speed", seconds=s, completion_tokens=100) for i, s in seconds.items()
    ]
    rows += [
        row(f"speed/before/c4/{i}", "speed", seconds=s, completion_tokens=100, all_tokens=400)
        for i, s in seconds.items()
    ]
    measured = probe_measures(run(*rows), p, items, "before")
    assert measured["decode_c1"] == Median((100.0, 50.0, 25.0))
    assert measured["decode_c4"].value == 200.0


def test_a_picture_that_adds_no_prompt_tokens_shows_that_vision_is_off():
    p = protocol(vision_pictures=2)
    items = list_items(p, frozen(p), 0)
    seen = [row(f"vision/before/{i}", "vision", "red", prompt_tokens=281) for i in (0, 1)]
    blind = row("vision/before/blind", "vision", prompt_tokens=23)
    measured = probe_measures(run(*seen, blind), p, items, "before")
    assert measured["vision_prompt_tokens"] == Value(258)
    off = [replace(r, answer={**r.answer, "usage": {"prompt_tokens": 23}}) for r in seen]
    assert probe_measures(run(*off, blind), p, items, "before")["vision_prompt_tokens"] == Value(0)


@pytest.mark.parametrize(
    ("reply", "refused"),
    [
        (
            Reply(None, "http 4xx", "400: at most 1 image", 1, 0.1),
            {"vision_limit_refused": Proportion((1,), (1,))},
        ),
        (Reply({"choices": [{}]}, None, "", 1, 0.1), {"vision_limit_refused": Proportion((0,), (1,))}),
        (Reply(None, "timeout", "", 3, 9.0), {}),
    ],
)
def test_one_picture_more_than_allowed_must_be_refused(reply, refused):
    item = Item("vision_limit/before", "vision_limit", "/v1/chat/completions", {})
    assert probe_measures(run(keep(item, WHO.digest, reply)), protocol(), [item], "before") == refused


def test_an_answer_cut_by_the_token_limit_is_truncated_not_wrong():
    item = Item("arithmetic/before", "arithmetic", "/v1/chat/completions", {}, {"answer": "391"})
    body = {"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": 5}}
    assert fault_of(item, Reply(body, None, "", 1, 0.1))[0] == "truncated"


def drafted(id_: str, request: str, drafts: float, first: float, second: float) -> Row:
    counters = {"drafts": drafts, "position 0": first, "position 1": second}
    return replace(row(id_, "greedy"), request=request, counters=counters)


def test_acceptance_is_per_position_and_prompt_and_the_watermark_is_kept():
    """The same prompt asked again, after the soak, is no further document."""
    rows = (
        drafted("greedy/before/0", "a", 100, 90, 40),
        drafted("greedy/before/1", "b", 50, 45, 25),
        drafted("greedy/after/0", "a", 50, 45, 25),
    )
    measured = run_measures(run(*rows, least_free_mib=270))
    assert measured["mtp_acceptance"] == Proportion((135, 45), (150, 50))
    assert measured["mtp_acceptance_1"] == Proportion((65, 25), (150, 50))
    assert measured["least_free_mib"] == Value(270.0)


def test_greedy_chains_part_where_the_first_token_differs_with_the_margin_there():
    def chain(ids: list[int], tops: list[dict[str, float]]) -> Row:
        r = row("greedy/before/0", "greedy", ids=ids)
        choice = {**r.answer["choices"][0], "logprobs": {"top_logprobs": tops}}
        return replace(r, answer={"choices": [choice]})

    base = chain([5, 6, 7], [{"a": -0.1, "b": -2.0}, {"a": -0.2, "b": -0.5}, {"a": -0.1, "b": -3.0}])
    said = diverge(run(base), run(chain([5, 9, 7], [])))
    assert (said.chains, said.identical, said.median_index) == (1, 0, 1)
    assert said.margins == pytest.approx((0.3,))
    assert diverge(run(base), run(base)).median_index is None


def test_pictures_are_the_same_bytes_for_a_seed_and_valid_png():
    pictures = draw_pictures(6, seed=3)
    assert [p.url for p in pictures] == [p.url for p in draw_pictures(6, seed=3)]
    assert {p.question.split()[0] for p in pictures} == {"What", "How", "Which"}
    for picture in pictures:
        data = base64.b64decode(picture.url.removeprefix("data:image/png;base64,"))
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        (width, height) = struct.unpack(">II", data[16:24])
        length = struct.unpack(">I", data[33:37])[0]
        assert (width, height) == (SIDE, SIDE)
        assert len(zlib.decompress(data[41 : 41 + length])) == SIDE * (1 + 3 * SIDE)


def test_a_drawn_count_is_the_number_of_squares():
    picture = draw_pictures(2, seed=9)[1]
    data = base64.b64decode(picture.url.removeprefix("data:image/png;base64,"))
    length = struct.unpack(">I", data[33:37])[0]
    rows = np.frombuffer(zlib.decompress(data[41 : 41 + length]), np.uint8).reshape(SIDE, 1 + 3 * SIDE)
    blue = (rows[:, 1:].reshape(SIDE, SIDE, 3) == (30, 60, 200)).all(axis=2)
    assert int(blue.sum()) == int(picture.answer) * 40 * 40


@pytest.mark.parametrize("name", ["default", "neutral", "published"])
def test_the_shipped_protocols_are_read_and_every_gate_has_a_limit(name):
    p = read_protocol(name)
    assert p.gates
    assert p.summary


def test_the_default_protocol_has_documents_enough_that_each_of_its_gates_can_pass():
    """64: its strictest gate, flips of at most 2 %, cannot pass with 40."""
    p = read_protocol("default")
    assert len(p.documents) == 64
    for gate in p.gates:
        count = p.probes.vision_pictures if gate.metric == "vision" else len(p.documents)
        perfect = count * [30 if gate.at_least is not None else 0]
        assert judge_proportion(gate, perfect, [30] * count).outcome == "PASS", gate


def test_the_neutral_protocol_has_the_default_documents_and_its_own_gates():
    default, neutral = read_protocol("default"), read_protocol("neutral")
    assert neutral.documents == default.documents
    assert neutral.probes == Probes()
    assert [str(gate) for gate in neutral.gates] == ["identical_positions >= 1", "max_logprob_delta <= 0"]
    assert neutral.digest != default.digest


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"scorings": {}}, "'scorings' is not a key"),
        ({"scoring": {"top_k": 50}}, "top_k must be 1 to 20"),
        ({"scoring": {"window_tokens": 4, "skip_tokens": 16}}, "must exceed skip_tokens"),
        ({"probes": {"nonsense": 1}}, r"probes\.nonsense is not known"),
        ({"gates": [{"metric": "needles"}]}, "needs one of at_least and at_most"),
        (
            {"gates": [{"metric": "needels", "at_least": 1.0}]},
            "'needels' is no metric; known are top1_agreement",
        ),
        ({"gates": [{"metric": "needles", "at_least": float("nan")}]}, "needs a finite limit"),
        ({"gates": [{"metric": "needles", "at_least": "1"}]}, r"gates\.at_least: expected float, got '1'"),
        ({"gates": [{"metric": "needles", "at_least": 1.0, "confidence": 2.0}]}, "confidence between"),
        ({"gates": 5}, "gates must be a list of tables"),
        ({"answered_at_least": 0.0}, "answered_at_least must be above 0"),
        ({"answered_at_least": "all"}, "answered_at_least: expected float"),
        ({"seed": "x"}, "seed: expected int"),
        ({"probes": {"greedy_prompts": [5]}}, r"probes\.greedy_prompts: expected str, got 5"),
        (
            {"documents": [{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]},
            "two documents have the id 'a'",
        ),
        ({"documents": [{"id": "a", "token_ids": [1, "b"]}]}, "expected int, got 'b'"),
        ({"gates": [{"at_least": 1.0}]}, "gates: "),
        ({"documents": ["text"]}, "documents must be a table"),
    ],
)
def test_a_faulty_protocol_is_refused_by_key(data, message):
    with pytest.raises(ProtocolError, match=message):
        parse_protocol("here.toml", data)


def test_a_changed_document_changes_the_protocols_digest():
    digests = {parse_protocol("x", {"documents": [{"id": "a", "text": t}]}).digest for t in ("one", "two")}
    assert len(digests) == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3000) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)
HOSTILE = st.fixed_dictionaries({"choices": st.lists(JSON, max_size=2) | JSON, "usage": JSON})
KINDS = (
    "score",
    "greedy",
    "unicode",
    "repetition",
    "needle",
    "arithmetic",
    "vision",
    "vision_limit",
    "speed",
    "soak",
)


@given(body=HOSTILE, kind=st.sampled_from(KINDS))
def test_whatever_a_server_answers_is_a_fault_or_can_be_measured(body, kind):
    p = protocol(needle_depths=(0.5,), speed_concurrency=(1,), arithmetic_answer="3")
    facts = {"answer": "3", "document": "d", "at_once": 1}
    item = Item(f"{kind}/before/c1/0", kind, "/v1/completions", {"prompt": [1, 2], "max_tokens": 8}, facts)
    kept = keep(item, WHO.digest, Reply(body, None, "", 1, 0.5))
    assert kept.ok or kept.failure in ("empty", "truncated")
    probe_measures(run(kept), p, [item], "before")
    run_measures(run(kept))
    diverge(run(kept), run(kept))
    if kind == "score" and kept.ok:
        read_positions([1, 2], kept.answer["choices"][0]["prompt_logprobs"], 0)
