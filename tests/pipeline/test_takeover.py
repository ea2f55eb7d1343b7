"""Outputs of the first release: a file whose key proves as much as today's is taken over, the others are made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmill.pipeline.manifest.records import Manifest
from shardmill.pipeline.run import build as run
from shardmill.pipeline.stages.job import Settings, Watch
from tests.pipeline.parents import MANIFEST, SCALES, SHARDS, build, listing, prepare, published, why
from tests.pipeline.profiles.models import FILES, native_parent, recipe
from tests.pipeline.profiles.test_fp8_source import DEQUANTIZE, REBLOCK

# The keys that the first release gave the shards of these parents under these recipes.
MICRO = {
    SHARDS[0]: "266377ae759b112100c6abbbbaa114d976a1f8b622e5fa92478a608e5d967f80",
    SHARDS[1]: "7fb714d4781eccdcdacab71bc41e02fb31f495d2c881e33154a5c2dc854e1e31",
    SHARDS[2]: "fc34da7d51a4bdfe8e949a0c2ef19631944b4973f56dfcf5c62b42fa71ae867e",
    SCALES: "4d7ef311d52a7579753b9fe2a38ae7c9bc1e6ed9f1afb6163ba881a0453537ca",
}
DEQUANTIZED = {
    FILES[0]: "0cdd33ac218ff677cb6b2a076bd73914255784d30eec58cd749f3cd2aa63e3a9",
    FILES[1]: "9bc2dc44a98be57d469955af42781e72180cd72f20c45e9f37c8d7d1516de855",
}
REBLOCKED = {**DEQUANTIZED, FILES[0]: "c463e2746963280487c77dd2fbb2a349d7e4607ac275fa48aa261f56418e6409"}


def as_first_release(out: Path, keys: dict[str, str]) -> None:
    """Rewrites the manifest in `out` as the first release wrote it: its keys, its ids, no `source_block`."""
    path = out / MANIFEST
    body = json.loads(path.read_bytes())
    for file, key in keys.items():
        body["shards"][file]["key"] = key
    for facts in body["conversions"].values():
        facts.pop("source_block", None)
        for word in ("recipe", "numerics"):
            if word in facts:
                facts[word] = facts[word].replace("dequantize/", "dequantise/")
    path.write_bytes(resealed(body))


def resealed(body: dict[str, Any]) -> bytes:
    from shardmill.pipeline.manifest.digest import canonical, key_of

    body.pop("self")
    return canonical({**body, "self": key_of(body)})


def test_a_checkpoint_of_the_first_release_is_taken_over_without_making_a_shard(
    parent: Path, built: Path, tmp_path: Path
) -> None:
    """Only the manifest is written anew, with today's keys, and one line says why."""
    fresh, before = published(built), listing(built)
    as_first_release(built, MICRO)
    lines: list[str] = []
    assert why(parent, built) == {}
    summary = run.build(prepare(parent), built, Settings(kernel="numpy"), Watch(), tell=lines.append)
    assert (summary.made, summary.files_written) == ((), (MANIFEST,))
    assert [line for line in lines if "an earlier release built it" in line]
    assert published(built) == fresh
    assert all(listing(built)[file] == before[file] for file in SHARDS)


def test_what_the_first_release_dequantized_is_taken_over(tmp_path: Path) -> None:
    parent, out = native_parent(tmp_path / "parent"), tmp_path / "out"
    build(parent, out, recipe("fp8", DEQUANTIZE))
    fresh = published(out)
    as_first_release(out, DEQUANTIZED)
    assert why(parent, out, recipe("fp8", DEQUANTIZE)) == {}
    assert build(parent, out, recipe("fp8", DEQUANTIZE)).made == ()
    assert published(out) == fresh


