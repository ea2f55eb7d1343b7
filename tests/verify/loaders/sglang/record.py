"""What the real SGLang makes of every case, as a record that the default tests hold `verify loads` to.

python -m tests.verify.loaders.sglang.record FILE [model_type ...]      `make sglang-test` has what it needs

SGLANG_FIRST=7 SGLANG_EDITS=2 makes other models and other edits, for a comparison that the table has not seen.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.verify.loaders.cases import Edit
from tests.verify.loaders.held import save
from tests.verify.loaders.record import build
from tests.verify.loaders.sglang.forms import Case, cases
from tests.verify.loaders.sglang.models import (
    CLASSES,
    Headers,
    config_for,
    fold_headers,
    published_config,
    published_names,
    widened,
)
from tests.verify.loaders.sglang.oracle import Oracle

PROFILES = ("fp8", "compressed-tensors")
FIRST = int(os.environ.get("SGLANG_FIRST", "0"))
EDITED = int(os.environ.get("SGLANG_EDITS", "1"))


def headers_of(folder: Path) -> Headers:
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    return {n: (e["dtype"], tuple(e["shape"])) for n, e in entries.items() if n != "__metadata__"}


def publish(kind: str, file: Path) -> None:
    """The file with the names that such a model was published with."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    names = published_names(kind, list(tensors))
    save_file({new: tensors[old] for old, new in names.items()}, file, {"format": "pt"})


def ours(kind: str, parent: Path, home: Path) -> Iterator[Case]:
    """What our own pipeline builds of the model under both profiles."""
    for profile in PROFILES:
        child = home / f"{kind}-{profile}"
        build(parent, child, profile)
        config = published_config(kind, json.loads((child / "config.json").read_text()))
        yield Case(f"ours {profile}", Edit("as built"), config, headers_of(child))


def rows(kind: str, number: int, oracle: Oracle, home: Path) -> Iterator[dict[str, Any]]:
    parent = save(config_for(kind, number), home / kind, seed=1)
    publish(kind, parent / "model.safetensors")
    config = published_config(kind, json.loads((parent / "config.json").read_text()))
    headers = headers_of(parent)
    yield row(f"{kind} {number}", config, headers, cases(f"{kind} {number}", config, headers, EDITED), oracle)
    if kind == "deepseek_v3":
        wide = cases(f"{kind} {number} wide", *widened(config, headers))
        yield row(f"{kind} {number} wide", config, headers, wide, oracle)
    for case in ours(kind, parent, home):
        yield row(f"{kind} {number} ours", case.config, case.headers, [case], oracle)


def row(
    name: str, config: dict[str, Any], headers: Headers, made: Iterable[Case], oracle: Oracle
) -> dict[str, Any]:
    """What is needed to make the cases again, and what became of each."""
    outcomes = [
        {"form": case.form, "edit": case.edit.name} | oracle.outcome(case.config, case.headers)
        for case in made
    ]
    return {"name": name, "config": config, "headers": fold_headers(headers), "outcomes": outcomes}


def record(kinds: list[str]) -> Iterator[dict[str, Any]]:
    oracle = Oracle()
    for number, kind in enumerate(kinds):
        with tempfile.TemporaryDirectory() as home:
            yield from rows(kind, FIRST + number % 2, oracle, Path(home))
            print(kind, flush=True)


def main() -> None:
    made = list(record(sys.argv[2:] or list(CLASSES)))
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in made)
    Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n")
    print(f"{len(made)} rows, {sum(len(row['outcomes']) for row in made)} outcomes")


if __name__ == "__main__":
    main()
