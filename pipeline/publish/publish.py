"""Publishes a checkpoint: asks what the hub holds, sends the rest file by file, shows it all in one commit.

Nothing is visible before the commit, and the hub keeps every file that was sent whole, so an interrupted publication
goes on where it stopped. After the commit the branch is listed again and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.pipeline.manifest.records import Manifest
from shardmill.pipeline.publish.answers import HubError
from shardmill.pipeline.publish.counted import Count
from shardmill.pipeline.publish.facts import Listing, LocalFile, Place
from shardmill.pipeline.publish.hub import CopyRefusedError, Hub
from shardmill.pipeline.publish.local import local_files, refuse_changed
from shardmill.pipeline.publish.plan import Publication, plan_publication, with_found

Tell = Callable[[str], None]
Advance = Callable[[int], None]


def _nothing(count: int) -> None:
    return None


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
    refuse_place(place, wish, head, base)
    plan = plan_publication(files, base, _parent(hub, manifest, wish, tell))
    if base is not None:
        plan = with_found(plan, hub.held(plan.candidates))
    message = wish.message or f"Publish {manifest.recipe.name if manifest else folder.resolve().name}"
    return Surveyed(folder, place, files, head, base, plan, message)


def publish(
    surveyed: Surveyed, wish: Wish, tell: Tell, begin: Advance = _nothing, advance: Advance = _nothing
) -> str:
    """Does what was surveyed; the commit's hash. `begin` hears how many bytes are to go, `advance` of those that go.

    Raises ShardmillError in a sentence; the branch is then as it was."""
    hub = Hub(surveyed.place)
    plan = surveyed.plan
    head = surveyed.head or made_branch(hub, surveyed.base, wish.private)
    if plan.changes_nothing:
        return head.commit
    sender = _Sender(hub, surveyed, head, wish.workers, tell, begin, advance)
    try:
        commit = sender.send(plan)
    except CopyRefusedError as error:
        tell(f"{error}; what should be copied is sent instead")
        plan = plan_publication(surveyed.files, surveyed.base, None)
        commit = sender.send(with_found(plan, hub.held(plan.candidates)))
    refuse_other_head(hub, surveyed.files, str(surveyed.folder))
    return commit


def made_branch(hub: Hub, base: Listing | None, private: bool) -> Listing:
    """The branch, once it is made, and with it the repository where there was none (`base` is None)."""
    hub.create(base, private)
    head = hub.head()
    if head is None:
        raise HubError(f"{hub.place}: was made and is not there; run the same command again")
    return head


def refuse_place(place: Place, wish: Wish, head: Listing | None, base: Listing | None) -> None:
    """Raises HubError where the branch must be made first, or is public and should be private."""
    if head is None and not wish.create:
        what = f"has no branch {place.branch}" if base else "is not there, or not for you to see"
        raise HubError(f"{place}: {what}; add --create to make it, or log in (`hf auth login`)")
    if base is not None and wish.private and not base.private:
        raise HubError(
            f"{place}: is public already, and --private would not change that; change it on the hub, or leave it out"
        )


def _parent(hub: Hub, manifest: Manifest | None, wish: Wish, tell: Tell) -> Listing | None:
    named = manifest.parent if manifest else {}
    repository, revision = named.get("repository"), named.get("revision")
    if wish.parent is not None:
        repository, revision = wish.parent.repository, wish.parent.branch
    return copyable_listing(hub, repository, revision, tell)


def copyable_listing(hub: Hub, repository: str | None, revision: str | None, tell: Tell) -> Listing | None:
    """A repository whose large files the hub may copy; None, and why, where it can't be seen."""
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


@dataclass(frozen=True, slots=True)
class _Sender:
    """Sends what a plan sends, and commits it upon `head`."""

    hub: Hub
    surveyed: Surveyed
    head: Listing
    workers: int
    tell: Tell
    begin: Advance
    advance: Advance

    def send(self, plan: Publication) -> str:
        self.begin(plan.bytes("send"))
        files = [step.file for step in plan.steps if step.way in ("send", "found")]
        sent = {step.file.name for step in plan.of("send")}
        additions = at_once(self.workers, files, lambda file: self._send_one(file, file.name in sent))
        return commit_once(self.hub, plan, additions, self.head, self.surveyed.message)

    def _send_one(self, file: LocalFile, is_sent: bool) -> Any:
        refuse_changed(self.surveyed.folder, file)
        count = Count(file.bytes if is_sent else 0, self.advance)
        operation = self.hub.addition(self.surveyed.folder, file, count.add)
        self.hub.upload(operation)
        count.end()
        self.tell(f"{file.name}: {file.bytes:,} bytes are on the hub")
        return operation


def at_once(workers: int, files: Sequence[LocalFile], do: Callable[[LocalFile], Any]) -> list[Any]:
    """What `do` gives for each file, in their order; the first failure lets no further file begin."""
    pool = ThreadPoolExecutor(workers)
    tasks = [pool.submit(do, file) for file in files]
    try:
        found = [task.result() for task in tasks]
    except Exception:
        pool.shutdown(cancel_futures=True)  # what is on its way arrives, and is not sent again
        raise
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # a Ctrl-C waits for no shard
        raise
    pool.shutdown()  # its threads have ended, so what follows may fork
    return found


def commit_once(hub: Hub, plan: Publication, additions: Sequence[Any], head: Listing, message: str) -> str:
    """Commits upon `head`; the commit's hash, also where the hub made the commit and its answer was lost."""
    try:
        return hub.commit(plan, additions, head.commit, message)
    except CopyRefusedError:
        raise
    except HubError:
        now = hub.head()
        files = [step.file for step in plan.steps]
        if now is None or now.commit == head.commit or not plan_publication(files, now, None).changes_nothing:
            raise
        return now.commit


def refuse_other_head(hub: Hub, files: Sequence[LocalFile], what: str) -> None:
    """Raises HubError where the branch, listed again, does not hold exactly `files`, which `what` names."""
    listing = hub.head()
    if listing is None:
        raise HubError(f"{hub.place}: was committed to and is not there; look at it on the hub")
    plan = plan_publication(files, listing, None)
    wrong = [step.file.name for step in plan.steps if step.way != "keep"] + [
        file.name for file in plan.deleted
    ]
    if wrong:
        raise HubError(
            f"{hub.place}: after the commit {wrong[0]} is not as in {what}; somebody else has "
            f"committed, or the hub ignores it (.gitignore); run the same command again"
        )
