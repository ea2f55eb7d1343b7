"""Records: canonical, complete, and read back as they were written; digests split from one stream."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.digest import TensorHash, TensorSplitter, canonical, key_of
from shardmill.pipeline.manifest.records import (
    ConversionRecord,
    FileRecord,
    Manifest,
    Receipt,
    RecipeRecord,
    ShardRecord,
)
from shardmill.pipeline.types import FamilySummary
from shardmill.verify.reading.manifest import parse_manifest

TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=6)
HEX = st.text("0123456789abcdef", min_size=4, max_size=4)
DIGESTS = st.dictionaries(TEXT, st.text("0123456789abcdef", min_size=32, max_size=32), max_size=3)
NAMES = st.text("abc.-_é", min_size=1, max_size=6).filter(lambda name: name not in (".", ".."))

SIZES = st.integers(0, 1 << 60)
BLOCKS = st.tuples(st.integers(1, 512), st.integers(1, 512))
FAMILIES = st.lists(
    st.builds(
        FamilySummary,
        name=TEXT,
        action=st.sampled_from(["keep", "quantize", "drop"]),
        reason=st.none() | TEXT,
        tensors=SIZES,
        bytes_before=SIZES,
        bytes_after=SIZES,
        scale_bytes=SIZES,
        block=st.none() | BLOCKS,
    ),
    max_size=2,
)
COUNTS = st.dictionaries(st.sampled_from(["blocks", "exact_blocks", "é"]), SIZES, max_size=2)
DIGEST_OF_FILE = st.text("0123456789abcdef", min_size=64, max_size=64)

manifests = st.builds(
    Manifest,
    plan_key=HEX,
    parent=st.fixed_dictionaries({"repository": st.none() | TEXT, "revision": st.none() | TEXT}),
    parent_verified=st.booleans(),
    recipe=st.builds(RecipeRecord, TEXT, st.lists(TEXT, max_size=2).map(tuple)),
    numerics=st.lists(TEXT, unique=True).map(sorted).map(tuple),
    algorithms=st.just({"tensor": "xxh3-128", "file": "sha256"}),
    files=st.dictionaries(NAMES, st.builds(FileRecord, SIZES, st.none() | DIGEST_OF_FILE), max_size=3),
    shards=st.dictionaries(NAMES, st.builds(ShardRecord, HEX, st.booleans(), DIGESTS, DIGESTS), max_size=3),
    conversions=st.dictionaries(
        TEXT, st.builds(ConversionRecord, TEXT, TEXT, BLOCKS, COUNTS, st.none() | BLOCKS), max_size=2
    ),
    families=FAMILIES.map(tuple),
    dropped=st.lists(TEXT, unique=True).map(sorted).map(tuple),
    renamed=st.dictionaries(TEXT, TEXT, max_size=2),
)


@given(manifests)
def test_a_manifest_reads_back_as_it_was_written(manifest: Manifest) -> None:
    """from_json(to_json(m)) == m, and the text is canonical."""
    text = manifest.to_json()
    assert Manifest.from_json(text) == manifest
    assert text == (json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) + "\n").encode()


@given(manifests)
def test_the_judge_reads_what_the_pipeline_writes(manifest: Manifest) -> None:
    """Two readers that share no code: the judge finds no fault in any manifest, and reads the same."""
    read, findings = parse_manifest(manifest.to_json())
    assert findings == []
    assert read is not None
    assert [(f.name, f.reason, f.block) for f in read.families] == [
        (f.name, f.reason, f.block) for f in manifest.families
    ]
    assert {name: (c.numerics, c.block, c.counts) for name, c in read.conversions.items()} == {
        name: (c.numerics, c.block, c.counts) for name, c in manifest.conversions.items()
    }
    assert read.recipe == manifest.recipe.name
    assert len(read.recipe_digests) == len(manifest.recipe.layers)


def test_a_recipes_text_that_is_not_the_one_beside_its_sha256_is_refused() -> None:
    """Whoever seals a manifest with another text has its sha256 against him, with the pipeline and with the judge."""
    body = json.loads(
        Manifest(
            "k",
            {"repository": None, "revision": None},
            False,
            RecipeRecord("r", ("a = 1\n",)),
            (),
            {"tensor": "xxh3-128", "file": "none"},
            {},
            {},
            {},
        ).to_json()
    )
    body["recipe"]["layers"][0]["toml"] = "a = 2\n"
    body.pop("self")
    sealed = canonical({**body, "self": key_of(body)})
    with pytest.raises(CheckpointError, match="sha256 of a recipe's text"):
        Manifest.from_json(sealed)
    assert [finding.slug for finding in parse_manifest(sealed)[1]] == ["manifest-self"]


@given(manifests, st.data())
def test_no_byte_of_a_manifest_can_change_unseen(manifest: Manifest, data: st.DataObject) -> None:
    """Another byte anywhere is refused, or leaves the very same record."""
    text = bytearray(manifest.to_json())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] ^= data.draw(st.integers(1, 255))
    with suppress(CheckpointError):
        assert Manifest.from_json(bytes(text)) == manifest


def test_a_receipt_reads_back_as_it_was_written() -> None:
    receipt = Receipt("a", "k", True, 3, None, {"t": "d"}, {"s": "e"}, {"t": {"blocks": 2}}, ({"x": 1},))
    assert Receipt.parse(json.loads(canonical(receipt.as_json()))) == receipt
    assert Receipt.parse(replace(receipt, sha256="00", repairs=()).as_json()).sha256 == "00"


@pytest.mark.parametrize("value", [1.0, {"a": [0.5]}, (float("nan"),), {"a": {"b": (1, 2.0)}}])
def test_a_record_holds_no_float(value: Any) -> None:
    with pytest.raises(TypeError, match="whole numbers only"):
        canonical(value)


def test_canonical_json_is_fixed_to_the_byte() -> None:
    """A golden line: whoever changes it re-keys every plan there is."""
    value = {"b": [1, None, True], "a": {"é": "☃", "": 'x"\\\n'}}
    text = b'{"a":{"":"x\\"\\\\\\n","\\u00e9":"\\u2603"},"b":[1,null,true]}\n'
    assert canonical(value) == text
    assert key_of(value) == hashlib.sha256(text).hexdigest()


def test_tensor_digests_are_xxh3_with_128_bits_seed_0_big_endian() -> None:
    """The digest of nothing, as the algorithm's authors publish it."""
    assert TensorHash().hexdigest() == "99aa06d3014798d86001c324468d497f"


@given(st.lists(st.binary(max_size=9), max_size=6), st.integers(1, 7))
def test_digests_split_from_a_stream_are_those_of_the_tensors(tensors: list[bytes], chunk: int) -> None:
    """However the stream is cut, empty tensors included."""
    splitter = TensorSplitter([(str(place), len(data)) for place, data in enumerate(tensors)])
    stream = memoryview(b"".join(tensors))
    for begin in range(0, len(stream), chunk):
        splitter.update(stream[begin : begin + chunk])
    assert splitter.digests() == {
        str(place): TensorHash(data).hexdigest() for place, data in enumerate(tensors)
    }


def test_a_stream_that_does_not_fit_its_tensors_is_a_fault() -> None:
    """Too long or too short: neither hangs nor passes."""
    splitter = TensorSplitter([("a", 1), ("b", 3)])
    splitter.update(memoryview(b"abc"))
    with pytest.raises(AssertionError, match="the stream ended inside b"):
        splitter.digests()
    with pytest.raises(AssertionError, match="1 bytes belong to no tensor"):
        splitter.update(memoryview(b"de"))
