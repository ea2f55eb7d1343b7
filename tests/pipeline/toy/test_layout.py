"""The layout of the real checkpoint, to the byte, and the laws that every toy size keeps."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest

from shardmill.pipeline.toy.glm53 import (
    INPUT_SCALES_FILE,
    REAL,
    SOURCE_SHARD_BYTES,
    cut,
    parent_files,
    source_bytes,
    source_tensors,
)
from shardmill.pipeline.toy.sizes import SIZES
from shardmill.pipeline.toy.write import toy_headers
from shardmill.pipeline.types import Header, TensorRef

_LAYER = r"model\.language_model\.layers\.\d+\."
_VISION_LINEAR = r"(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.(gate|up|down)_proj)|merger\.(gate_|up_|down_)?proj)"
# The converting families: names, side of the block.
FAMILIES = {
    "kda": (_LAYER + r"self_attn\.(q|k|v|b|f_a|g_a)_proj\.weight", 32),
    "o_proj": (_LAYER + r"self_attn\.o_proj\.weight", 128),
    "mla": (_LAYER + r"self_attn\.(q_a_proj|kv_a_proj_with_mqa|q_b_proj)\.weight", 128),
    "mlp": (_LAYER + r"mlp\.(shared_experts\.)?(gate|up|down)_proj\.weight", 128),
    "lm_head": (r"lm_head\.weight", 128),
    "vision": (r"model\.visual\." + _VISION_LINEAR + r"\.weight", 128),
}
# family: tensors, BF16 bytes, FP8 bytes, scale bytes
PUBLISHED = {
    "kda": (204, 6_934_233_088, 3_467_116_544, 13_543_424),
    "o_proj": (46, 3_892_314_112, 1_946_157_056, 475_136),
    "mla": (36, 805_306_368, 402_653_184, 98_304),
    "mlp": (138, 3_070_230_528, 1_535_115_264, 374_784),
    "lm_head": (1, 1_268_776_960, 634_388_480, 154_880),
    "vision": (124, 1_090_519_040, 545_259_520, 133_120),
}
# What each of two ranks holds: a part of the rows (qkv: of each third) or of the columns; the rest is whole.
_ROWS = r"lm_head|(self_attn\.(q|k|v|b|q_b)|mlp.*\.(gate|up)|merger\.(gate|up))_proj|attn\.qkv|merger\.proj"
_COLUMNS = r"(self_attn\.o|mlp.*\.down|merger\.down)_proj|attn\.proj"


@cache
def _headers(size: str) -> list[Header]:
    return toy_headers(SIZES[size])


@pytest.fixture(scope="module")
def real() -> dict[str, Header]:
    return {header.shard: header for header in _headers("headers")}


@cache
def _family(name: str) -> str | None:
    if ".experts." in name:  # 148,608 names that need no search
        return None
    return next((family for family, (names, _) in FAMILIES.items() if re.fullmatch(names, name)), None)


def _converting(headers: list[Header]) -> list[tuple[str, TensorRef]]:
    refs = [(_family(ref.name), ref) for header in headers for ref in header.tensors]
    return [(family, ref) for family, ref in refs if family]


def test_the_parent_has_the_published_number_of_files_tensors_and_bytes(real: dict[str, Header]) -> None:
    """121 files, 150,226 tensors, 194,644,952,184 tensor bytes, 194,665,046,744 file bytes."""
    headers = real.values()
    assert len(headers) == 121
    assert sum(len(header.tensors) for header in headers) == 150_226
    assert sum(header.data_bytes for header in headers) == 194_644_952_184
    assert sum(header.file_bytes for header in headers) == 194_665_046_744


@pytest.mark.parametrize(
    ("file", "tensors", "file_bytes"),
    [
        ("model-00001-of-00120.safetensors", None, 4_164_445_852),
        ("model-00120-of-00120.safetensors", 855, 2_219_964_072),
        (INPUT_SCALES_FILE, 37_152, 4_840_704),
    ],
)
def test_single_files_have_their_published_sizes(
    real: dict[str, Header], file: str, tensors: int | None, file_bytes: int
) -> None:
    """Header lengths depend on every name, shape and offset, so a file's size pins them all."""
    assert real[file].file_bytes == file_bytes
    assert tensors in (None, len(real[file].tensors))


def test_most_shards_hold_960_tensors(real: dict[str, Header]) -> None:
    assert Counter(len(header.tensors) for header in real.values()).most_common(1)[0][0] == 960


def test_the_source_has_the_published_tensors_and_bytes() -> None:
    """The BF16 release: 38,770 tensors, 642,646,653,816 bytes, 120 shards; the last holds 347 visual and 184 text."""
    tensors = list(source_tensors(REAL))
    shards = cut(REAL, SOURCE_SHARD_BYTES)
    assert (len(tensors), sum(map(source_bytes, tensors)), len(shards)) == (38_770, 642_646_653_816, 120)
    assert Counter(".visual." in name for name in shards[-1]) == {True: 347, False: 184}


