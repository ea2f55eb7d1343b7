"""Hostile bytes end in findings: a short form of `make fuzz`."""

from __future__ import annotations

from shardmill.verify.questions.integrity import integrity
from tests.verify.fuzz import ROUND, SECONDS_MAX, Corpus, check_file, check_header, run, tiny
from tests.verify.zoo.headers import HEADERS


def test_edited_headers_and_files_never_raise_and_never_take_long(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("tests.verify.fuzz.ROUND", 600)
    assert ROUND == 4_000
    assert run(1_200, first_seed=1_000_000) <= SECONDS_MAX


def test_the_corpus_is_clean_before_it_is_edited() -> None:
    from tests.verify.memory import Memory

    assert integrity(Memory(Corpus().files)).findings == []
    assert tiny().manifest is not None


def test_what_the_library_refuses_of_the_zoo_we_refuse() -> None:
    for _, data in HEADERS.values():
        check_header(data[8:], 2)


def test_a_file_check_reads_the_edited_file() -> None:
    corpus = Corpus()
    check_file(corpus.files, "config.json", b"{")
