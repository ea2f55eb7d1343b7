"""Questions about two checkpoints: recompute, round trip, difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from shardmill.verify.formats.matrices import Matrix, decoded
from shardmill.verify.formats.schemes import quantized
from shardmill.verify.questions.diff import diff
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.reproduce import reproduce
from shardmill.verify.questions.roundtrip import Limits, roundtrip
from shardmill.verify.reading.open_files import OpenFiles
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report
from tests.verify.zoo.clean import (
    CONVERTED,
    LM,
    compressed_block,
    compressed_nvfp4,
    encoded,
    mixed_child,
    nvfp4_parent,
    plain,
)
from tests.verify.zoo.model import Blob, Model, codes, patch, scales

Q, O = f"{LM}layers.0.self_attn.q_proj.weight", f"{LM}layers.0.self_attn.o_proj.weight"  # noqa: E741
BLOCKS = 3 * (3 * 16 + 1)  # three layers of q, k, v in [32,32] and o in [128,128], all 128 x 128


class Two:
    """A parent and a child, each in a folder, written when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.parent, self.child = folder, nvfp4_parent(), mixed_child()

    def sources(self) -> tuple[Folder, Folder]:
        self.parent.write(self.folder / "parent")
        self.child.write(self.folder / "child")
        return Folder(self.folder / "child"), Folder(self.folder / "parent")

    def ask(self, question: Callable[..., Report], *more: object, **named: object) -> Report:
        return question(*self.sources(), *more, **named)


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def _slugs(report: Report) -> list[str]:
    return [finding.slug for finding in report.findings]


def test_every_block_of_a_true_child_is_recomputed_bit_for_bit(two: Two) -> None:
    report = two.ask(reproduce, None)
    assert report.findings == []
    assert report.facts["blocks"] == f"{BLOCKS} of {BLOCKS} compared, 0 differ"


def test_one_wrong_code_is_named_by_block_row_and_column(two: Two) -> None:
    patch(two.child[Q], 37 * 128 + 70, bytes([two.child[Q].data[37 * 128 + 70] ^ 1]))
    (finding,) = two.ask(reproduce, None).findings
    assert (finding.slug, finding.tensor) == ("block-differs", Q)
    assert finding.got.startswith("block [1, 2] of [4, 4]: 0x")
    assert finding.expected.endswith("at [5, 6]")


def test_a_scale_one_bit_off_is_found(two: Two) -> None:
    name = f"{O}_scale_inv"
    patch(two.child[name], 0, bytes([two.child[name].data[0] ^ 1]))
    (finding,) = two.ask(reproduce, None).findings
    assert finding.expected.startswith("scale")


