"""What lies around the shards: which files a child gets, which it doesn't and why, and what is nearly a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.container.side_files import SideFiles, copies_in
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.types import Parent
from tests.pipeline.parents import (
    INDEX,
    RECIPE,
    SHARDS,
    build,
    micro_tensors,
    prepare,
    published,
    write_parent,
    write_recipe,
    write_shard,
)

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 12\n"
WANTED = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
    "preprocessor_config.json", "processor_config.json", "vocab.txt", "merges.txt", "special_tokens_map.json",

    "modeling_x.py", "processing_x.py", "LICENSE", "LICENSE.md", "NOTICE",
    "additional_chat_templates/tool.jinja", "qwen.tiktoken", "spiece.model",
)  # fmt: skip
UNWANTED = {
    "it holds weights": (
        "pytorch_model.bin", "pytorch_model.bin.index.json", "original/consolidated.00.pth", "model-q4_k_m.gguf",
        "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "onnx/model.onnx", "onnx/model.onnx_data", "model.nemo",
        "consolidated.safetensors", "model.fp16.safetensors", "adapter_model.safetensors", "weights.npz",
        "consolidated.safetensors.index.json", "model.ckpt", "openvino/model.bin", "model.tar",
    ),
    "it is training state": (
        "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "trainer_state.json", "zero_to_fp32.py",
        "global_step100/mp_rank_00_optim_states.pt", "checkpoint-500/config.json", "runs/a/events.out.tfevents.1",
        "wandb/run-1/config.yaml", "latest", "eval_results.json",
    ),
    "it is a log or a cache": (
        "nohup.out", "train.log", "__pycache__/x.py", "model.safetensors:Zone.Identifier", "Thumbs.db", "a.json.tmp",
        "b.lock", "c.incomplete", "config.json~",
    ),
    "its folder holds another copy": ("original/params.json", "onnx/config.json"),
    "no config's auto_map names": ("train.py",),
    "no loader reads": ("figure.png", "notes.pdf"),
    "it is a dotfile": (".gitattributes",),
    "a signature does not hold": ("model.sig",),
    "it describes the parent alone": ("README.md", "hf_quant_config.json"),
}  # fmt: skip


def scanned(parent: Path, recipe: str = RECIPE) -> Parent:
    return prepare(parent, recipe).parent


@pytest.mark.parametrize("name", WANTED)
def test_what_a_loader_reads_goes_along(name: str) -> None:
    """Configs, tokenizers, templates, processors and licences are carried without being asked for."""
    assert SideFiles().why_left(name, 100) is None


@pytest.mark.parametrize(("why", "name"), [(why, name) for why, names in UNWANTED.items() for name in names])
def test_what_no_loader_reads_is_left_with_a_reason(why: str, name: str) -> None:
    """Other copies of the weights, training state, logs and caches stay behind; the recipe may ask for each."""
    copies = copies_in([name for names in UNWANTED.values() for name in names], ())
    assert why in str(SideFiles(copies=copies).why_left(name, 100))
    if why != "it describes the parent alone":
        assert SideFiles(carry=(name,), copies=copies).why_left(name, 100) is None


def test_code_goes_along_where_a_config_names_it(tmp_path: Path) -> None:
    """auto_map names files; what they import from beside themselves comes too, and no other code does."""
    parent = write_parent(tmp_path / "parent")
    config = json.loads((parent / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_x.XModel", "AutoConfig": "org/other--configuration_y.Y"}
    (parent / "config.json").write_text(json.dumps(config))
    (parent / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tok_x.Slow", null]}}')
    (parent / "modeling_x.py").write_text("from .layers_x import Layer\nfrom . import rope_x, norm_x as n\n")
    for name in ("layers_x", "rope_x", "norm_x", "tok_x", "train", "eval_y"):
        (parent / f"{name}.py").write_text("")
    code = {name for name in scanned(parent).carried if name.endswith(".py")}
    assert code == {"modeling_x.py", "layers_x.py", "rope_x.py", "norm_x.py", "tok_x.py"}


def test_the_modules_of_a_sentence_model_go_along_whole(tmp_path: Path) -> None:
    """Their nested safetensors are carried byte for byte and hashed; a truncated one is refused by name."""
    parent = write_parent(tmp_path / "parent")
    (parent / "2_Dense").mkdir()
    (parent / "modules.json").write_text('[{"path": ""}, {"path": "2_Dense"}]')
    (parent / "2_Dense" / "config.json").write_text("{}")
    write_shard(parent / "2_Dense" / "model.safetensors", {"linear.weight": ("F32", (2, 2), bytes(16))})
    build(parent, tmp_path / "out")
    ours = published(tmp_path / "out")
    assert ours["2_Dense/model.safetensors"] == (parent / "2_Dense" / "model.safetensors").read_bytes()
    (parent / "2_Dense" / "model.safetensors").write_bytes(ours["2_Dense/model.safetensors"][:-1])
    with pytest.raises(CheckpointError, match=r"2_Dense/model.safetensors: .* truncated"):
        scanned(parent)


@pytest.mark.parametrize("extra", ["consolidated.safetensors", "stale-00001-of-00002.safetensors"])
def test_the_index_decides_which_files_hold_weights(extra: str, tmp_path: Path) -> None:
    """A file of weights that the index does not name never joins the child, and is listed with the reason."""
    parent = write_parent(tmp_path / "parent")
    write_shard(parent / extra, {"layers.0.attention.wq.weight": ("BF16", (4, 4), bytes(32))})
    build(parent, tmp_path / "out")
    assert extra not in published(tmp_path / "out")
    assert "layers.0.attention.wq.weight" not in (tmp_path / "out" / INDEX).read_text()
    assert "the index does not name" in scanned(parent).left[extra].reason


def test_a_single_file_is_the_model_whatever_lies_beside_it(tmp_path: Path) -> None:
    """model.safetensors without an index is the checkpoint; an adapter beside it is left."""
    parent = write_parent(tmp_path / "parent")
    (parent / INDEX).unlink()
    tensors = {name: each for file in micro_tensors().values() for name, each in file.items()}
    for shard in parent.glob("*.safetensors"):
        shard.unlink()
    write_shard(parent / "model.safetensors", tensors)
    write_shard(parent / "adapter_model.safetensors", {"lora_A.weight": ("BF16", (1, 4), bytes(8))})
    found = scanned(parent)
    assert [header.shard for header in found.headers] == ["model.safetensors"]
    assert "adapter_model.safetensors" in found.left


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"a": 1', "not valid JSON"),
        (POINTER, "Git LFS pointer"),
        (b"<!doctype html><title>Sign in</title>", "HTML web page"),
        (b'<?xml version="1.0"?><Error/>', "XML error message"),
        (b"Invalid username or password.", "Invalid username"),
        (b"{" + b" " * (2 << 20), "truncated"),
    ],
)
def test_json_that_is_not_whole_is_refused_by_name(data: bytes, words: str, tmp_path: Path) -> None:
    """A child with half a tokenizer would fail only when it is served."""
    parent = write_parent(tmp_path / "parent")
    (parent / "tokenizer.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: .*{words}"):
        scanned(parent)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.txt", "chat_template.jinja"])
def test_a_pointer_is_no_side_file(name: str, tmp_path: Path) -> None:
    """Whatever its ending, a Git LFS pointer is refused with the command that fetches the file."""
    parent = write_parent(tmp_path / "parent")
    (parent / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name}: is a Git LFS pointer.*git lfs pull"):
        scanned(parent)


SHARD_HEADS = {
    "Git LFS pointer": POINTER,
    "GGUF": b"GGUF\x03\0\0\0" + bytes(4000),
    "zip archive": b"PK\x03\x04" + bytes(4000),
    "pickle": b"\x80\x02}q\0" + bytes(4000),
    "HTML web page": b"<html><body>Log in</body></html>" * 40,
    "XML error": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "zeros": bytes(8192),
    "Access denied": b"Access denied for this token.",
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(4000),
}


@pytest.mark.parametrize("kind", SHARD_HEADS)
def test_a_shard_that_is_something_else_is_called_what_it_is(kind: str, tmp_path: Path) -> None:
    """The message names the file and what its first bytes are, not a header's impossible length."""
    parent = write_parent(tmp_path / "parent")
    (parent / SHARDS[1]).write_bytes(SHARD_HEADS[kind])
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]}: is no safetensors file: it is .*{kind}"):
        scanned(parent)


