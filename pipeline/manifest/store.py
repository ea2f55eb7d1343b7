"""Where records are kept: the private state of an output folder, and how its files come to be published.

A checkpoint appears whole or not at all. New files are made in `.shardmill/staging`; a commit takes away the gates
(the index, and model.safetensors where there is one), moves the files in, and puts the gates back last. The commit's
journal is written first, so that a cut commit is finished by whoever comes next. The state folder is never
published and may be deleted: the next build then hashes what it would have believed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.digest import TensorHash, canonical
from shardmill.pipeline.manifest.records import MANIFEST_FILE, Manifest, Receipt
from shardmill.pipeline.types import INDEX_FILE, SINGLE_FILE

STATE_FOLDER = ".shardmill"
_GATES = (INDEX_FILE, SINGLE_FILE)  # without them no loader takes the folder for a checkpoint
Stat = Sequence[int]


@dataclass(frozen=True, slots=True)
class StatCache:
    """What was believed when the last build ended: the stats of files whose bytes that build's manifest describes."""

    parent: Mapping[str, Stat] = field(default_factory=dict)
    output: Mapping[str, Stat] = field(default_factory=dict)
    fingerprint: str = (
        ""  # digest of everything that the build depended on (shardmill.pipeline.run.unchanged)
    )
    manifest: str = ""  # digest of the manifest that the stats go with; `Store.remember` fills it in


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

    def manifest(self) -> Manifest | None:
        path = self.out / MANIFEST_FILE
        return Manifest.from_json(path.read_bytes(), str(path)) if path.exists() else None

    def stat_cache(self) -> StatCache:
        """What was noted last. Nothing where that can't be read, or goes with another manifest than the folder's:
        a build that was cut after its commit has published, but noted nothing.
        """
        try:
            seen = StatCache(**json.loads(self._seen.read_bytes()))
        except (OSError, ValueError, TypeError):
            return StatCache()
        known = isinstance(seen.parent, dict) and isinstance(seen.output, dict)
        return seen if known and self._manifest_digest() in (seen.manifest, None) else StatCache()

    def remember(self, seen: StatCache) -> None:
        noted = {"parent": dict(seen.parent), "output": dict(seen.output), "fingerprint": seen.fingerprint}
        _write_whole(self._seen, canonical({**noted, "manifest": self._manifest_digest() or ""}))

    def _manifest_digest(self) -> str | None:
        path = self.out / MANIFEST_FILE
        return TensorHash(path.read_bytes()).hexdigest() if path.exists() else None

    def start(self, parent: Mapping[str, Stat]) -> None:
        """Notes the parent files' stats that the shards being staged are made from."""
        _write_whole(self._started, canonical(dict(parent)))

    def started(self) -> Mapping[str, Stat]:
        """What `start` noted last: the stats that staged shards were made from."""
        try:
            noted: dict[str, Stat] = json.loads(self._started.read_bytes())
        except (OSError, ValueError):
            return {}
        return noted

    def stage(self, name: str, data: bytes) -> None:
        """Writes a small file into the staging folder."""
        path = self.staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, data)

    def keep_receipt(self, receipt: Receipt) -> None:
        """Says that the staged shard is complete: written after its bytes are on the disk."""
        _write_whole(self.receipts / f"{receipt.file}.json", receipt.to_json())

    def staged_receipt(self, file: str, key: str, size: int) -> Receipt | None:
        """The receipt of a shard that an earlier, cut run completed for the same plan."""
        try:
            receipt = Receipt.from_json((self.receipts / f"{file}.json").read_bytes())
            whole = (self.staging / file).stat().st_size == size
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return receipt if whole and receipt.key == key else None

    def holds_leftovers(self) -> bool:
        """Whether a build that was cut has left something in the staging folder."""
        return self.staging.is_dir() and any(self.staging.iterdir())

    def sweep(self, keep: Iterable[str]) -> None:
        """Removes whatever lies in the staging folder but the complete shards named in `keep`."""
        kept = set(keep)
        for entry in list(self.staging.iterdir()):
            if entry.name not in kept:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for entry in list(self.receipts.iterdir()):
            if entry.name.removesuffix(".json") not in kept:
                entry.unlink()

    def foreign_files(self) -> list[str]:
        """What lies in an output folder in which no build of ours was begun."""
        ours = (self.out / MANIFEST_FILE, self._journal, self._started, self._seen)
        if not self.out.is_dir() or any(path.exists() for path in ours):
            return []
        return sorted(entry.name for entry in self.out.iterdir() if entry.name != STATE_FOLDER)

    def commit(self, staged: Sequence[str], removed: Sequence[str], gate: str) -> None:
        """Publishes the `staged` files and takes the `removed` ones away; `gate` comes back last."""
        fields: dict[str, Any] = {"staged": list(staged), "removed": list(removed), "gate": gate}
        self._sync_folders_of(self.staging, staged)
        _write_whole(self._journal, canonical(fields))
        _sync_folder(self.state)
        self.finish_commit()

    def commit_is_pending(self) -> bool:
        """Whether an earlier commit was cut."""
        return self._journal.exists()

    def finish_commit(self) -> bool:
        """Carries a journalled commit to its end, whatever part of it is done. False where there is none."""
        try:
            fields = json.loads(self._journal.read_bytes())
            last, staged, removed = fields["gate"], fields["staged"], fields["removed"]
        except FileNotFoundError:
            return False
        except (ValueError, TypeError, KeyError) as error:
            raise BuildError(
                f"{self._journal}: not the journal of a commit ({error}); delete {self.state} to build anew"
            ) from None
        for gate in _GATES:
            self._lower(gate, gate in removed)
        _sync_folder(self.out)
        for name in removed:
            (self.out / name).unlink(missing_ok=True)
        for name in staged:
            if name not in (*_GATES, MANIFEST_FILE):
                self._publish(name)
        self._publish(MANIFEST_FILE)
        self._sync_folders_of(self.out, staged)
        for gate in sorted(_GATES, key=lambda name: name == last):
            self._publish(gate)
        _sync_folder(self.out)
        self._journal.unlink()
        _sync_folder(self.state)
        self.sweep(keep=())
        return True

    def _lower(self, gate: str, removed: bool) -> None:
        """Takes a gate out of the folder. One that stays as it is goes back to staging, to return unchanged."""
        published = self.out / gate
        if published.exists():
            if removed or (self.staging / gate).exists():
                published.unlink()
            else:
                published.rename(self.staging / gate)

    def _sync_folders_of(self, home: Path, names: Sequence[str]) -> None:
        """Makes the places of `names` below `home`, and of all that stands there, outlast a power cut."""
        folders = {home, *(folder for name in names for folder in (home / name).parents)}
        for folder in sorted(folders):
            if folder.is_relative_to(home) and folder.is_dir():
                _sync_folder(folder)

    def _publish(self, name: str) -> None:
        source, target = self.staging / name, self.out / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)


def _write_whole(path: Path, data: bytes) -> None:
    """Writes `data` so that `path` never holds a part of it."""
    draft = path.with_name(path.name + ".part")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a full disk names no file
        raise OSError(error.errno, error.strerror, str(path)) from None
    draft.replace(path)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
