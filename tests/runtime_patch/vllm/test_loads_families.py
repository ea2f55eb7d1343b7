"""`verify loads` says of each architecture that it has a table for what the real vLLM 0.33.0 makes of our builds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.runtime_patch.vllm.conftest import Case
from tests.runtime_patch.vllm.loads_compare import KINDS, differences
from tests.verify.loaders.architectures import config_of
from tests.verify.loaders.cases import PROFILES, Edit, as_published, with_edit
from tests.verify.loaders.held import save
from tests.verify.loaders.record import build

EDITS = (Edit("as built"), Edit("empty", whole="empty"))
FOLDERS = [
    f"{kind}-{profile}-{edit.name.replace(' ', '-')}"
    for kind in KINDS
    for profile in PROFILES
    for edit in EDITS
]


def make(home: Path) -> None:
    """Every architecture under every profile, with its exclusion list as built and emptied."""
    for kind in KINDS:
        own = {
            "tie_word_embeddings": kind.startswith("gemma"),
            "num_key_value_heads": 4,
        }  # Gemma knows no head of its own
        config = config_of(kind, random.Random(kind)) | own
        if "text_config" in config:
            config["text_config"] |= own
        parent = save(config, home / kind, seed=1)
        publish(parent / "model.safetensors")
        for profile in PROFILES:
            for edit in EDITS:
                child = home / f"{kind}-{profile}-{edit.name.replace(' ', '-')}"
                build(parent, child, profile)
                built = json.loads((child / "config.json").read_text())
                (child / "config.json").write_text(json.dumps(with_edit(built, edit)))


def publish(file: Path) -> None:
    """The file with the names that such a model was published with."""
    from safetensors.torch import load_file, save_file

    tensors = {as_published(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    make(folder)
    return folder


@pytest.fixture(scope="module")
def real(home: Path) -> dict[str, Any]:
    """What vLLM made of each, from one process."""
    (home / "case").mkdir()
    job = {"checkpoints": [str(home / name) for name in FOLDERS]}
    case = Case(job, card="9,0", plugin=False, module="held_probe", environment={"FAKE_DEVICE": "cpu"})
    return case.start(home / "case").report()


@pytest.mark.parametrize("name", FOLDERS)
def test_every_module_becomes_what_was_predicted(name: str, home: Path, real: dict[str, Any]) -> None:
    assert differences(home / name, real[str(home / name)]) == []
