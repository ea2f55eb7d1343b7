"""The rows: layout, the four properties of the fp6 tile, scale policies, hostile latents, golden digests."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.kernels import fp6, kv_row, testing
from shardmill.kernels.formats import E2M3_VALUES, E4M3_VALUES, bf16_to_f32
from shardmill.kernels.kv_row import RUNGS, RowLayout
from tests.kernels.gpu import golden

SIX = [rung for rung in RUNGS if RowLayout.parse(rung).fp6_tiles]
TAGS = [f"{rung}-{policy}" for rung in RUNGS for policy in ("stock", "fine")]
HOSTILE = list(testing.hostile_latents())


def split(tag: str) -> tuple[str, str]:
    rung, policy = tag.split("-")
    return rung, policy


def row_parts(rung: str) -> list[tuple[int, int]]:
    layout = RowLayout.parse(rung)
    six = layout.fp6_tiles
    sizes = (128 * layout.fp8_tiles, 64 * six, 32 * six, 16, layout.drop_bytes * six)
    begins = (layout.fp8_at, layout.nibble_at, layout.exponent_at, layout.scale_at, layout.drop_at)
    return [(begin, begin + size) for begin, size in zip(begins, sizes, strict=True) if size]


@pytest.mark.parametrize("rung", RUNGS)
def test_the_parts_of_a_row_follow_one_another_without_hole_or_overlap(rung):
    parts = row_parts(rung)
    assert parts[0][0] == 0
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))
    padding = {"656": 128, "8666p": 4}.get(rung, 0)
    assert parts[-1][1] + padding == RowLayout.parse(rung).row_bytes


def test_widths_are_those_of_the_formats():
    widths = {rung: RowLayout.parse(rung).row_bytes for rung in RUNGS}
    assert widths == {"656": 656, "8888": 528, "8666": 444, "8666p": 448, "6666": 416, "6666f": 432}


def test_a_tag_names_rung_and_policy_and_defaults_are_stock_for_rows_that_stock_readers_know():
    assert [RowLayout.parse(rung).scales for rung in RUNGS] == [
        "stock",
        "stock",
        "fine",
        "fine",
        "fine",
        "fine",
    ]
    assert RowLayout.parse("8666-stock") == RowLayout.parse("8666", "stock")
    assert RowLayout.parse("8666-stock").tag == "8666-stock"


@pytest.mark.parametrize("tag", ["8866", "", "6666-coarse", "6666-", "-fine"])
def test_an_unknown_tag_is_refused_by_name(tag):
    with pytest.raises(ValueError, match="unknown"):
        RowLayout.parse(tag)


def test_a_tag_and_a_policy_that_disagree_are_refused():
    with pytest.raises(ValueError, match="disagree"):
        RowLayout.parse("6666-stock", "fine")


@pytest.mark.parametrize("tag", [f"{rung}-{policy}" for rung in SIX for policy in ("stock", "fine")])
@pytest.mark.parametrize(("name", "bits"), HOSTILE, ids=[name for name, _ in HOSTILE])
def test_fp6_tiles_keep_the_four_properties_on_hostile_latents(tag, name, bits):
    check_properties(*split(tag), bits)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), tag=st.sampled_from([f"{r}-{p}" for r in SIX for p in ("stock", "fine")]))
def test_fp6_tiles_keep_the_four_properties_on_random_latents(seed, tag):
    check_properties(*split(tag), testing.random_rows(seed, 8))


def check_properties(rung: str, policy: str, bits: np.ndarray) -> None:
    """P1 scales, P2 equal bytes where nothing is dropped, P3 the error elsewhere, P4 codes in range, no NaN byte."""
    layout = RowLayout.parse(rung, policy)
    x = bf16_to_f32(bits)
    scale, y = kv_row.scaled_tiles(x, policy)
    rows = kv_row.encode(rung, x, policy)
    canonical = kv_row.restage(rung, rows)
    stored_scale = np.ascontiguousarray(canonical[:, 512:528]).view(np.uint32)
    np.testing.assert_array_equal(stored_scale, np.ascontiguousarray(scale).view(np.uint32))  # P1

    six = slice(layout.fp8_tiles, 4)
    groups = (len(bits), layout.fp6_tiles, 128 // layout.drop_group, layout.drop_group)
    byte = canonical[:, :512].reshape(-1, 4, 128)[:, six].reshape(groups)
    q8 = fp6.e4m3_nearest(y)[:, six].reshape(groups)
    drop, code = kv_row._stored_codes(layout, rows)
    unit = np.ldexp(1.0, 6 - drop.astype(int))[..., None]
    y64 = y[:, six].reshape(groups).astype(np.float64)
    number = ~np.isnan(y64)
    full = number & (np.abs(E4M3_VALUES[q8].astype(np.float64)) >= unit)
    np.testing.assert_array_equal(byte[full], q8[full])  # P2
    error = np.abs(E4M3_VALUES[byte].astype(np.float64) - y64)
    assert (error[number & ~full] <= np.broadcast_to(unit / 16, groups)[number & ~full]).all()  # P3
    magnitude = np.abs(E2M3_VALUES[code]).reshape(groups)
    assert (magnitude[np.broadcast_to((drop == 0)[..., None], groups)] <= 7.0).all()  # P4
    assert (byte[~number] == 0).all()
    assert not np.isin(byte, (0x7F, 0xFF)).any()
    sign = np.signbit(x.reshape(-1, 4, 128)[:, six]).reshape(groups)
    np.testing.assert_array_equal((byte >> 7).astype(bool)[number], sign[number])


@pytest.mark.parametrize("tag", TAGS)
def test_decoding_is_scale_times_value_by_the_definition_of_the_tile(tag):
    rung, policy = split(tag)
    layout = RowLayout.parse(rung, policy)
    x = bf16_to_f32(testing.random_rows(2, 16))
    rows = kv_row.encode(rung, x, policy)
    scale, y = kv_row.scaled_tiles(x, policy)
    value = E4M3_VALUES[fp6.e4m3_nearest(y)].astype(np.float64)
    if layout.fp6_tiles:
        drop, code = kv_row._stored_codes(layout, rows)
        power = np.repeat(np.ldexp(1.0, 6 - drop.astype(int)), layout.drop_group, axis=-1)
        value[:, layout.fp8_tiles :] = power * E2M3_VALUES[code]
    expected = (value * scale[..., None].astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(kv_row.decode(rung, rows), expected.reshape(-1, 512))


def test_a_row_of_8888_is_the_beginning_of_the_canonical_row_and_the_rest_is_zero():
    x = bf16_to_f32(testing.random_rows(3, 32))
    whole = kv_row.encode("656", x)
    np.testing.assert_array_equal(whole[:, :528], kv_row.encode("8888", x))
    assert not whole[:, 528:].any()
    np.testing.assert_array_equal(kv_row.restage("656", whole), whole)


def test_the_padded_row_is_the_plain_row_and_four_zero_bytes():
    x = bf16_to_f32(testing.random_rows(4, 32))
    padded = kv_row.encode("8666p", x)
    np.testing.assert_array_equal(padded[:, :444], kv_row.encode("8666", x))
    assert not padded[:, 444:].any()


def test_stock_scales_are_the_power_of_two_above_amax_over_448_for_every_bf16_amax():
    amax = bf16_to_f32(np.arange(0x7F80, dtype=np.uint16))
    quotient = np.maximum((amax / np.float32(448)).astype(np.float64), np.float32(1e-4))
    expected = 2.0 ** np.ceil(np.log2(quotient))
    np.testing.assert_array_equal(kv_row.tile_scales(amax, "stock"), expected.astype(np.float32))


def test_fine_scales_are_amax_over_448_and_never_below_the_smallest_normal_number():
    amax = bf16_to_f32(np.arange(0x7F80, dtype=np.uint16))
    exact = amax.astype(np.float64) / 448
    expected = np.maximum(exact, 2.0**-126).astype(np.float32)
    np.testing.assert_array_equal(kv_row.tile_scales(amax, "fine"), expected)
    zeros = kv_row.encode("6666", np.zeros((1, 512), np.float32))
    np.testing.assert_array_equal(zeros[:, 384:400].view(np.float32), np.float32(2.0**-126))


def test_fine_scales_store_the_largest_element_of_a_tile_without_error():
    x = bf16_to_f32(testing.random_rows(5, 64))
    decoded = kv_row.decode("8888", kv_row.encode("8888", x, "fine")).reshape(-1, 4, 128)
    tiles = x.reshape(-1, 4, 128)
    top = np.abs(tiles).argmax(-1)[..., None]
    np.testing.assert_allclose(
        np.take_along_axis(decoded, top, -1), np.take_along_axis(tiles, top, -1), rtol=2**-23, atol=0
    )


def test_an_infinite_latent_is_an_error_that_names_row_and_column():
    x = bf16_to_f32(testing.random_rows(6, 3))
    x[2, 130] = -np.inf
    with pytest.raises(ValueError, match="row 2, column 130"):
        kv_row.encode("6666", x)


@pytest.mark.parametrize("shape", [(4, 511), (512,), (1, 4, 128)])
def test_latents_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="512"):
        kv_row.encode("6666", np.zeros(shape, np.float32))


def test_a_row_that_no_writer_makes_is_refused_when_restaged():
    code = np.full((1, 4, 128), 0x1F, np.uint8)  # 7.5
    nibbles, exponents = kv_row.pack_codes(code)
    row = np.zeros((1, 416), np.uint8)
    row[:, :256], row[:, 256:384] = nibbles.reshape(1, -1), exponents.reshape(1, -1)
    with pytest.raises(ValueError, match=r"7\.5"):
        kv_row.restage("6666", row)


def test_planes_and_drops_unpack_to_what_was_packed():
    random = np.random.Generator(np.random.PCG64(7))
    code = random.integers(0, 64, (5, 3, 128), np.uint8)
    np.testing.assert_array_equal(kv_row.unpack_codes(*kv_row.pack_codes(code)), code)
    drop = random.integers(0, 4, (5, 3, 16), np.uint8)
    packed = kv_row.pack_drops(drop)
    np.testing.assert_array_equal(kv_row.unpack_drops(packed), drop)
    word = packed.reshape(5, 3, 4).view("<u4")[..., 0]
    np.testing.assert_array_equal((word >> 10) & 3, drop[..., 5])  # group g at bits 2g, 2g + 1


@pytest.mark.parametrize("tag", ["8888-stock", "8666-fine", "6666f-fine"])
def test_ten_thousand_random_rows_have_their_golden_digest(tag):
    rung, policy = split(tag)
    rows = kv_row.encode(rung, bf16_to_f32(golden.chunk_bits(0)), policy)
    assert testing.digest_of_rows(rows) == golden.read()[tag]["first"]