def _adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def _snapshots(folder: Path) -> None:
    (folder / "snapshots" / "0123abcd").mkdir(parents=True)


def _pipeline(folder: Path) -> None:
    (folder / "model_index.json").write_text("{}")
    (folder / "unet").mkdir()
    (folder / "unet" / "config.json").write_text("{}")
    (folder / "unet" / "x.safetensors").touch()


NEARLY = {
    "adapter": _adapter,
    "snapshots/0123abcd": _snapshots,
    "diffusers pipeline; .*unet": _pipeline,
    "2 safetensors files and no model.safetensors.index.json": lambda f: [
        (f / n).touch() for n in ("a.safetensors", "b.safetensors")
    ],
    "a single file must be called model.safetensors": lambda f: (f / "pytorch.safetensors").touch(),
    "weights as .gguf": lambda f: (f / "m.gguf").touch(),
    "weights as .bin": lambda f: (f / "pytorch_model.bin").touch(),
    "its folder inner": lambda f: [(f / "inner").mkdir(), (f / "inner" / "model.safetensors").touch()],
    "is empty": lambda f: None,
}


@pytest.mark.parametrize("words", NEARLY)
def test_what_is_nearly_a_checkpoint_is_called_what_it_is(words: str, tmp_path: Path) -> None:
    """One sentence says what lies there and what to give instead."""
    folder = tmp_path / "nearly"
    folder.mkdir()
    NEARLY[words](folder)
    with pytest.raises(CheckpointError, match=words):
        scanned(folder)