def test_what_the_first_release_reblocked_is_made_again_once_since_its_key_proves_less(
    tmp_path: Path,
) -> None:
    """The file that only passes on is not lost."""
    parent, out = native_parent(tmp_path / "parent"), tmp_path / "out"
    text = recipe("fp8", REBLOCK)
    build(parent, out, text)
    fresh = published(out)
    as_first_release(out, REBLOCKED)
    [(file, reason)] = why(parent, out, text).items()
    assert file == FILES[0]
    assert "an earlier release built it, whose key left `source_block` out: model.layers.0." in reason
    assert [verdict.file for verdict in build(parent, out, text).made] == [FILES[0]]
    assert published(out) == fresh
    assert why(parent, out, text) == {}


def test_a_former_key_is_not_believed_where_the_record_lacks_a_tensor_that_is_read(tmp_path: Path) -> None:
    """The former key did not name the scales of another file, so the record must."""
    parent, out = native_parent(tmp_path / "parent"), tmp_path / "out"
    build(parent, out, recipe("fp8", DEQUANTIZE))
    as_first_release(out, DEQUANTIZED)
    body = json.loads((out / MANIFEST).read_bytes())
    sources = body["shards"][FILES[0]]["sources"]
    del sources[next(name for name in sources if name.endswith("_scale_inv"))]
    (out / MANIFEST).write_bytes(resealed(body))
    assert list(why(parent, out, recipe("fp8", DEQUANTIZE))) == [FILES[0]]


def test_another_source_block_makes_a_reblocked_weight_again(tmp_path: Path) -> None:
    """Both blocks give scales of one shape, so headers alone can't tell; the reason names both."""
    from tests.pipeline.parents import write_parent

    parent, out = tmp_path / "parent", tmp_path / "out"
    codes = ("F8_E4M3", (300, 128), bytes([0x38]) * (300 * 128))
    scales = (
        "F32",
        (3, 1),
        b"".join(bits.to_bytes(4, "little") for bits in (0x3F000000, 0x3F800000, 0x40000000)),
    )
    write_parent(
        parent, {"model-1.safetensors": {"a.weight": codes, "a.weight_scale_inv": scales}}, config={}
    )
    text = """
format = 1
name = "finer"
[[family]]
name = "all"
match = "a.{weight,weight_scale_inv}"
action = "reblock"
source_block = [100, 128]
block = [4, 4]
expect = 1
"""
    build(parent, out, text)
    other = text.replace("[100, 128]", "[128, 128]")
    [reason] = why(parent, out, other).values()
    assert (
        reason
        == "the recipe changed: a.weight (reblock/1 [100,128] -> [4,4], now reblock/1 [128,128] -> [4,4])"
    )
    assert prepare(parent, text).plan.key != prepare(parent, other).plan.key
    build(parent, out, other)
    build(parent, tmp_path / "fresh", other)
    assert published(out) == published(tmp_path / "fresh")
    manifest = Manifest.from_json((out / MANIFEST).read_bytes())
    assert manifest.conversions["a.weight"].source_block == (128, 128)


def test_a_recipe_that_names_scales_otherwise_says_so(tmp_path: Path) -> None:
    """Another profile asks for another suffix: that is no change of the parent's header."""
    parent, out = native_parent(tmp_path / "parent"), tmp_path / "out"
    same = REBLOCK.replace("block = [32, 32]", "block = [128, 128]")
    build(parent, out, recipe("fp8", same))
    reasons = why(parent, out, recipe("compressed-tensors", same))
    assert reasons[FILES[0]].startswith("the names of its scales changed: model.layers.0.")


@pytest.mark.parametrize("line", ["reason = ", "name = "])
def test_the_plan_key_covers_the_readme(parent: Path, line: str) -> None:
    """Another reason or name is another README, so `--expect-key` notices."""
    from tests.pipeline.parents import RECIPE

    before, after = prepare(parent).plan, prepare(parent, RECIPE.replace(f'{line}"', f'{line}"un')).plan
    assert before.readme != after.readme
    assert before.key != after.key
    assert before.key in before.readme.decode()
