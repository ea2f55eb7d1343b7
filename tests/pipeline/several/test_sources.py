"""Several parents: which names come from where, told in plan, manifest and statement; ambiguity is refused first."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardmill.pipeline.commands.plan import plan as plan_command
from shardmill.pipeline.errors import CheckpointError, PlanError, RecipeError
from shardmill.pipeline.manifest.lock import Lock, load_lock
from shardmill.pipeline.manifest.records import Manifest
from shardmill.pipeline.plan.facts import plan_json
from shardmill.pipeline.recipe import read as recipes
from shardmill.pipeline.run import build as run
from shardmill.pipeline.run.pin import pin
from shardmill.pipeline.stages.job import Settings, Watch
from tests.pipeline.parents import MANIFEST, bf16, change_tensor, write_recipe
from tests.pipeline.several.parents import (
    A_FILES,
    DRAFT,
    RECIPE,
    Three,
    draft_files,
    fp8,
    main_files,
    native_files,
    write,
)
from tests.schemas import held

QUICK = Settings(kernel="numpy")
Q_A = "model.layers.{}.self_attn.q_a_proj.weight"


def build(three: Three, text: str = RECIPE, **settings: Any) -> tuple[Path, run.Summary]:
    out = three.root / "out"
    return out, run.build(three.prepare(text, **settings), out, QUICK, Watch())


def stored(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Tensor -> dtype, shape and bytes, of all files of a folder."""
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, row in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                first, last = row["data_offsets"]
                found[name] = row["dtype"], row["shape"], data[begin + first : begin + last]
    return found


@pytest.fixture
def three(tmp_path: Path) -> Three:
    return Three(tmp_path)


def test_each_output_tensor_is_its_sources_byte_for_byte(three: Three) -> None:
    """Experts of A are encoded, the draft of B gets files of its own, and C's native codes replace A's copies."""
    out, _ = build(three)
    child, a, b, c = map(stored, (out, three.main, three.mtp, three.native))
    for layer in range(2):
        name = Q_A.format(layer)
        assert child[name] == c[name]
        assert child[f"{name}_scale_inv"][2] == c[f"{name}_scale_inv"][2]
        assert child[f"model.layers.{layer}.norm.weight"] == a[f"model.layers.{layer}.norm.weight"]
    assert child["model.layers.2.eh_proj.weight"] == b["draft.eh_proj.weight"]
    assert child["model.layers.2.mlp.experts.0.up_proj.weight"][0] == "F8_E4M3"
    assert "other.weight" not in child
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(child)
    assert index["model.layers.2.norm.weight"] == DRAFT
    assert index[Q_A.format(0)] == index[Q_A.format(0) + "_scale_inv"] == A_FILES[0]
    declared = json.loads((out / "config.json").read_text())["quantization_config"]
    assert declared["weight_block_size"] == [128, 128]


def test_the_origin_is_in_plan_and_manifest(three: Three) -> None:
    """Every tensor that another checkpoint gives is named with its source and its name there; others are not."""
    prepared = three.prepare()
    facts = plan_json(prepared.plan, prepared.parent)
    assert facts["origins"]["model.layers.2.eh_proj.weight"] == {
        "source": "mtp",
        "tensor": "draft.eh_proj.weight",
    }
    assert facts["origins"][Q_A.format(1)]["source"] == "native"
    assert "model.embed_tokens.weight" not in facts["origins"]
    assert facts["sources"]["native"]["tensors"] == 4
    assert facts["sources"]["native"]["replaced"] == 2
    assert facts["parent"]["files"] == 3
    out, _ = build(three)
    manifest = Manifest.from_json((out / MANIFEST).read_bytes())
    assert manifest.sources["native"].repository == "nobody/native"
    assert manifest.sources["mtp"].tensors["model.layers.2.norm.weight"] == "draft.norm.weight"
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert "nobody/native, revision 0123" in (out / "README.md").read_text()


def test_a_changed_source_makes_exactly_its_shards_again(three: Three) -> None:
    """A byte of C remakes the one file that takes it, a byte of B the draft's; what nobody takes remakes nothing."""
    out, _ = build(three)
    change_tensor(three.native / "model-00002-of-00002.safetensors", Q_A.format(1), 5)
    _, summary = build(three)
    assert [verdict.file for verdict in summary.made] == [A_FILES[1]]
    assert "native:model-00002-of-00002.safetensors changed" in str(summary.made[0].reason)
    assert stored(out)[Q_A.format(1)] == stored(three.native)[Q_A.format(1)]
    change_tensor(three.mtp / "model.safetensors", "draft.norm.weight")
    _, summary = build(three)
    assert [verdict.file for verdict in summary.made] == [DRAFT]
    change_tensor(three.native / "model-00001-of-00002.safetensors", "model.layers.0.norm.weight")
    change_tensor(three.main / A_FILES[0], Q_A.format(0))  # the copy that is replaced
    _, summary = build(three)
    assert not summary.made


