"""What lint says beside its findings, and how much it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.verify.questions.lint import LintOptions, lint
from shardmill.verify.reading.source import Folder
from shardmill.verify.rules.findings import Report
from tests.verify.zoo.clean import CLEAN, compressed_channel, deepseek, mixed_child, nvfp4_parent
from tests.verify.zoo.loading import _six
from tests.verify.zoo.model import bf16
from tests.verify.zoo.scales import _split_w13


def _lint(folder: Path, *options: LintOptions) -> Report:
    return lint(Folder(folder), *options)


def test_the_sizes_at_which_it_loads_are_said_with_the_reason(tmp_path: Path) -> None:
    """b_proj has 64 rows in blocks of 32: a rank of four would have 16."""
    model = mixed_child()
    _six(model)
    for name in model.names:
        if "o_proj" in name or "experts" in name:
            model.drop(name)
    model.write(tmp_path)
    said = _lint(tmp_path).facts["tensor parallel"]
    assert said == (
        "loads at TP 1, 2; not 4 (b_proj: 16 rows a rank in blocks of 32), 8 (b_proj: 8 rows a rank in blocks of 32)"
    )


def test_a_demanded_size_that_does_not_divide_is_a_finding(tmp_path: Path) -> None:
    deepseek().write(tmp_path)
    (finding,) = _lint(tmp_path, LintOptions(tp=(1, 2))).findings
    assert finding.slug == "tensor-parallel"
    assert "rank in blocks of 128" in finding.got


@pytest.mark.parametrize("name", CLEAN)
def test_headers_alone_give_no_finding_either(name: str, tmp_path: Path) -> None:
    CLEAN[name]().write(tmp_path)
    report = _lint(tmp_path, LintOptions(read_data=False))
    assert report.findings == []
    assert "scales" in report.not_checked


def test_a_sample_says_that_it_is_one(tmp_path: Path) -> None:
    nvfp4_parent().write(tmp_path)
    report = _lint(tmp_path, LintOptions(sample_bytes=4096))
    (said,) = [topic for topic in report.checked if topic.startswith("scales")]
    assert "a sample: " in said


def test_the_size_of_a_fused_scales_error_is_said(tmp_path: Path) -> None:
    model = nvfp4_parent()
    _split_w13(model)
    model.write(tmp_path)
    found = [f.got for f in _lint(tmp_path).findings if f.slug == "fused-global-scale"]
    assert len(found) == 3
    assert all("another half decodes" in got and "times wrong" in got for got in found)


def test_a_placeholder_is_said_once_with_its_kind_and_count(tmp_path: Path) -> None:
    model = nvfp4_parent()
    for shard in model.shards.values():
        for name, blob in shard.items():
            if name.endswith("input_scale"):
                blob.data = b"\0\0\x80\x3f"
    model.write(tmp_path)
    (finding,) = _lint(tmp_path).findings
    assert (finding.slug, finding.got) == ("placeholder-input-scale", "1.0 in all 24 of input_scale")


def test_a_config_that_targets_some_modules_claims_nothing_of_the_others(tmp_path: Path) -> None:
    model = compressed_channel()
    model.quantization["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    for name in [name for name in model.names if ".mlp." in name and name.endswith(".weight")]:
        shard = model.find(name)
        shard[name] = bf16(name, *shard[name].shape)
        del shard[f"{name}_scale"]
    model.write(tmp_path)
    assert _lint(tmp_path).findings == []


def test_what_engines_leave_alone_need_not_be_excluded_in_block_fp8(tmp_path: Path) -> None:
    """DeepSeek's own checkpoints list no exclusions: routers, heads and the MTP projection are known to engines."""
    model = deepseek()
    shard = model.find("lm_head.weight")
    for module in (
        "layers.1.mlp.gate",
        "layers.1.eh_proj",
        "layers.1.shared_head.head",
        "layers.1.indexer.weights_proj",
    ):
        shard[f"model.{module}.weight"] = bf16(module, 8, 128)
    model.write(tmp_path)
    assert _lint(tmp_path).findings == []


def test_a_layer_of_plain_attention_beside_kda_layers_lacks_no_member(tmp_path: Path) -> None:
    model = mixed_child()
    _six(model)
    model.write(tmp_path)
    assert _lint(tmp_path).findings == []


def test_a_kda_layer_with_five_of_six_members_lacks_one(tmp_path: Path) -> None:
    model = nvfp4_parent()
    shard = model.find("lm_head.weight")
    for layer in (0, 1):
        for name in ("b_proj", "f_a_proj", "g_a_proj"):
            if (layer, name) != (1, "b_proj"):
                module = f"model.language_model.layers.{layer}.self_attn.{name}"
                shard[f"{module}.weight"] = bf16(module, 64, 128)
    model.write(tmp_path)
    (finding,) = [f for f in _lint(tmp_path).findings if f.slug == "fused-member-missing"]
    assert (finding.slug, finding.expected.split(" ")[0]) == ("fused-member-missing", "b_proj")


@pytest.mark.parametrize(("tied", "found"), [(True, []), (None, []), (False, ["exclude-idle"])])
def test_a_tied_head_may_be_excluded_though_no_file_holds_it(
    tied: bool | None, found: list[str], tmp_path: Path
) -> None:
    """A loader builds it, and asks the exclusions; without a head an untied config has faults of its own."""
    model = deepseek()
    model.drop("lm_head.weight")
    model.quantization["modules_to_not_convert"] = ["lm_head"]
    model.config.pop("tie_word_embeddings", None)
    if tied is not None:
        model.config["tie_word_embeddings"] = tied
    model.write(tmp_path)
    slugs = [finding.slug for finding in _lint(tmp_path).findings if finding.slug.startswith("exclude")]
    assert slugs == found
