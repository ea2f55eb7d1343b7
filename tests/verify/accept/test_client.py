"""Failures are told apart, retried within bounds, and never become scores."""

from __future__ import annotations

import pytest

from shardmill.verify.accept.client import Client, MetricsError, UnreachableError, counter, samples
from shardmill.verify.accept.protocol import digest_of
from tests.verify.accept.replay import replayed

BODY = {"prompt": "안녕", "add_special_tokens": False}


@pytest.fixture
def server():
    with replayed("parent") as replay:
        yield replay


def client(server, **options) -> Client:
    return Client(server.url, **{"timeout": 5.0, "wait": lambda attempt: 0.0, **options})


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("500", "http 5xx"),
        ("503", "http 5xx"),
        ("429", "http 429"),
        ("half json", "not json"),
        ("cut", "connection"),
        ("hang", "timeout"),
    ],
)
def test_trouble_that_may_pass_is_tried_three_times_and_named(server, fault, failure):
    server.faults = [fault] * 3
    reply = client(server, timeout=0.3).ask("/tokenize", BODY)
    assert (reply.failure, reply.attempts, reply.body) == (failure, 3, None)
    assert len(server.asked) == 3


@pytest.mark.parametrize("fault", ["500", "429", "half json", "cut"])
def test_trouble_that_passes_leaves_an_answer_and_its_count(server, fault):
    server.faults = [fault]
    reply = client(server).ask("/tokenize", BODY)
    assert (reply.failure, reply.attempts) == (None, 2)
    assert reply.body["tokens"]


def test_a_refusal_is_not_repeated(server):
    reply = client(server).ask("/v1/completions", {"prompt": [1]})
    assert (reply.failure, reply.attempts) == ("http 4xx", 1)
    assert "not recorded" in reply.detail


def test_no_server_is_a_connection_failure_and_a_sentence():
    nobody = Client("http://127.0.0.1:9", timeout=1.0, attempts_max=1)
    assert nobody.ask("/x", {}).failure == "connection"
    with pytest.raises(UnreachableError, match=r"http://127\.0\.0\.1:9/version"):
        nobody.get("/version")


def test_a_metrics_page_is_read_with_its_labels():
    page = '# HELP x\nvllm:spec_total{engine="0",position="1"} 12.0\n\nplain 3\r\ntimed{} 4 1700000000000\n'
    read = {(s.name, s.labels.get("position")): s.value for s in samples(page)}
    assert read == {("vllm:spec_total", "1"): 12.0, ("plain", None): 3.0, ("timed", None): 4.0}


@pytest.mark.parametrize(
    "line",
    ["broken line here {", "name{} abc", "name{}", "<html>", "name 1_0", "name 0x10", "name{} 1 2 3", "1 2"],
)
def test_a_line_that_is_no_sample_is_refused_with_its_number(line):
    with pytest.raises(MetricsError, match="line 2: expected"):
        samples(f"plain 3\n{line}\n")


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e999"])
def test_a_counter_that_is_no_count_is_refused(value):
    (sample,) = samples(f"x_total {value}")
    with pytest.raises(MetricsError, match="a counter must be a number from 0 on"):
        counter(sample)


def test_the_digest_of_a_request_does_not_depend_on_key_order():
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})