def test_only_what_is_taken_is_counted_as_read(three: Three) -> None:
    """Of another checkpoint's files a build reads the tensors that it takes, and no more."""
    _, summary = build(three)
    main = sum((three.main / file).stat().st_size for file in A_FILES)
    taken = 2 * (256 * 128 + 2 * 4) + 2 * 2 * 128 * 256 + 2 * 128 + 2 * 128 * 256 + 2 * 128 * 128
    assert summary.bytes_read == main + taken


def test_taking_less_is_told(three: Three) -> None:
    """A shard is made again where its tensor comes from elsewhere than before, and the reason names both."""
    build(three)
    text = RECIPE.replace('"model.layers.*.self_attn.q_a_proj.*"', '"model.layers.0.self_attn.q_a_proj.*"')
    text = text.replace("model.layers.{0,1}.self_attn.q_a_proj.{weight,weight_scale_inv}",
                        "model.layers.0.self_attn.q_a_proj.{weight,weight_scale_inv}")  # fmt: skip
    text = text.replace("expect = 2", "expect = 1") + (
        '[[family]]\nname = "copy"\nmatch = "model.layers.1.self_attn.q_a_proj.weight"\n'
        'action = "keep"\nreason = "the copy"\n'
    )
    explained = run.explain(three.prepare(text), three.root / "out", QUICK, lambda line: None)
    reasons = {verdict.file: verdict.reason for verdict in explained.shards if verdict.reason}
    assert list(reasons) == [A_FILES[1]]


def test_a_parent_of_one_file_holds_everything(tmp_path: Path) -> None:
    """Beside a single model.safetensors loaders read no other file, so what sources add goes into it."""
    whole = {name: tensor for tensors in main_files().values() for name, tensor in tensors.items()}
    three = Three(tmp_path, main={"model.safetensors": whole})
    out, _ = build(three)
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
    assert "model.layers.2.eh_proj.weight" in stored(out)


def refused(three: Three, text: str = RECIPE) -> str:
    with pytest.raises((PlanError, RecipeError, CheckpointError)) as told:
        three.prepare(text)
    assert not (three.root / "out").exists()
    return str(told.value)


def test_a_name_of_two_sources_is_refused(three: Three) -> None:
    """Two rules that give one name are told with both sources."""
    text = RECIPE.replace('names = "draft.**"', 'names = ["draft.**", "model.layers.0.norm.weight"]')
    text = (
        text.replace('q_a_proj.*"', 'q_a_proj.*", "model.layers.0.norm.weight')
        .replace(
            'names = "model.layers.*.self_attn.q_a_proj.*", "model',
            'names = ["model.layers.*.self_attn.q_a_proj.*", "model',
        )
        .replace("norm.weight\nrepository", 'norm.weight"]\nrepository')
    )
    files = draft_files()
    files["model.safetensors"]["model.layers.0.norm.weight"] = bf16("third", 128)
    shutil.rmtree(three.mtp)
    write(three.mtp, files)
    said = refused(three, text)
    assert "model.layers.0.norm.weight: source 'mtp'" in said
    assert "and source 'native' (model.layers.0.norm.weight) both give it" in said


def test_scales_of_one_parent_for_codes_of_another_are_refused(three: Three) -> None:
    """Codes without their own scales would decode to numbers that nobody made."""
    for folder in (three.main,):
        files = main_files()
        for layer in range(2):
            files[A_FILES[layer]][f"{Q_A.format(layer)}_scale_inv"] = native_files()[
                f"model-{layer + 1:05d}-of-00002.safetensors"
            ][f"{Q_A.format(layer)}_scale_inv"]
            files[A_FILES[layer]][Q_A.format(layer)] = fp8("own", 256, 128)
        shutil.rmtree(folder)
        write(folder, files)
    said = refused(three, RECIPE.replace('q_a_proj.*"\nrepository', 'q_a_proj.weight"\nrepository'))
    assert "comes from source 'native', but model.layers.0.self_attn.q_a_proj.weight_scale_inv" in said


