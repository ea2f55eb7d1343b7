"""Which runs speak for a checkpoint: noted in its private state folder, so that a rebuild says what it makes stale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardmill.verify.accept.identity import IdentityError, checkpoint_digest
from shardmill.verify.accept.runs import RunError, read_head

NOTE = Path(".shardmill") / "accept-runs"


def remember_run(checkpoint: Path, run: Path) -> None:
    """Note a run's folder beside a checkpoint that a build of ours keeps its state in; any other is left alone."""
    note = checkpoint / NOTE
    place = str(run.resolve())
    if not note.parent.is_dir() or place in _noted(checkpoint):
        return
    try:
        with note.open("a", encoding="utf-8") as file:
            file.write(place + "\n")
    except OSError:
        return


def stale_sentences(checkpoint: Path, will_change: bool = False) -> Iterator[str]:
    """A sentence for each noted run that no longer stands for this checkpoint, or won't after a coming rebuild."""
    noted = _noted(checkpoint)
    if not noted:
        return
    try:
        now = checkpoint_digest(checkpoint)
    except IdentityError:
        now = ""
    for place in noted:
        try:
            bound = read_head(Path(place)).identity.checkpoint
        except RunError:
            continue  # the run was deleted
        if bound != now:
            yield f"{place}: stale: recorded with another checkpoint than {checkpoint} holds now"
        elif will_change:
            yield f"{place}: will be stale: it was recorded with the checkpoint that a build would replace"


def _noted(checkpoint: Path) -> list[str]:
    try:
        return (checkpoint / NOTE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
