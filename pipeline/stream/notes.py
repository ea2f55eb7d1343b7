"""What a build into a hub keeps here: a folder in the user's cache, with a note of each shard that it is done with.

A note says what the shard turned out to be and from which of the parent's files. It is believed while the plan's key
and these files are the same; whether the hub holds the shard is asked of the hub. The folder may be deleted: then the
shards are made again, and those that the hub holds are not sent again.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Iterable
from pathlib import Path

from shardmill.pipeline.container.atomic import write_whole
from shardmill.pipeline.container.hub import origin_of, place_of
from shardmill.pipeline.manifest.digest import canonical
from shardmill.pipeline.manifest.state import Staged, parse_staged, read_object, staged_fields
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.plan.types import ShardPlan
from shardmill.pipeline.publish.facts import Place
from shardmill.pipeline.types import Parent


def working_folder(place: Place) -> Path:
    """Where shards for `place` are made: `~/.cache/shardmill/out/org--name@branch`, or below XDG_CACHE_HOME."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"{place.repository.replace('/', '--')}@{urllib.parse.quote(place.branch, safe='')}"
    return (Path(home) / "shardmill" / "out" / name).absolute()


class Notes:
    """The notes of a working folder, about shards that were made from `parent`."""

    def __init__(self, store: Store, parent: Parent) -> None:
        self._folder, self._parent = store.state / "sent", parent
        self._folder.mkdir(exist_ok=True)

    def keep(self, staged: Staged) -> None:
        """Notes a shard that the hub holds, or can copy; durable when this returns."""
        fields = {**staged_fields(staged), "parent": place_of(self._parent.folder)}
        write_whole(self._folder / f"{staged.receipt.file}.json", canonical(fields))

    def of(self, shard: ShardPlan) -> Staged | None:
        """The note of a shard, where it is of this plan and of the parent's files as they are."""
        fields = read_object(self._folder / f"{shard.file}.json")
        staged = parse_staged(fields)
        if staged is None or staged.receipt.sha256 is None:
            return None
        receipt = staged.receipt
        if (receipt.file, receipt.key, receipt.file_bytes) != (
            shard.file,
            shard.key,
            shard.header.file_bytes,
        ):
            return None
        # A commit of a hub can't change, whatever became of the mirror's files.
        origin = origin_of(self._parent.folder) and place_of(self._parent.folder)
        elsewhere = {*self._parent.replaced, *self._parent.others}
        if origin and fields.get("parent") == origin and not elsewhere & set(shard.inputs):
            return staged
        same = all(staged.inputs.get(file) == self._parent.stats[file] for file in shard.inputs)
        return staged if same else None

    def forget_others(self, files: Iterable[str]) -> None:
        """Removes the notes of all shards but `files`."""
        kept = {f"{file}.json" for file in files}
        for path in list(self._folder.iterdir()):
            if path.name not in kept:
                path.unlink()