def test_the_same_seed_draws_the_same_blocks_and_another_seed_others(two: Two) -> None:
    for at in range(0, 128 * 128, 7):
        patch(two.child[Q], at, b"\x11")
    found = [sorted(f.got for f in two.ask(reproduce, 60, seed).findings) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_the_report_states_what_would_go_unseen(two: Two) -> None:
    report = two.ask(reproduce, 100)
    assert report.facts["unseen"]["if 1.0% of all blocks were wrong"] == "none of these with probability 0.37"  # type: ignore[index]


def test_another_parent_is_not_the_one_it_was_made_from(two: Two) -> None:
    two.parent.find(Q)[Q] = Blob("BF16", (128, 128), two.parent[O].data)
    assert "block-differs" in _slugs(two.ask(reproduce, None))


def test_a_nan_in_the_parent_is_no_block_of_any_recipe(two: Two) -> None:
    patch(two.parent[Q], 0, b"\xc0\x7f")
    assert _slugs(two.ask(reproduce, None)) == ["block-differs"]


def _recover(two: Two, claimed: int) -> None:
    """q becomes a native copy: the parent's values are BF16 of code * scale, with scales that are not amax / 448."""
    raw, scale = codes("native", 128, 128), scales("native", 4, 4, base=3e-4)
    from shardmill.kernels.formats import E4M3_VALUES

    wide = np.repeat(np.repeat(np.frombuffer(scale.data, "<f4").reshape(4, 4), 32, 0), 32, 1)
    bits = (
        (E4M3_VALUES[np.frombuffer(raw.data, np.uint8).reshape(128, 128)] * wide)
        .view(np.uint32)
        .astype(np.uint64)
    )
    two.parent[Q].data = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
    shard = two.child.find(Q)
    shard[Q], shard[f"{Q}_scale_inv"] = raw, scale
    conversions = two.child.manifest["conversions"]  # type: ignore[index]
    conversions[Q] = {**conversions[Q], "numerics": "recover/1", "blocks": 16, "exact_blocks": claimed}


def test_blocks_that_decode_to_the_parents_bits_prove_recover(two: Two) -> None:
    _recover(two, 16)
    report = two.ask(reproduce, None)
    assert report.findings == []
    assert str(report.facts["lossless blocks"]).startswith("16 of")


def test_a_false_claim_of_lossless_blocks_is_found(two: Two) -> None:
    _recover(two, 15)
    assert _slugs(two.ask(reproduce, None)) == ["claim-false"]


def test_an_unknown_recipe_is_said(two: Two) -> None:
    two.child.manifest["conversions"][Q]["numerics"] = "amax/2"  # type: ignore[index]
    assert _slugs(two.ask(reproduce, None)) == ["recipe-unknown"]


def test_a_true_child_keeps_the_limits_and_each_family_is_summed_up(two: Two) -> None:
    report = two.ask(roundtrip, Limits())
    assert report.findings == []
    assert list(report.facts["families"]) == ["attention"]  # type: ignore[call-overload]
    assert str(report.facts["families"]).startswith(f"{{'attention': '{len(CONVERTED)} weights, error 2.")


@pytest.mark.parametrize(
    ("change", "slug"),
    [
        (lambda two: _factor(two.child[f"{Q}_scale_inv"], 1.1), "roundtrip-error"),
        (lambda two: two.child.find(Q).update({Q: codes("other", 128, 128)}), "roundtrip-cosine"),
        (lambda two: _factor(two.child[f"{Q}_scale_inv"], 0.5) or _top(two.child[Q]), "clipped-codes"),
        (lambda two: two.child.find(Q).update({Q: _constant(0x80)}), "vanished-codes"),
        (lambda two: patch(two.child[f"{Q}_scale_inv"], 0, b"\0\0\xc0\x7f"), "roundtrip-error"),
    ],
)
def test_a_weight_that_lost_too_much_is_found(two: Two, change: Callable[[Two], None], slug: str) -> None:
    change(two)
    assert slug in _slugs(two.ask(roundtrip, Limits()))


def _factor(blob: Blob, factor: float) -> None:
    blob.data = (np.frombuffer(blob.data, "<f4") * np.float32(factor)).tobytes()


def _top(blob: Blob) -> None:
    """Every code becomes the largest of its sign."""
    blob.data = (np.frombuffer(blob.data, np.uint8) & 0x80 | 0x7E).astype(np.uint8).tobytes()


def _constant(code: int) -> Blob:
    return Blob("F8_E4M3", (128, 128), bytes([code]) * 128 * 128)


def test_native_fp8_copies_are_found(two: Two) -> None:
    _recover(two, 16)
    said = str(two.ask(roundtrip, Limits()).facts["families"])
    assert "1 are native FP8 copies" in said


def test_a_lossless_copy_is_equal_once_rounded_to_the_parents_dtype(two: Two) -> None:
    _recover(two, 16)
    conversions = two.child.manifest["conversions"]  # type: ignore[index]
    conversions[Q]["family"] = "native"
    said = two.ask(roundtrip, Limits()).facts["families"]["native"]  # type: ignore[index]
    assert said.endswith("1 are native FP8 copies, 100.000% equal once rounded to the parent's dtype")


def test_packed_experts_are_compared_on_demand(two: Two) -> None:
    assert len(two.ask(roundtrip, Limits(), True).facts["families"]) == 4  # type: ignore[arg-type]
    _factor(two.child[f"{LM}layers.1.mlp.experts.0.up_proj.weight_scale_2"], 4.0)
    assert _slugs(two.ask(roundtrip, Limits())) == []
    assert "roundtrip-error" in _slugs(two.ask(roundtrip, Limits(), True))


@pytest.mark.parametrize(("maker", "leaf"), [(nvfp4_parent, "weight"), (compressed_nvfp4, "weight_packed")])
def test_nvfp4_decodes_by_its_own_convention(maker: Callable[[], Model], leaf: str, tmp_path: Path) -> None:
    """One multiplies by its global scale, the other divides; the even element lies in the low nibble."""
    model = maker()
    model.write(tmp_path)
    from shardmill.verify.reading.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(Folder(tmp_path), Report("t"))
    linear = next(item for item in quantized(checkpoint.tensors).values() if "gate_proj" in item.module)
    assert linear.weight is not None
    assert linear.weight.name.endswith(leaf)
    with OpenFiles(checkpoint.source) as opened:
        got, _ = decoded(Matrix(linear.weight, linear, (1, 16)), opened, 3, 4)
    packed = model[linear.weight.name].data[3 * 64 : 4 * 64]
    e4m3 = model[f"{linear.module}.weight_scale"].data[3 * 8 : 4 * 8]
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    second = "weight_scale_2" if leaf == "weight" else "weight_global_scale"
    factor = np.frombuffer(model[f"{linear.module}.{second}"].data, "<f4")[0]
    want = []
    for i in range(128):
        nibble = packed[i // 2] >> (4 * (i % 2)) & 0xF
        code = e4m3[i // 16]
        scale = (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7)
        value = magnitudes[nibble & 7] * (-1 if nibble & 8 else 1) * scale
        want.append(value * factor if leaf == "weight" else value / factor)
    assert np.allclose(got[0], want, rtol=1e-6, atol=0)


def test_two_equal_checkpoints_do_not_differ(two: Two) -> None:
    two.child, two.parent.manifest = nvfp4_parent(), {}  # one manifest alone decides nothing
    report = two.ask(diff)
    assert report.findings == []
    assert "bytes" in report.checked
    assert all("carried" in said for said in report.facts["families"].values())  # type: ignore[attr-defined]


def test_a_changed_tensor_is_named_with_its_first_byte_and_element(two: Two) -> None:
    two.child = nvfp4_parent()
    patch(two.child[Q], 2 * (9 * 128 + 3) + 1, b"\0")
    (finding,) = two.ask(diff).findings
    got = f"the first difference at byte {2 * (9 * 128 + 3) + 1:,} of the tensor, row 9, column 3"
    assert (finding.slug, finding.tensor, finding.got) == ("diff-changed", Q, got)


def test_a_conversion_is_a_re_encoding_with_its_error_and_its_scales_are_part_of_it(two: Two) -> None:
    child, parent = two.sources()
    report = diff(parent, child)
    assert set(_slugs(report)) == {"diff-reencoded", "diff-config"}
    assert report.exit_code == 0
    family = report.facts["families"][f"{LM}layers.#.self_attn.q_proj.weight"]  # type: ignore[index]
    assert family.startswith("3 re-encoded (mean error 2.")


def test_a_re_encoding_to_another_weight_is_a_change(two: Two) -> None:
    two.child.find(Q)[Q] = codes("other", 128, 128)
    child, parent = two.sources()
    assert "diff-changed" in _slugs(diff(parent, child))


def test_missing_and_added_tensors_and_config_keys_are_named(two: Two) -> None:
    two.child = nvfp4_parent()
    two.child.rename(Q, f"{Q}x")
    assert two.child.config is not None
    two.child.config["text_config"]["hidden_size"] = 4
    child, parent = two.sources()
    said = {(f.slug, f.tensor) for f in diff(parent, child).findings}
    expected = {("diff-missing", Q), ("diff-added", f"{Q}x"), ("diff-config", "text_config.hidden_size")}
    assert said == expected


def test_where_both_have_manifests_digests_decide(two: Two) -> None:
    two.parent.manifest, two.child = {}, nvfp4_parent()
    two.child.manifest = {}
    patch(two.child[Q], 0, b"\1")
    child, parent = two.sources()
    (finding,) = diff(parent, child).findings
    assert (finding.slug, finding.got) == ("diff-changed", "another digest")
    assert "bytes, by the manifests' digests" in diff(parent, child).checked
    by_bytes = diff(parent, child, by_bytes=True)
    assert "bytes" in by_bytes.checked
    assert by_bytes.findings[0].got.startswith("the first difference at byte 0")


def test_a_tensor_of_a_form_that_cannot_be_decoded_is_retyped(two: Two) -> None:
    two.child = nvfp4_parent()
    two.child.find(Q)[Q] = Blob("I32", (128, 128), bytes(4 * 128 * 128))
    child, parent = two.sources()
    assert [(f.slug, f.tensor) for f in diff(parent, child).findings] == [("diff-retyped", Q)]


def test_a_child_that_names_its_scales_weight_scale_is_held_to_its_record_too(tmp_path: Path) -> None:
    """The compressed-tensors form: a grid of one block looks like the scale of a whole tensor."""
    parent, child = plain(), compressed_block()
    parent.write(tmp_path / "parent")
    conversions = {}
    for name in child.names:
        if f"{name}_scale" in child.names:
            shard = child.find(name)
            shard[name], shard[f"{name}_scale"] = encoded(parent[name], 128)
            conversions[name] = {"family": "all", "numerics": "amax/1", "block": [128, 128]}
    digests = {name: xxhash.xxh3_128_hexdigest(parent[name].data) for name in conversions}
    child.manifest = {"conversions": conversions, "sources": digests}
    child.write(tmp_path / "child")
    sources = Folder(tmp_path / "child"), Folder(tmp_path / "parent")
    assert integrity(*sources).findings == []
    report = reproduce(*sources, None)
    assert (report.findings, report.facts["blocks"]) == ([], "14 of 14 compared, 0 differ")