def test_a_link_is_followed_where_the_shards_links_lead(tmp_path: Path) -> None:
    """A folder of links into a cache gives a child with its tokenizer; another link is left and named."""
    real, parent = write_parent(tmp_path / "real"), tmp_path / "parent"
    parent.mkdir()
    for path in real.iterdir():
        if path.is_file():
            (parent / path.name).symlink_to(path)
    (tmp_path / "secret.json").write_text("{}")
    (parent / "secret.json").symlink_to(tmp_path / "secret.json")
    (parent / "folder").symlink_to(real)
    found = scanned(parent)
    assert "tokenizer.json" in found.carried
    assert "leads to another folder" in found.left["secret.json"].reason
    assert found.left["folder"].reason == "it is a link to a folder"


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for an empty one, whose files the child would lose."""
    parent = write_parent(tmp_path / "parent")
    listed = os.scandir

    def scandir(path: str = ".") -> object:
        if os.fspath(path).endswith("assets"):
            raise OSError(5, "Input/output error", os.fspath(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(CheckpointError, match="assets: cannot be listed: Input/output error"):
        scanned(parent)


def test_metadata_of_null_reads_as_absent(tmp_path: Path) -> None:
    """The safetensors library opens such a file, so do we."""
    header = b'{"__metadata__":null,"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    from shardmill.pipeline.container.header import parse_header

    assert parse_header(header, "s").metadata == {}
    for other in (b"[]", b"0", b"false", b'""'):  # which the library refuses
        with pytest.raises(CheckpointError, match="__metadata__ must map"):
            parse_header(header.replace(b"null", other), "s")


@pytest.mark.parametrize("stated", [{}, {"total": "1"}, {"format": "mlx"}])
def test_a_rewritten_shard_states_its_format(stated: dict[str, str], tmp_path: Path) -> None:
    """pt where the parent's states none, which transformers 4 refuses to load; another one's word stays."""
    parent = write_parent(tmp_path / "parent")
    for shard in parent.glob("*.safetensors"):
        write_shard(shard, micro_tensors()[shard.name], stated)
    for shard in prepare(parent).plan.shards:
        wanted = {"format": "pt", **stated} if shard.rewritten else stated
        assert shard.header.metadata == wanted


def test_plan_lists_both_groups_and_build_warns_of_a_tokenizer_that_stays_behind(tmp_path: Path) -> None:
    """Each file has its size, each file that is left a reason; a child without its tokenizer is said on the way."""
    parent = write_parent(tmp_path / "parent")
    (parent / "pytorch_model.bin").write_bytes(bytes(2048))
    (parent / "vocab.json").symlink_to(tmp_path / "nowhere")
    recipe = write_recipe(tmp_path)
    places = ["-c", str(recipe), "--parent", str(parent)]
    planned = CliRunner().invoke(shardmill, ["plan", *places]).stdout
    assert "passed on: tokenizer.json (15 B)" in planned
    assert "not passed on: pytorch_model.bin (2.0 KiB): it holds weights" in planned
    built = CliRunner().invoke(shardmill, ["build", *places, "--out", str(tmp_path / "out")])
    assert (
        "warning: the child does not get vocab.json: it is not a file, or a link to nothing" in built.stderr
    )
