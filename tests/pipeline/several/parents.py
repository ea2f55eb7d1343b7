"""Three toy parents: A with experts, the main one; B with a draft layer; C with native block FP8. A recipe for all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.pipeline.recipe import read as recipes
from shardmill.pipeline.run.prepare import prepare as prepare_from
from shardmill.pipeline.stages.job import Prepared
from tests.pipeline.parents import Tensor, bf16, f32, rng, write_index, write_recipe, write_shard

A_FILES = tuple(f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3))
DRAFT = "model-mtp-00001-of-00001.safetensors"
CONFIG = {
    "architectures": ["Toy"],
    "model_type": "toy",
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
}

RECIPE = """\
format = 1
name = "three-parents"
[output]
profile = "fp8"
[[source]]
name = "mtp"
names = "draft.**"
rename = { from = "draft.", to = "model.layers.2." }
[[source]]
name = "native"
names = "model.layers.*.self_attn.q_a_proj.*"
repository = "nobody/native"
revision = "0123456789abcdef0123456789abcdef01234567"
[[family]]
name = "attention"
match = "model.layers.{0,1}.self_attn.q_a_proj.{weight,weight_scale_inv}"
action = "reblock"
source_block = [128, 128]
block = [128, 128]
expect = 2
[[family]]
name = "experts"
match = "model.layers.*.mlp.experts.*.up_proj.weight"
action = "quantize"
block = [128, 128]
expect = 6
[[family]]
name = "rest"
match = ["model.layers.*.norm.weight", "model.layers.2.{eh_proj,self_attn.o_proj}.weight", "model.embed_tokens.weight"]
action = "keep"
reason = "small"
"""


def fp8(name: str, rows: int, columns: int) -> Tensor:
    codes = rng(name).integers(0, 0x7E, (rows, columns), np.uint8)
    return ("F8_E4M3", (rows, columns), codes.tobytes())


def grid(name: str, rows: int, columns: int) -> Tensor:
    values = rng(name).random((rows, columns), np.float32) + np.float32(0.5)
    return ("F32", (rows, columns), values.tobytes())


def experts(origin: str, layer: str) -> dict[str, Tensor]:
    return {
        f"{layer}.mlp.experts.{expert}.up_proj.weight": bf16(f"{origin}{layer}{expert}", 128, 256)
        for expert in range(2)
    }


def main_files() -> dict[str, dict[str, Tensor]]:
    """The main parent: its q_a_proj is a BF16 copy; each layer has a file, the embedding a third."""
    files: dict[str, dict[str, Tensor]] = {}
    for layer in range(2):
        at = f"model.layers.{layer}"
        files[A_FILES[layer]] = {
            f"{at}.self_attn.q_a_proj.weight": bf16(f"copy{layer}", 256, 128),
            f"{at}.norm.weight": bf16(f"norm{layer}", 128),
            **experts("a", at),
        }
    files[A_FILES[2]] = {"model.embed_tokens.weight": bf16("embed", 16, 128)}
    return files


def draft_files() -> dict[str, dict[str, Tensor]]:
    return {
        "model.safetensors": {
            "draft.norm.weight": bf16("draft norm", 128),
            "draft.eh_proj.weight": bf16("joint", 128, 256),
            "draft.self_attn.o_proj.weight": bf16("draft attention", 128, 128),
            "other.weight": bf16("other", 4, 4),
            **experts("b", "draft"),
        }
    }


def native_files() -> dict[str, dict[str, Tensor]]:
    """One file a layer; beside q_a_proj each holds what nobody asks for."""
    return {
        f"model-{layer + 1:05d}-of-00002.safetensors": {
            f"model.layers.{layer}.self_attn.q_a_proj.weight": fp8(f"native{layer}", 256, 128),
            f"model.layers.{layer}.self_attn.q_a_proj.weight_scale_inv": grid(f"scales{layer}", 2, 1),
            f"model.layers.{layer}.norm.weight": bf16("another norm", 128),
            f"model.layers.{layer}.self_attn.q_a_proj_scale": f32(1.0),
        }
        for layer in range(2)
    }


def write(folder: Path, files: Mapping[str, Mapping[str, Tensor]], config: Any = CONFIG) -> Path:
    folder.mkdir(parents=True)
    for file, tensors in files.items():
        write_shard(folder / file, tensors)
    if set(files) != {"model.safetensors"}:
        write_index(folder, {name: file for file, tensors in files.items() for name in tensors})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Three:
    """The three checkpoints in one folder."""

    def __init__(self, root: Path, **files: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.root = root
        self.main = write(root / "main", files.get("main", main_files()))
        self.mtp = write(root / "mtp", files.get("mtp", draft_files()))
        self.native = write(root / "native", files.get("native", native_files()))

    @property
    def sources(self) -> dict[str, Path]:
        return {"mtp": self.mtp, "native": self.native}

    def prepare(self, text: str = RECIPE, **settings: Any) -> Prepared:
        path = write_recipe(self.root / "recipes", text)
        return prepare_from(recipes.load(path), self.main, sources=self.sources, **settings)
