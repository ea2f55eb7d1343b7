"""No false alarm: every clean checkpoint of the zoo, alone and beside its parent, from a folder and over HTTP.

`python -m tests.verify.sweep [NAME ...]` asks all that `verify all` asks, prints what was found and counts.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from shardmill.verify.commands.all import ask_all, together
from shardmill.verify.commands.options import Bar
from shardmill.verify.reading.places import web_folder
from shardmill.verify.reading.source import Folder, Source
from tests.verify.web import serving
from tests.verify.zoo.clean import CLEAN, nvfp4_parent
from tests.verify.zoo.model import Model
from tests.verify.zoo.published import PUBLISHED, Published, parent

SEED = 3
WAYS = ("alone", "remote", "parent", "remote and parent")
Made = tuple[Callable[[], Model], Callable[[], Model] | None]  # the checkpoint, and what it was made from

# Whose floats are changed on purpose, or named otherwise: the zoo's parent is not theirs.
NO_CHILDREN = (
    "bf16 zero-centred norms",
    "bf16 padded vocabulary",
    "odd dtypes and a mask of infinities",
    "gpt-oss",  # its experts are stacks, the parent's lie one by one
)


def _parent_of(one: Published) -> Model:
    """The floats that a published checkpoint was made from, of the same architecture."""
    before, child = parent(one.moe), one.model()
    if before.config is not None and child.config is not None:
        before.config |= {key: child.config[key] for key in ("model_type", "architectures")}
    return before


ZOO: dict[str, Made] = {
    **{name: (make, nvfp4_parent if name == "mixed_child" else None) for name, make in CLEAN.items()},
    **{
        one.name: (one.model, None if one.name in NO_CHILDREN else partial(_parent_of, one))
        for one in PUBLISHED
    },
}


def alarms(name: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """(way, what was found) of one checkpoint that is written to `folder`; a way that it has not is left out."""
    make, original = ZOO[name]
    child, before = folder / "child", folder / "parent"
    make().write(child)
    if original is not None:
        original().write(before)
    with serving(child) as server:
        remote = web_folder(server.address)
        yield "alone", loud(Folder(child), None)
        yield "remote", loud(remote, None)
        if original is not None:
            yield "parent", loud(Folder(child), Folder(before))
            yield "remote and parent", loud(remote, Folder(before))


def loud(source: Source, beside: Source | None) -> list[str]:
    """Errors and warnings of `verify all`."""
    with Bar() as bar:
        report = together(ask_all(source, beside, bar, SEED))
    return [
        f"{f.rule.id} {f.tensor or f.file}: expected {f.expected}, got {f.got}"
        for f in report.worst_first()
        if f.severity != "info"
    ]


def main() -> int:
    names = [name for name in ZOO if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
    asked, bad = dict.fromkeys(WAYS, 0), 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for way, found in alarms(name, Path(folder)):
                asked[way] += 1
                bad += bool(found)
                for line in found[:3]:
                    print(f"ALARM {name}, {way}: {line}", flush=True)
    said = ", ".join(f"{count} {way}" for way, count in asked.items())
    print(f"{bad} of {sum(asked.values())} askings of {len(names)} clean checkpoints gave an alarm ({said})")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
