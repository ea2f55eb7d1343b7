"""Where records are kept: the private state of an output folder, and how its files come to be published.

A checkpoint appears whole or not at all. New files are made in `.shardmill/staging`; a commit takes away the entry
files (the index, and model.safetensors where there is one), moves the files in, and puts the entry files back last.
The commit's journal is written first, so that an interrupted commit is finished by whoever comes next. The state
folder is never published and may be deleted: the next build then hashes what it would have trusted.

What a folder holds when a build begins is read once, by `load`, and goes from there as a value; what the next build
may trust is written once, by `save`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.atomic import write_whole
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.digest import TensorHash, canonical
from shardmill.pipeline.manifest.records import MANIFEST_FILE, Manifest, Receipt
from shardmill.pipeline.types import INDEX_FILE, SINGLE_FILE

STATE_FOLDER = ".shardmill"
_ENTRY_FILES = (INDEX_FILE, SINGLE_FILE)  # without them no loader takes the folder for a checkpoint
Stat = Sequence[int]


@dataclass(frozen=True, slots=True)
class StatCache:
    """The stats of files whose bytes the manifest describes, as they were when the last build ended."""

    parent: Mapping[str, Stat] = field(default_factory=dict)
    output: Mapping[str, Stat] = field(default_factory=dict)
    # Digest of everything that the build depended on (shardmill.pipeline.run.unchanged).
    fingerprint: str = ""


@dataclass(frozen=True)
class Memory:
    """What an output folder held when a build began: the earlier checkpoint, and what an interrupted build left."""

    place: str  # of the manifest, for its errors
    manifest_text: bytes | None
    stats: StatCache
    started: Mapping[str, Stat]  # the parent files' stats that staged shards were made from
    staged: Mapping[str, Receipt]  # file -> receipt of each shard that is complete in the staging folder

    @cached_property
    def manifest(self) -> Manifest | None:
        """Parsed when it is first asked for. Raises CheckpointError where it is no manifest."""
        return None if self.manifest_text is None else Manifest.from_json(self.manifest_text, self.place)

    def trusted(self, paranoid: bool) -> StatCache:
        """The stats under which a file need not be read; none for a paranoid build."""
        return StatCache() if paranoid else self.stats

    @property
    def published(self) -> set[str]:
        """Files of the earlier checkpoint. Without a manifest the stats still name them."""
        return set(self.manifest.files if self.manifest else self.stats.output)


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
        self._started = self.state / "started.json"

    def open(self) -> None:
        """Makes the folders. Raises BuildError where that can't be done."""
        try:
            for folder in (self.state, self.staging, self.receipts):
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
            started=_object(self._started),
            staged=self._staged(),
        )

    def save(self, stats: StatCache) -> None:
        """Notes what the next build may trust, with the digest of the manifest that the stats go with."""
        text = self._manifest_text()
        write_whole(self._seen, canonical({**asdict(stats), "manifest": _digest(text) if text else ""}))

    def _manifest_text(self) -> bytes | None:
        path = self.out / MANIFEST_FILE
        return path.read_bytes() if path.exists() else None

    def _stats(self, manifest: bytes | None) -> StatCache:
        """What was saved last. Nothing where it goes with another manifest than the folder's: a build that was
        interrupted after its commit has published, but saved nothing.
        """
        noted = dict(_object(self._seen))
        saved_with = noted.pop("manifest", "")
        try:
            stats = StatCache(**noted)
        except TypeError:
            return StatCache()
        known = isinstance(stats.parent, dict) and isinstance(stats.output, dict)
        return stats if known and (manifest is None or saved_with == _digest(manifest)) else StatCache()

    def _staged(self) -> dict[str, Receipt]:
        """File -> receipt, for each staged shard whose file has the receipt's size."""
        found = {}
        for path in self.receipts.glob("*.json"):
            try:
                receipt = Receipt.from_json(path.read_bytes())
                file = path.name.removesuffix(".json")
                size = (self.staging / file).stat().st_size
                if (receipt.file, receipt.file_bytes) == (file, size):
                    found[file] = receipt
            except (OSError, ValueError, TypeError, KeyError):
                continue
        return found

    def start(self, parent: Mapping[str, Stat]) -> None:
        """Notes the parent files' stats that the shards being staged are made from."""
        write_whole(self._started, canonical(dict(parent)))

    def stage(self, name: str, data: bytes) -> None:
        """Writes a small file into the staging folder."""
        path = self.staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)

    def keep_receipt(self, receipt: Receipt) -> None:
        """Says that the staged shard is complete: written after its bytes are on the disk."""
        write_whole(self.receipts / f"{receipt.file}.json", receipt.to_json())

    def holds_leftovers(self) -> bool:
        """Whether an interrupted build has left something in the staging folder."""
        return self.staging.is_dir() and any(self.staging.iterdir())

    def sweep(self, keep: Iterable[str]) -> None:
        """Removes whatever is in the staging folder but the complete shards named in `keep`."""
        kept = set(keep)
        for entry in list(self.staging.iterdir()):
            if entry.name not in kept:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for entry in list(self.receipts.iterdir()):
            if entry.name.removesuffix(".json") not in kept:
                entry.unlink()

    def foreign_files(self) -> list[str]:
        """What an output folder holds in which no build of ours was begun."""
        ours = (self.out / MANIFEST_FILE, self._journal, self._started, self._seen)
        if not self.out.is_dir() or any(path.exists() for path in ours):
            return []
        return sorted(entry.name for entry in self.out.iterdir() if entry.name != STATE_FOLDER)

    def commit(self, staged: Sequence[str], removed: Sequence[str], entry: str) -> None:
        """Publishes the `staged` files and takes the `removed` ones away; the file `entry` comes back last."""
        fields: dict[str, Any] = {"staged": list(staged), "removed": list(removed), "entry": entry}
        self._sync_folders_of(self.staging, staged)
        write_whole(self._journal, canonical(fields))
        _sync_folder(self.state)
        self.finish_commit()

    def commit_is_pending(self) -> bool:
        """Whether an earlier commit was interrupted."""
        return self._journal.exists()

    def finish_commit(self) -> bool:
        """Carries a journalled commit to its end, whatever part of it is done. False where there is none."""
        try:
            fields = json.loads(self._journal.read_bytes())
            # An earlier version wrote "gate".
            last = fields["entry"] if "entry" in fields else fields["gate"]
            staged, removed = fields["staged"], fields["removed"]
        except FileNotFoundError:
            return False
        except (ValueError, TypeError, KeyError) as error:
            raise BuildError(
                f"{self._journal}: not the journal of a commit ({error}); delete {self.state} to build anew"
            ) from None
        for name in _ENTRY_FILES:
            self._take_out(name, name in removed)
        _sync_folder(self.out)
        for name in removed:
            (self.out / name).unlink(missing_ok=True)
        for name in staged:
            if name not in (*_ENTRY_FILES, MANIFEST_FILE):
                self._publish(name)
        self._publish(MANIFEST_FILE)
        self._sync_folders_of(self.out, staged)
        for name in sorted(_ENTRY_FILES, key=lambda name: name == last):
            self._publish(name)
        _sync_folder(self.out)
        self._journal.unlink()
        _sync_folder(self.state)
        self.sweep(keep=())
        return True

    def _take_out(self, entry: str, removed: bool) -> None:
        """Takes an entry file out of the folder. One that stays as it is goes back to staging, to return unchanged."""
        published = self.out / entry
        if published.exists():
            if removed or (self.staging / entry).exists():
                published.unlink()
            else:
                published.rename(self.staging / entry)

    def _sync_folders_of(self, home: Path, names: Sequence[str]) -> None:
        """Makes the places of `names` below `home`, and of all that is in them, outlast a power failure."""
        folders = {home, *(folder for name in names for folder in (home / name).parents)}
        for folder in sorted(folders):
            if folder.is_relative_to(home) and folder.is_dir():
                _sync_folder(folder)

    def _publish(self, name: str) -> None:
        source, target = self.staging / name, self.out / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)


def _object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file of ours; an empty one where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _digest(data: bytes) -> str:
    return TensorHash(data).hexdigest()


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
