"""A server that drips, breaks off, or shows another server's pages: a sentence within the time, never a wrong claim."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shardmill.verify.accept.client import Client, MetricsError, UnreachableError, samples
from shardmill.verify.accept.identity import IdentityError, ask_identity
from shardmill.verify.accept.speculation import acceptance, count_acceptance

MODELS = b'{"data": [{"id": "small", "max_model_len": 4096}]}'
DRAFTS = b'vllm:spec_decode_num_drafts_total{model_name="small"} 5\n'
Page = tuple[int, bytes, int]  # status, body, the length that is promised beyond it


@contextmanager
def server(pages: Mapping[str, Page], drip: float = 0.0) -> Iterator[str]:
    """A server of fixed pages for the length of a block; its address. drip: seconds before each byte."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            status, body, more = pages.get(self.path, (404, b"", 0))
            self.send_response(status)
            self.send_header("content-length", str(len(body) + more))
            self.end_headers()
            try:
                for byte in body if drip else ():
                    time.sleep(drip)
                    self.wfile.write(bytes([byte]))
                self.wfile.write(b"" if drip else body)
            except OSError:
                self.close_connection = True

        def do_POST(self) -> None:
            self.do_GET()

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def client(url: str, timeout: float = 5.0) -> Client:
    return Client(url, timeout=timeout, attempts_max=1)


def test_the_timeout_is_of_the_whole_answer():
    """Each byte comes in time and the answer does not."""
    with server({"/v1/completions": (200, b"x" * 40, 0), "/version": (200, b"x" * 40, 0)}, drip=0.05) as url:
        reply = client(url, 0.3).ask("/v1/completions", {})
        assert (reply.failure, reply.detail) == ("timeout", "no whole answer within 0.3 s")
        assert reply.seconds < 1.9  # forty bytes take two seconds
        with pytest.raises(UnreachableError, match=r"/version: no answer within 0\.3 s"):
            client(url, 0.3).get("/version")


def test_a_page_that_breaks_off_is_no_page():
    said = pytest.raises(UnreachableError, match="ended after 8 bytes, before its end")
    with server({"/metrics": (200, b"plain 3\n", 10)}) as url, said:
        client(url).get("/metrics")


def test_a_server_without_metrics_is_known_by_its_models():
    with server({"/v1/models": (200, MODELS, 0)}) as url:
        assert not ask_identity(client(url)).speculation


@pytest.mark.parametrize("page", [(500, b"", 0), (200, DRAFTS, 99)])
def test_metrics_that_fail_leave_open_whether_a_draft_is_on(page):
    said = pytest.raises(IdentityError, match="whether speculative decoding is on is read there")
    with server({"/v1/models": (200, MODELS, 0), "/metrics": page}) as url, said:
        ask_identity(client(url))


def test_metrics_of_another_server_are_refused_by_both_names():
    page = b'vllm:num_requests_running{model_name="large"} 0\n'
    said = pytest.raises(IdentityError, match="metrics: the page is of 'large', and 'small' is what")
    with server({"/v1/models": (200, MODELS, 0), "/metrics": (200, page, 0)}) as url, said:
        ask_identity(client(url))


def test_only_the_own_models_drafts_are_counted():
    other = 'vllm:spec_decode_num_drafts_total{model_name="large"} 70\n'
    assert count_acceptance(other + DRAFTS.decode(), "small") == {"drafts": 5}


def test_counters_that_do_not_come_are_not_zero():
    with server({"/metrics": (500, b"", 0)}) as url:
        assert acceptance(client(url), "small") is None


@pytest.mark.parametrize("limit", ["1", "-4096", "1e18"])
def test_a_context_that_no_window_fits_is_refused(limit):
    body = MODELS.replace(b"4096", limit.encode())
    said = pytest.raises(IdentityError, match=r"max_model_len is .*; no window of text fits it")
    with server({"/v1/models": (200, body, 0)}) as url, said:
        ask_identity(client(url))


@pytest.mark.parametrize(
    "line", ["a" + " " * 50_000, "a 1" + " " * 50_000 + "x", "a{" + "b" * 50_000, "a{" + "b" * 50_000 + "} x"]
)
def test_a_line_of_any_length_is_judged_in_time_that_grows_with_it(line):
    """A pattern that backtracks from each letter takes minutes for one of these."""
    with pytest.raises(MetricsError):
        samples(line)


def test_labels_of_any_length_are_read_in_time_that_grows_with_them():
    (sample,) = samples("a{" + "b" * 200_000 + "} 1")
    assert sample.labels == {}
