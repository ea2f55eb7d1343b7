"""The comparator and the case generator that all kernel tests stand on."""

import numpy as np

from shardmill.kernels import testing
from shardmill.kernels.formats import bf16_to_f32
from shardmill.kernels.kv_row import RowLayout


def test_equal_arrays_have_no_first_difference():
    rows = np.arange(20, dtype=np.uint8).reshape(2, 10)
    assert testing.first_difference(rows, rows.copy()) is None


def test_the_first_differing_byte_is_named_with_place_part_and_both_values():
    expected = np.zeros((3, 416), np.uint8)
    got = expected.copy()
    got[1, 300], got[2, 5] = 0x3A, 1
    said = testing.first_difference(expected, got, RowLayout.parse("6666"))
    assert said == "row 1, byte 300 (exponents of tile 1): expected 0x00, got 0x3a; 2 bytes differ"


def test_arrays_of_other_shapes_are_never_equal():
    assert "shapes differ" in testing.first_difference(np.zeros(3, np.uint8), np.zeros(4, np.uint8))


def test_every_byte_of_a_padded_row_belongs_to_a_named_part():
    names = [testing.part_name(RowLayout.parse("8666p"), byte) for byte in range(448)]
    assert names[127:129] == ["fp8 code of tile 0", "nibbles of tile 1"]
    assert names[443:445] == ["drops of tile 3", "padding or rotary slot"]


def test_the_enumeration_of_quotients_holds_every_pair_of_significands():
    tiles = testing.every_quotient().reshape(-1, 128)
    assert (np.abs(bf16_to_f32(tiles)).argmax(1) == 0).all() or (
        np.abs(bf16_to_f32(tiles)).max(1) == bf16_to_f32(tiles[:, 0])
    ).all()
    below = (tiles[:, 1:] >> 7 & 0xFF) < 134
    top = np.broadcast_to(tiles[:, :1] & 0x7F, below.shape)
    pairs = set(zip(top[below].tolist(), (tiles[:, 1:] & 0x7F)[below].tolist(), strict=True))
    assert len(pairs) == 128 * 128


def test_all_finite_bf16_and_all_nans_are_enumerated_and_no_infinity():
    bits = testing.every_bf16()
    assert len(np.unique(bits)) == (1 << 16) - 2
    assert not np.isinf(bf16_to_f32(bits)).any()


def test_hostile_latents_hold_no_infinity_and_have_names_of_their_own():
    named = list(testing.hostile_latents())
    assert len({name for name, _ in named}) == len(named)
    assert all(bits.dtype == np.uint16 and bits.shape[1] == 512 for _, bits in named)
    assert not any(np.isinf(bf16_to_f32(bits)).any() for _, bits in named)


def test_random_rows_are_the_same_everywhere():
    assert (
        testing.digest_of_rows(testing.random_rows(1, 4).view(np.uint8))
        == "d7019172ad5b25965f7e3d0d9d3cab2e664ee30742abe9a798a78792d2ab8cb0"
    )
