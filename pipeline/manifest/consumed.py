"""The parent's shards that a build has consumed: each gave way to its children, and left its header and a record.

In the state folder of the output, `consumed/NAME` is the shard's header with a hole for its data, and
`consumed/NAME.json`, written after it, says which file it was. So the same recipe can be planned again, though only
children that are whole already can be had from it.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardmill.pipeline.container.atomic import whole_file, write_whole
from shardmill.pipeline.container.filesystem import sync_folder
from shardmill.pipeline.manifest.digest import canonical
from shardmill.pipeline.manifest.state import parse_stats, read_object
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.types import Consumed, Stat


class Records:
    """The records in the output folder of `store`."""

    def __init__(self, store: Store) -> None:
        self._folder = store.state / "consumed"

    @property
    def is_empty(self) -> bool:
        return not self._folder.is_dir() or not any(self._folder.glob("*.json"))

    def keep(self, parent: Path, file: str, stat: Stat, is_pinned: bool, data_begin: int) -> None:
        """Records that the parent's `file` is about to go; durable when this returns."""
        self._folder.mkdir(exist_ok=True)
        with (parent / file).open("rb") as shard, whole_file(self._folder / file) as head:
            head.write(shard.read(data_begin))
            os.ftruncate(head.fileno(), stat[0])
        facts = {"parent": {file: list(stat)}, "pinned": is_pinned}
        write_whole(self._folder / f"{file}.json", canonical(facts))
        sync_folder(self._folder)
        sync_folder(self._folder.parent)

    def load(self) -> dict[str, Consumed]:
        """The parent's shard -> its record; of what can't be read, nothing."""
        found = {}
        for path in sorted(self._folder.glob("*.json")):
            file, fields = path.name.removesuffix(".json"), read_object(path)
            stat, head = parse_stats(fields, path).parent.get(file), self._folder / file
            if stat and head.is_file():
                found[file] = Consumed(head, stat, fields.get("pinned") is True)
        return found