def test_what_a_source_lacks_is_refused(three: Three) -> None:
    """A glob that matches nothing there, and a name of the parent that it means but the source has not."""
    shutil.rmtree(three.native)
    files = native_files()
    write(three.native, {name: files[name] for name in list(files)[:1]})
    assert "model.layers.1.self_attn.q_a_proj.weight: the `names` of source 'native' match it" in refused(
        three
    )
    text = RECIPE.replace('names = "draft.**"', 'names = ["draft.**", "drift.*"]')
    assert "the glob 'drift.*' matches no tensor" in refused(three, text)


@pytest.mark.parametrize("part", ["own", "sibling"])
def test_another_shape_is_refused(three: Three, part: str) -> None:
    """A weight must have the shape of the parent's own, or of one of its kind in other layers."""
    folder, files = (three.native, native_files()) if part == "own" else (three.mtp, draft_files())
    file = next(iter(files))
    name = Q_A.format(0) if part == "own" else "draft.mlp.experts.0.up_proj.weight"
    files[file][name] = fp8("wide", 256, 256) if part == "own" else bf16("wide", 128, 512)
    shutil.rmtree(folder)
    write(folder, files)
    said = refused(three)
    assert f"[{256 if part == 'own' else 128}, {256 if part == 'own' else 512}]" in said
    assert "give a source of the same model" in said


def test_a_source_without_a_place_is_refused(three: Three) -> None:
    """Neither command nor recipe says where it is; or the command names one that the recipe has not."""
    path = write_recipe(three.root / "recipes", RECIPE)
    from shardmill.pipeline.run.prepare import prepare

    with pytest.raises(RecipeError, match="give --source mtp=DIR"):
        prepare(recipes.load(path), three.main, sources={"native": three.native})
    with pytest.raises(RecipeError, match="no \\[\\[source\\]\\] of that name; it has mtp, native"):
        prepare(recipes.load(path), three.main, sources={**three.sources, "third": three.mtp})


def test_the_recipe_may_say_the_place(three: Three) -> None:
    """`path` is relative to the recipe's folder."""
    text = RECIPE.replace('names = "draft.**"', 'names = "draft.**"\npath = "../mtp"')
    path = write_recipe(three.root / "recipes", text)
    from shardmill.pipeline.run.prepare import prepare

    prepared = prepare(recipes.load(path), three.main, sources={"native": three.native})
    assert prepared.plan.weight_map["model.layers.2.norm.weight"] == DRAFT


def locked(three: Three) -> Lock:
    path = three.root / "pipeline.lock"
    prepared = three.prepare()
    path.write_bytes(pin(prepared.parent, prepared.checkpoint.recipe, lambda line: None, True).to_json())
    lock = load_lock(path)
    assert lock is not None
    return lock


def test_the_lock_holds_every_parent(three: Three) -> None:
    """A build under it says that all parents are the pinned ones, and refuses another source by file."""
    lock = locked(three)
    assert lock.sources["native"][0] == "nobody/native"
    assert "native:model-00001-of-00002.safetensors" in lock.files
    out, _ = build(three, lock=lock)
    assert Manifest.from_json((out / MANIFEST).read_bytes()).parent_verified
    change_tensor(three.native / "model-00001-of-00002.safetensors", Q_A.format(0))
    with pytest.raises(
        CheckpointError, match=r"native:model-00001-of-00002.safetensors: its tensors are not those"
    ):
        build(three, lock=lock)


def test_a_touched_source_is_read_and_believed(three: Three) -> None:
    """Another mtime alone makes nothing again: its bytes are read and are the same."""
    build(three)
    path = three.mtp / "model.safetensors"
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))
    _, summary = build(three)
    assert not summary.made


def test_plan_prints_the_origins_by_its_schema(three: Three) -> None:
    """`plan --json` with sources is valid by docs/schemas, and names each one's place in the next command."""
    path = write_recipe(three.root / "recipes", RECIPE)
    given = ["-c", str(path), "--parent", str(three.main)]
    given += [word for name, place in three.sources.items() for word in ("--source", f"{name}={place}")]
    facts = held(CliRunner().invoke(plan_command, [*given, "--json"]).stdout)
    assert facts["origins"]["model.layers.2.norm.weight"]["source"] == "mtp"
    assert f"--source native={three.native}" in CliRunner().invoke(plan_command, given).stdout
    assert CliRunner().invoke(plan_command, [*given[:4], "--source", "native"]).exit_code == 2