def test_the_families_have_their_published_counts_and_bytes(real: dict[str, Header]) -> None:
    """549 convert; bytes before, codes and scales of each family are the published ones."""
    found: dict[str, tuple[int, ...]] = {}
    for family, ref in _converting(list(real.values())):
        (R, C), side = ref.shape, FAMILIES[family][1]
        row = (1, ref.bytes, R * C, 4 * -(-R // side) * -(-C // side))
        found[family] = tuple(map(sum, zip(found.get(family, (0, 0, 0, 0)), row, strict=True)))
    assert found == PUBLISHED


def test_47_files_hold_what_converts_and_the_last_alone_vision(real: dict[str, Header]) -> None:
    """The files a build rewrites, by number."""
    numbers = "1 4 7 9 12 15 18 20 21 23 26 29 32 34 37 40 43 45 48 51 54 56 57 59 62 65 68 70 73 76 79 81 84 87 90 92"
    numbers += " 95 98 101 103 106 109 112 114 115 117 120"
    expected = [f"model-{int(number):05d}-of-00120.safetensors" for number in numbers.split()]
    converting = _converting(list(real.values()))
    assert sorted({ref.shard for _, ref in converting}) == expected
    assert {ref.shard for family, ref in converting if family == "vision"} == {expected[-1]}


@pytest.mark.parametrize("name", SIZES)
def test_every_size_converts_549_tensors_in_the_real_families(name: str) -> None:
    """The shipped recipe's counts hold for every toy."""
    counts = Counter(family for family, _ in _converting(_headers(name)))
    assert counts == {family: row[0] for family, row in PUBLISHED.items()}


@pytest.mark.parametrize("name", SIZES)
def test_every_size_loads_at_two_ranks(name: str) -> None:
    """What each of two ranks holds of a converting matrix is a whole number of blocks, in both directions."""
    for family, ref in _converting(_headers(name)):
        (R, C), side = ref.shape, FAMILIES[family][1]
        R //= (2 if re.search(_ROWS, ref.name) else 1) * (3 if "qkv" in ref.name else 1)
        C //= 2 if re.search(_COLUMNS, ref.name) else 1
        assert (R % side, C % side) == (0, 0), f"{ref.name} {ref.shape}"


def test_the_many_toy_has_the_real_names_in_the_real_files(real: dict[str, Header]) -> None:
    many = {header.shard: header for header in _headers("many")}
    assert {f: {r.name for r in h.tensors} for f, h in many.items()} == {
        f: {r.name for r in h.tensors} for f, h in real.items()
    }
    assert sum(header.file_bytes for header in many.values()) < 300e6


def test_the_small_toy_has_eight_like_shards_and_as_much_nvfp4_as_it_converts() -> None:
    headers = _headers("small")
    sizes = [header.file_bytes for header in headers if header.shard != INPUT_SCALES_FILE]
    converting = sum(ref.bytes for _, ref in _converting(headers))
    experts = sum(ref.bytes for header in headers for ref in header.tensors if ".experts." in ref.name)
    assert len(sizes) == 8
    assert max(sizes) / min(sizes) < 1.03
    assert 1.8e9 < converting < 1.9e9
    assert 0.95 < experts / converting < 1.05


def test_the_tiny_toy_is_small_and_has_several_shards_and_every_special_name() -> None:
    headers = _headers("tiny")
    names = {ref.name for header in headers for ref in header.tensors}
    layer = "model.language_model.layers."
    assert sum(header.file_bytes for header in headers) < 125e6
    assert len(headers) >= 4
    assert names > {
        f"{layer}45.eh_proj.weight",
        f"{layer}45.shared_head.norm.weight",
        f"{layer}45.mlp.experts.1.down_proj.input_scale",
        f"{layer}44.hc_attn_fn",
        f"{layer}3.self_attn.indexer.index_kpool_compress_ape",
        f"{layer}3.mlp.gate.e_score_correction_bias",
        f"{layer}0.self_attn.A_log",
        "model.visual.blocks.23.attn.qkv.bias",
    }
    assert not any(name.startswith(f"{layer}45.hc_") for name in names)


def test_a_shard_is_closed_before_it_would_pass_the_limit() -> None:
    """No shard but one of a single tensor is larger than the limit, and each next tensor would not have fitted."""
    dimensions, limit = SIZES["tiny"].dimensions, 1 << 20
    sizes = {tensor[0]: source_bytes(tensor) for tensor in source_tensors(dimensions)}
    shards = cut(dimensions, limit)
    assert [name for shard in shards for name in shard] == sorted(sizes)
    for shard, following in pairwise(shards):
        held = sum(sizes[name] for name in shard)
        assert held <= limit or len(shard) == 1
        assert held + sizes[following[0]] > limit


def test_the_input_scales_lie_in_a_file_of_their_own() -> None:
    files = parent_files(SIZES["tiny"].dimensions, SIZES["tiny"].cut())
    homes = {
        file for file, tensors in files.items() for name, _, _ in tensors if name.endswith(".input_scale")
    }
    assert homes == {INPUT_SCALES_FILE}
