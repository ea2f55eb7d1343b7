"""The cases on which prediction and transformers are compared: random models, our profiles, edited exclusion lists."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.verify.loaders.architectures import ARCHITECTURES, LATER, Config, config_of

MODELS = 40
PROFILES = {"fp8": "modules_to_not_convert", "compressed-tensors": "ignore"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Edit:
    """What is done to the exclusion list of a build. `whole`: the list that is put in its place."""

    name: str
    drop: tuple[str, ...] = ()
    add: tuple[str, ...] = ()
    whole: str | None = None  # "null" or "empty"

    def of(self, listed: list[str]) -> list[str] | None:
        if self.whole is not None:
            return None if self.whole == "null" else []
        return [*(name for name in listed if name not in self.drop), *self.add]


def models() -> Iterator[tuple[str, Config]]:
    """42 random configs: every architecture once, then again from the first on, and the later ones."""
    kinds = list(ARCHITECTURES)
    for i, kind in enumerate([*(kinds[i % len(kinds)] for i in range(MODELS)), *LATER]):
        yield f"{i:02d}-{kind}", config_of(kind, random.Random(f"loads {i}"))


def edits(name: str, listed: list[str], modules: list[str]) -> list[Edit]:
    """The list as built, none, an empty one, and two random ones: names dropped, modules, layers and suffixes added."""
    rng = random.Random(f"edits of {name}")
    made = [Edit("as built"), Edit("null", whole="null"), Edit("empty", whole="empty")]
    for i in range(2):
        drop = tuple(rng.sample(sorted(listed), min(2, len(listed))))
        module = rng.choice(sorted(modules))
        add = rng.choice(
            [
                module,
                module.rpartition(".")[2],
                module.rpartition(".")[0],
                f"re:.*{module.rpartition('.')[2]}$",
            ]
        )
        made.append(Edit(f"random {i}", drop, (add,)))
    return made


def fold(names: Iterable[str]) -> dict[str, str]:
    """Names by their template; the numbers of each as `0.3 0.4`, so that a record stays small."""
    folded: dict[str, list[str]] = {}
    for name in sorted(names):
        folded.setdefault(_NUMBER.sub("#", name), []).append(".".join(_NUMBER.findall(name)))
    return {template: " ".join(numbers) for template, numbers in folded.items()}


def unfold(folded: Mapping[str, str]) -> Iterator[str]:
    for template, numbers in folded.items():
        for each in numbers.split(" "):
            parts = iter(each.split("."))
            yield re.sub("#", lambda _: next(parts), template)  # noqa: B023


def headers_of(folder: Path) -> dict[str, str]:
    """Name -> dtype of every tensor of a folder's one file."""
    data = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return {
        name: entry["dtype"]
        for name, entry in json.loads(data[8 : 8 + size]).items()
        if name != "__metadata__"
    }


def as_published(name: str) -> str:
    """A name as Gemma 3 was published; transformers 5.24 saves its tower without the `vision_model` between."""
    for part in ("embeddings.", "encoder.", "post_layernorm.", "head."):
        name = name.replace(f"vision_tower.{part}", f"vision_tower.vision_model.{part}")
    return name


def with_edit(config: Config, edit: Edit) -> Config:
    """The config with its exclusion list edited."""
    quantization = dict(config["quantization_config"])
    key = PROFILES[quantization["quant_method"]]
    quantization[key] = edit.of(quantization[key])
    if quantization[key] is None and key == "ignore":
        quantization[key] = []  # compressed-tensors takes no null here
    return {**config, "quantization_config": quantization}


def outcome(
    coded: Iterable[str], missing: Iterable[str], unexpected: Iterable[str], error: bool
) -> dict[str, Any]:
    """What is compared: which parameters hold codes, which scales are missing or left over, or that it raises."""
    if error:
        return {"error": True}
    return {"fp8": fold(coded), "missing": fold(missing), "unexpected": fold(unexpected)}


__all__ = [
    "MODELS",
    "PROFILES",
    "Edit",
    "as_published",
    "edits",
    "fold",
    "headers_of",
    "models",
    "outcome",
    "replace",
    "unfold",
]
