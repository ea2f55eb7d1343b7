"""The commit: staged files appear in the output folder together, or not at all.

The entry files (the index, and model.safetensors where there is one) are taken away, the files are moved in, and the
entry files come back last. The journal is written first, so that whoever comes next finishes an interrupted commit.
Before it is written every file of the commit is known to be staged and every target to be free: a commit that is begun
can end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.pipeline.container.atomic import write_whole
from shardmill.pipeline.container.filesystem import replace, stat_or_none, sync_folder
from shardmill.pipeline.container.regular import read_regular, resolved
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.digest import canonical
from shardmill.pipeline.manifest.records import MANIFEST_FILE
from shardmill.pipeline.manifest.state import refuse_outside
from shardmill.pipeline.types import INDEX_FILE, SINGLE_FILE, Stat

ENTRY_FILES = (INDEX_FILE, SINGLE_FILE)  # without them no loader takes the folder for a checkpoint
Mark = tuple[int, int]  # size and mtime_ns: what a file keeps when it is moved
_JOURNAL_BYTES_MAX = 1 << 28
_TRIES = 2  # a step that fails once, as on a network file system, is tried again


@dataclass(frozen=True, slots=True)
class Journal:
    """What a commit does."""

    staged: Mapping[str, Mark | None]  # file -> its mark; None where an earlier version wrote none
    removed: tuple[str, ...]
    entry: str  # the entry file that comes back last

    def to_json(self) -> bytes:
        staged = {name: list(mark) if mark else None for name, mark in self.staged.items()}
        return canonical({"staged": staged, "removed": list(self.removed), "entry": self.entry})

    @classmethod
    def read(cls, path: Path) -> Journal | None:
        """The journal at `path`; None where it is no journal. Raises BuildError where a name leads outside."""
        try:
            fields = json.loads(read_regular(path, _JOURNAL_BYTES_MAX))
            # An earlier version wrote "gate", and a list of what is staged.
            entry = fields["entry"] if "entry" in fields else fields["gate"]
            staged, removed = _marks(fields["staged"]), fields["removed"]
            if entry not in ENTRY_FILES or not isinstance(removed, list):
                return None
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError):
            return None
        refuse_outside((*staged, *removed), path)
        return cls(staged, tuple(removed), entry)


def _marks(value: Any) -> dict[str, Mark | None]:
    if isinstance(value, list):
        return dict.fromkeys(value)
    return {name: (int(mark[0]), int(mark[1])) if mark else None for name, mark in value.items()}


def mark_of(stat: Stat | None) -> Mark | None:
    return stat[:2] if stat else None


class Commit:
    """A journalled commit from the folder `staging` into the folder `out`."""

    def __init__(self, out: Path, staging: Path, journal_path: Path) -> None:
        self.out, self.staging, self.path = out, staging, journal_path

    def begin(self, journal: Journal) -> None:
        """Writes the journal. Raises BuildError, with nothing changed, where the commit could not end."""
        if missing := self._missing(journal, (self.staging,)):
            raise BuildError(
                f"{self.staging / missing}: is gone, so nothing is published; something else removed it, or a "
                f"worker has another folder under the name {self.out}; build again: only it is made again"
            )
        for name in journal.staged:
            self._refuse_taken(name, set(journal.removed))
        for name in journal.removed:
            self._refuse_link(name)
        self._sync_folders_of(self.staging, journal.staged)
        write_whole(self.path, journal.to_json())
        sync_folder(self.path.parent)

    def finish(self, tell: Callable[[str], None]) -> bool:
        """Carries the journalled commit to its end, whatever part of it is done. False where there is none.

        A journal that can't be carried out is dropped, and `tell` hears of it: the next build makes what is missing.
        """
        if not self.path.exists():
            return False
        journal = Journal.read(self.path)
        missing = self._missing(journal, (self.staging, self.out)) if journal else None
        if journal is None or missing:
            why = f"{missing} is gone from {self.staging}" if missing else "it has not the form of a journal"
            tell(f"{self.path}: an interrupted commit is given up: {why}; what is missing is made again")
            self.path.unlink()
            return False
        self.carry_out(journal)
        return True

    def carry_out(self, journal: Journal) -> None:
        """Does what the journal says. A step that fails is tried once more: each may be done twice."""
        for left in reversed(range(_TRIES)):
            try:
                self._carry_out(journal)
                return
            except OSError:
                if not left:
                    raise

    def _carry_out(self, journal: Journal) -> None:
        for name in ENTRY_FILES:
            self._take_out(name, name in journal.removed)
        sync_folder(self.out)
        for name in journal.removed:
            self._remove(name)
        for name in journal.staged:
            if name not in (*ENTRY_FILES, MANIFEST_FILE):
                self._publish(name)
        self._publish(MANIFEST_FILE)
        self._sync_folders_of(self.out, journal.staged)
        for name in sorted(ENTRY_FILES, key=lambda name: name == journal.entry):
            self._publish(name)
        sync_folder(self.out)
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def _missing(self, journal: Journal, folders: tuple[Path, ...]) -> str | None:
        """The first staged file that is in none of the `folders`."""
        for name, mark in journal.staged.items():
            found = [mark_of(stat_or_none(folder / name)) for folder in folders]
            if not (mark in found if mark else any(found)):
                return name
        return None

    def _refuse_taken(self, name: str, removed: set[str]) -> None:
        """Raises BuildError where something that is not ours has the place of the file `name`."""
        self._refuse_link(name)
        target = self.out / name
        ours = {self.out / each for each in removed}
        blocking = [above for above in target.parents if above.is_relative_to(self.out) and above.is_file()]
        if target.is_dir():
            blocking += [path for path in target.rglob("*") if path.is_symlink() or not path.is_dir()]
        if foreign := [path for path in blocking if path not in ours]:
            raise BuildError(f"{foreign[0]}: is in the way of {target}; move it away, then build again")

    def _refuse_link(self, name: str) -> None:
        """Raises BuildError where a folder on the way to `name` is a link that leads out."""
        home, folder = resolved(self.out), (self.out / name).parent
        if folder != self.out and not resolved(folder).is_relative_to(home):
            raise BuildError(
                f"{folder}: is a link that leads out of {self.out}; remove the link, then build again"
            )

    def _take_out(self, entry: str, removed: bool) -> None:
        """Takes an entry file out of the folder. One that stays as it is goes back to staging, to return unchanged."""
        published = self.out / entry
        if published.exists():
            if removed or (self.staging / entry).exists():
                published.unlink()
            else:
                replace(published, self.staging / entry)

    def _remove(self, name: str) -> None:
        """Takes a file away, and the folders that this leaves empty."""
        self._refuse_link(name)
        path = self.out / name
        if path.is_dir() and not path.is_symlink():
            return  # somebody's folder has the name now
        with suppress(NotADirectoryError):
            path.unlink(missing_ok=True)
        for folder in path.parents:
            if folder == self.out or not _without_folder(folder):
                return

    def _sync_folders_of(self, home: Path, names: Iterable[str]) -> None:
        """Makes the places of `names` below `home`, and of all that is in them, outlast a power failure."""
        folders = {home, *(folder for name in names for folder in (home / name).parents)}
        for folder in sorted(folders):
            if folder.is_relative_to(home) and folder.is_dir():
                sync_folder(folder)

    def _publish(self, name: str) -> None:
        source, target = self.staging / name, self.out / name
        if source.exists():
            self._refuse_link(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir() and not target.is_symlink():
                _without_empty_folders(target)
            replace(source, target)


def _without_folder(folder: Path) -> bool:
    """Whether the folder is gone now; one that is not empty stays."""
    try:
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True


def _without_empty_folders(top: Path) -> None:
    """Removes a tree of empty folders; where something is in one, the rename that follows tells."""
    for folder in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
        _without_folder(folder)
    _without_folder(top)
