"""Where records are kept: the private state of an output folder.

New files are made in `.shardmill/staging`, each shard with a receipt in `.shardmill/receipts`; a commit publishes them
(shardmill.pipeline.manifest.commit). The state folder is never published and may be deleted: the next build then
hashes what it would have trusted.

What a folder holds when a build begins is read once, by `load`, and goes from there as a value; what the next build
may trust is written once, by `save`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from shardmill.pipeline.container.atomic import write_whole
from shardmill.pipeline.container.filesystem import remove, stat_or_none
from shardmill.pipeline.container.regular import read_regular
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.commit import Commit, Journal, mark_of
from shardmill.pipeline.manifest.digest import TensorHash, canonical
from shardmill.pipeline.manifest.records import MANIFEST_FILE, STATE_FOLDER
from shardmill.pipeline.manifest.state import (
    Memory,
    Staged,
    StatCache,
    parse_staged,
    parse_stats,
    read_object,
    staged_fields,
)
from shardmill.pipeline.types import Stat

_MANIFEST_BYTES_MAX = 1 << 30


class Store:
    """The output folder `out` and its state."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.state = out / STATE_FOLDER
        self.staging = self.state / "staging"
        self.receipts = self.state / "receipts"
        self.lock = self.state / "lock"
        self._journal = self.state / "commit.json"
        self._seen = self.state / "seen.json"
        self._commit = Commit(out, self.staging, self._journal)

    def open(self) -> None:
        """Makes the folders. Raises BuildError where that can't be done, or one of them is a link to elsewhere."""
        try:
            for folder in (self.state, self.staging, self.receipts):
                if folder.is_symlink():
                    raise BuildError(
                        f"{folder}: is a link; files there would be deleted, remove the link to build"
                    )
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BuildError(
                f"{self.out}: cannot be written: {error.strerror}; choose another --out"
            ) from None

    def load(self) -> Memory:
        """What the folder holds now; of what can't be read, nothing."""
        text = self._manifest_text()
        return Memory(
            place=str(self.out / MANIFEST_FILE),
            manifest_text=text,
            stats=self._stats(text),
            staged=self.staged(path.name.removesuffix(".json") for path in self.receipts.glob("*.json")),
        )

    def save(self, stats: StatCache) -> None:
        """Notes what the next build may trust, with the digest of the manifest that the stats go with."""
        text = self._manifest_text()
        write_whole(self._seen, canonical({**asdict(stats), "manifest": _digest(text) if text else ""}))

    def _manifest_text(self) -> bytes | None:
        path = self.out / MANIFEST_FILE
        return read_regular(path, _MANIFEST_BYTES_MAX) if path.exists() else None

    def _stats(self, manifest: bytes | None) -> StatCache:
        """What was saved last. Nothing where it goes with another manifest than the folder's: a build that was
        interrupted after its commit has published, but saved nothing.
        """
        noted = read_object(self._seen)
        stats = parse_stats(noted, self._seen)
        return stats if manifest is None or noted.get("manifest") == _digest(manifest) else StatCache()

    def staged(self, files: Iterable[str]) -> dict[str, Staged]:
        """File -> Staged, for each of `files` that is in the staging folder with the size of its receipt."""
        found = {}
        for file in files:
            staged = parse_staged(read_object(self.receipts / f"{file}.json"))
            stat = stat_or_none(self.staging / file)
            if staged and stat and (staged.receipt.file, staged.receipt.file_bytes) == (file, stat[0]):
                found[file] = staged
        return found

    def stage(self, name: str, data: bytes) -> None:
        """Writes a small file into the staging folder."""
        path = self.staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)

    def keep_receipt(self, staged: Staged) -> None:
        """Says that the staged shard is complete: written after its bytes are on the disk."""
        write_whole(self.receipts / f"{staged.receipt.file}.json", canonical(staged_fields(staged)))

    def discard(self, file: str) -> None:
        """Forgets a staged shard, so that the next build makes it again."""
        (self.receipts / f"{file}.json").unlink(missing_ok=True)

    def holds_leftovers(self) -> bool:
        """Whether an interrupted build has left something in the staging folder."""
        return self.staging.is_dir() and any(self.staging.iterdir())

    def sweep(self, keep: Iterable[str]) -> None:
        """Removes whatever is in the staging folder but the complete shards named in `keep`."""
        kept = set(keep)
        for entry in list(self.staging.iterdir()):
            if entry.name not in kept:
                remove(entry)
        for entry in list(self.receipts.iterdir()):
            if entry.name.removesuffix(".json") not in kept:
                remove(entry)

    def foreign_files(self) -> list[str]:
        """What an output folder holds in which no build of ours was begun."""
        ours = (self.out / MANIFEST_FILE, self._journal, self._seen)
        if not self.out.is_dir() or any(path.exists() for path in ours):
            return []
        return sorted(entry.name for entry in self.out.iterdir() if entry.name != STATE_FOLDER)

    def commit(self, staged: Mapping[str, Stat], removed: Iterable[str], entry: str) -> None:
        """Publishes the `staged` files, which have these stats, and takes the `removed` ones away.

        Raises BuildError, the earlier checkpoint untouched, where one is gone or its place is taken. The file `entry`
        comes back last.
        """
        journal = Journal(
            {name: mark_of(stat) for name, stat in staged.items()}, tuple(sorted(removed)), entry
        )
        self._commit.begin(journal)
        self._commit.carry_out(journal)
        self.sweep(keep=())

    def commit_is_pending(self) -> bool:
        """Whether an earlier commit was interrupted."""
        return self._journal.exists()

    def finish_commit(self, tell: Callable[[str], None]) -> bool:
        """Carries a journalled commit to its end, whatever part of it is done. False where there is none."""
        if not self._commit.finish(tell):
            return False
        self.sweep(keep=())
        return True


def _digest(data: bytes) -> str:
    return TensorHash(data).hexdigest()
