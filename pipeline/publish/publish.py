"""Publishes a checkpoint: asks what the hub holds, sends the rest file by file, shows it all in one commit.

Nothing is visible before the commit, and the hub keeps every file that was sent whole, so an interrupted publication
goes on where it stopped. After the commit the branch is listed again and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.pipeline.manifest.records import Manifest
from shardmill.pipeline.publish.facts import Listing, LocalFile, Place
from shardmill.pipeline.publish.hub import CopyRefusedError, Hub, HubError
from shardmill.pipeline.publish.local import local_files, refuse_changed
from shardmill.pipeline.publish.plan import Publication, plan_publication, with_found

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command was asked for."""

    private: bool = False
    create: bool = False
    message: str | None = None
    parent: Place | None = None  # else what the manifest names
    workers: int = 2


@dataclass(frozen=True, slots=True)
class Surveyed:
    """All that is known before a byte is sent."""

    folder: Path
    place: Place
    files: tuple[LocalFile, ...]
    head: Listing | None  # the branch; None where it is not there yet
    base: Listing | None  # what the branch is, or begins as; None where the repository is not there yet
    plan: Publication
    message: str


def survey(folder: Path, place: Place, wish: Wish, tell: Tell) -> Surveyed:
    """Looks at the checkpoint and the hub and changes neither. Raises ShardmillError in a sentence."""
    files, manifest = local_files(folder)
    hub = Hub(place)
    head = hub.head()
    base = head or hub.listing(place.repository, None)
    _refuse_place(place, wish, head, base)
    plan = plan_publication(files, base, _parent(hub, manifest, wish, tell))
    if base is not None:
        plan = with_found(plan, hub.held(plan.candidates))
    message = wish.message or f"Publish {manifest.recipe.name if manifest else folder.resolve().name}"
    return Surveyed(folder, place, files, head, base, plan, message)


def publish(surveyed: Surveyed, wish: Wish, tell: Tell) -> str:
    """Does what was surveyed; the commit's hash. Raises ShardmillError in a sentence; the branch is then as it was."""
    hub = Hub(surveyed.place)
    head, plan = surveyed.head, surveyed.plan
    if head is None:
        hub.create(surveyed.base, wish.private)
        head = hub.head()
        if head is None:
            raise HubError(f"{surveyed.place}: was made and is not there; run the same command again")
    if plan.changes_nothing:
        return head.commit
    try:
        commit = _send(hub, surveyed, plan, head, wish.workers, tell)
    except CopyRefusedError as error:
        tell(f"{error}; what should be copied is sent instead")
        plan = plan_publication(surveyed.files, surveyed.base, None)
        plan = with_found(plan, hub.held(plan.candidates))
        commit = _send(hub, surveyed, plan, head, wish.workers, tell)
    _refuse_other_head(hub, surveyed)
    return commit


def _refuse_place(place: Place, wish: Wish, head: Listing | None, base: Listing | None) -> None:
    if head is None and not wish.create:
        what = f"has no branch {place.branch}" if base else "is not there, or not for you to see"
        raise HubError(f"{place}: {what}; add --create to make it, or log in (`hf auth login`)")
    if base is not None and wish.private and not base.private:
        raise HubError(
            f"{place}: is public already, and --private would not change that; change it on the hub, or leave it out"
        )


def _parent(hub: Hub, manifest: Manifest | None, wish: Wish, tell: Tell) -> Listing | None:
    """The parent's repository, whose large files the hub may copy; None, and why, where it can't be seen."""
    named = manifest.parent if manifest else {}
    repository, revision = named.get("repository"), named.get("revision")
    if wish.parent is not None:
        repository, revision = wish.parent.repository, wish.parent.branch
    if not repository or repository == hub.place.repository:
        return None
    try:
        listing = hub.listing(repository, revision)
        why = "the hub does not show it"
    except HubError as error:
        listing, why = None, str(error)
    if listing is None:
        tell(f"hf://{repository}: nothing can be copied from the parent: {why}")
    return listing


def _send(hub: Hub, surveyed: Surveyed, plan: Publication, head: Listing, workers: int, tell: Tell) -> str:
    files = [step.file for step in plan.steps if step.way in ("send", "found")]
    pool = ThreadPoolExecutor(workers)
    tasks = [pool.submit(_send_one, hub, surveyed.folder, file, tell) for file in files]
    try:
        additions = [task.result() for task in tasks]
    except Exception:
        pool.shutdown(cancel_futures=True)  # what is on its way arrives, and is not sent again
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a Ctrl-C waits for no shard
    try:
        return hub.commit(plan, additions, head.commit, surveyed.message)
    except CopyRefusedError:
        raise
    except HubError:
        # The answer may be lost of a commit that was made.
        now = hub.head()
        if now is None or now.commit == head.commit or not _holds_all(surveyed, now):
            raise
        return now.commit


def _send_one(hub: Hub, folder: Path, file: LocalFile, tell: Tell) -> Any:
    refuse_changed(folder, file)
    operation = hub.addition(folder, file)
    hub.upload(operation)
    tell(f"{file.name}: {file.bytes:,} bytes are on the hub")
    return operation


def _holds_all(surveyed: Surveyed, listing: Listing) -> bool:
    return plan_publication(surveyed.files, listing, None).changes_nothing


def _refuse_other_head(hub: Hub, surveyed: Surveyed) -> None:
    """Raises HubError where the branch, listed again, is not the checkpoint."""
    listing = hub.head()
    if listing is None:
        raise HubError(f"{surveyed.place}: was committed to and is not there; look at it on the hub")
    plan = plan_publication(surveyed.files, listing, None)
    wrong = [step.file.name for step in plan.steps if step.way != "keep"] + [
        file.name for file in plan.deleted
    ]
    if wrong:
        raise HubError(
            f"{surveyed.place}: after the commit {wrong[0]} is not as in {surveyed.folder}; somebody else has "
            f"committed, or the hub ignores it (.gitignore); run the same command again"
        )
