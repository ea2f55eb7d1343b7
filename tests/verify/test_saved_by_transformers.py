"""What transformers writes by itself is no fault: default token ids, no MTP layers, towers of another depth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import lint
from shardmill.verify.reading.source import Folder
from tests.verify.zoo import encoders as e
from tests.verify.zoo.clean import LM, nvfp4_parent
from tests.verify.zoo.model import Model
from tests.verify.zoo.published import parent


def _slugs(model: Model, folder: Path, question: str = "lint") -> set[str]:
    model.write(folder)
    report = (lint if question == "lint" else integrity)(Folder(folder))
    return {finding.slug for finding in report.findings}


@pytest.mark.parametrize(
    ("tokenizer", "slug"),
    [
        ({"eos_token": "</s>"}, "token-range"),
        ({"chat_template": "{{ messages }}"}, "token-range"),
        ({"eos_token": None}, "token-idle"),
        ({}, "token-idle"),
    ],
)
def test_an_end_token_beyond_the_embedding_matters_where_the_tokenizer_has_one(
    tokenizer: dict[str, object], slug: str, tmp_path: Path
) -> None:
    model = parent(False)
    model.others["generation_config.json"] = b'{"eos_token_id": 50256}'
    model.others["tokenizer_config.json"] = json.dumps(tokenizer).encode()
    assert _slugs(model, tmp_path, "integrity") & {"token-range", "token-idle"} == {slug}


@pytest.mark.parametrize(("version", "slug"), [("5.24.0", "mtp-dropped"), (None, "mtp-missing")])
def test_an_mtp_layer_is_missed_where_transformers_did_not_drop_it(
    version: str | None, slug: str, tmp_path: Path
) -> None:
    model = nvfp4_parent()
    assert model.config is not None
    for name in [name for name in model.names if name.startswith(f"{LM}layers.2.")]:
        model.drop(name)
    if version is not None:
        model.config["transformers_version"] = version
    assert _slugs(model, tmp_path) & {"mtp-missing", "mtp-dropped"} == {slug}


@pytest.mark.parametrize(("depth", "slugs"), [(5, set()), (4, {"layer-beyond"})])
def test_a_towers_layers_are_counted_by_its_own_config(depth: int, slugs: set[str], tmp_path: Path) -> None:
    model = parent(False)
    assert model.config is not None
    for layer in range(5):
        for name, shape in (("mlp.fc1", (64, 32)), ("mlp.fc2", (32, 64)), ("self_attn.q_proj", (32, 32))):
            place = f"vision_model.encoder.layers.{layer}.{name}.weight"
            model.shards["model.safetensors"][place] = e.blob("BF16", e.matrix(place, *shape))
    text = {key: model.config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    model.config |= {"text_config": text, "vision_config": {"num_hidden_layers": depth}}
    assert _slugs(model, tmp_path) & {"layer-beyond"} == slugs
