"""A build whose output is a branch on a hub: shards go there as they are made, all else with the one commit.

Nothing is visible before that commit, and the hub keeps every shard that was sent whole. Interrupted at any moment,
the same command goes on: it asks the hub by sha256 what is there. A shard that equals the parent's is read for its
digests, written nowhere, and copied by the server where it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shardmill.pipeline.container.filesystem import losses
from shardmill.pipeline.errors import BuildError
from shardmill.pipeline.manifest.records import Receipt
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.plan.types import Plan
from shardmill.pipeline.publish.answers import HubError
from shardmill.pipeline.publish.facts import Listing, LocalFile, Place
from shardmill.pipeline.publish.hub import CopyRefusedError, Hub
from shardmill.pipeline.publish.plan import Publication
from shardmill.pipeline.publish.publish import (
    Wish,
    at_once,
    commit_once,
    copyable_listing,
    made_branch,
    refuse_other_head,
    refuse_place,
)
from shardmill.pipeline.run.build import kernel_name
from shardmill.pipeline.run.locking import locked
from shardmill.pipeline.run.receipts import odd_sentences, refuse_losses, refuse_odd
from shardmill.pipeline.run.shard import input_bytes
from shardmill.pipeline.stages.job import Prepared, Settings, Watch
from shardmill.pipeline.stream.beside import send_beside, stage_beside
from shardmill.pipeline.stream.known import Ground, names_to_send, reasons
from shardmill.pipeline.stream.notes import Notes, working_folder
from shardmill.pipeline.stream.shards import Workshop, as_file, make_and_send, read_passed_on


@dataclass(frozen=True, slots=True)
class Work:
    """What was done with shards, as the commands' answers tell it."""

    made: Mapping[str, str]  # shard -> why it was made, read or taken up again
    resumed: tuple[str, ...]  # of these, what an earlier, interrupted build had sent, read or made
    bytes_read: int
    kernel: str
    workers: int


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a build into a hub did."""

    plan: Plan
    publication: Publication
    commit: str
    work: Work
    odd: tuple[str, ...]  # a sentence for each tensor that holds NaN, Inf or nothing but zeros


def stream(
    prepared: Prepared,
    place: Place,
    wish: Wish,
    settings: Settings,
    watch: Watch,
    begin: Callable[[int], None] = lambda total: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Streamed:
    """Builds into `place`. `begin` hears how many bytes will be read and sent.

    Raises ShardmillError in a sentence; the branch is then as it was, and the same command goes on.
    """
    if not settings.file_digests or settings.scheduler:
        option = "--scheduler" if settings.scheduler else "--no-sha256"
        raise BuildError(f"{place}: a build into a hub does without {option}; leave it out")
    store = Store(working_folder(place))
    store.open()
    try:
        with locked(store.lock, store.out):
            hub = Hub(place)
            head = _head(hub, wish)
            source = copyable_listing(hub, prepared.plan.repository, prepared.plan.revision, tell)
            shop = Workshop(prepared, settings, hub, store, Notes(store, prepared.parent), watch, tell)
            try:
                return _build(Ground(shop, head, source), wish, begin)
            except CopyRefusedError as error:
                tell(f"{error}; what should be copied is sent instead")
                return _build(Ground(shop, head, None), wish, begin)
    finally:
        for loss in losses():
            tell(loss)


def _head(hub: Hub, wish: Wish) -> Listing:
    head = hub.head()
    base = head or hub.listing(hub.place.repository, None)
    refuse_place(hub.place, wish, head, base)
    return head or made_branch(hub, base, wish.private)


def _build(ground: Ground, wish: Wish, begin: Callable[[int], None]) -> Streamed:
    """One build upon the branch's head: what is not known is read, what the hub lacks is made and sent."""
    shop = ground.shop
    shards = {shard.file: shard for shard in shop.prepared.plan.shards}
    known = ground.known()
    noted = {file: each for file, each in known.items() if not ground.is_shown(each)}
    to_read = {file: each for file, each in shards.items() if file not in known and ground.is_read(each)}
    to_make = {file: each for file, each in shards.items() if file not in known and file not in to_read}
    begin(ground.bytes_to_go(list(to_read.values()), list(to_make.values())))
    known |= read_passed_on(shop, list(to_read.values()), ground.stated(list(to_read.values())))
    absent = names_to_send(ground.publication([as_file(each.receipt) for each in known.values()]))
    todo = {file: shard for file, shard in shards.items() if file in absent or file in to_make}
    sent = make_and_send(shop, list(todo.values()), known)
    resumed = {file: each for file, each in noted.items() if file not in todo}
    work = Work(
        made=reasons(todo, to_read, resumed),
        resumed=tuple(file for file in shards if file in resumed or file in sent.resumed),
        bytes_read=_bytes_read(shop, {*todo, *to_read} - set(sent.resumed)),
        kernel=kernel_name(shop.settings, [shards[file] for file in todo]),
        workers=max(sent.workers, min(shop.settings.workers, len(to_read))),
    )
    receipts = {**{file: each.receipt for file, each in known.items()}, **sent.receipts}
    return _shown(ground, wish, [receipts[file] for file in shards], set(todo), work)


def _bytes_read(shop: Workshop, files: Collection[str]) -> int:
    prepared = shop.prepared
    return sum(input_bytes(prepared.parent, shard) for shard in prepared.plan.shards if shard.file in files)


def _shown(ground: Ground, wish: Wish, receipts: Sequence[Receipt], sent: set[str], work: Work) -> Streamed:
    """Shows the checkpoint of these shards in one commit; `sent` names those that this build has sent."""
    shop, prepared = ground.shop, ground.shop.prepared
    if shop.settings.strict:
        refuse_odd(receipts)
    if shop.settings.lossless:
        refuse_losses(prepared.plan, receipts)
    files = [as_file(receipt) for receipt in receipts]
    small = stage_beside(shop, receipts)
    plan = ground.publication((*files, *small))
    if lost := names_to_send(plan) & {file.name for file in files} - sent:
        raise HubError(f"{shop.hub.place}: the hub no longer holds {min(lost)}; run the same command again")
    commit = ground.head.commit
    if not plan.changes_nothing:
        commit = _commit(ground, plan, files, small, wish)
    shop.notes.forget_others(file.name for file in files)
    shop.store.sweep(keep=())
    return Streamed(prepared.plan, _with_sent(plan, sent), commit, work, odd_sentences(receipts))


def _commit(
    ground: Ground, plan: Publication, files: Sequence[LocalFile], small: Sequence[LocalFile], wish: Wish
) -> str:
    """All of it in one commit; its hash. The shards are on the hub; what is beside them goes with it."""
    shop = ground.shop
    wanted = {step.file.name for step in plan.steps if step.way in ("send", "found")}
    additions = [shop.hub.held_addition(file) for file in files if file.name in wanted]
    beside = [file for file in small if file.name in wanted]
    additions += at_once(2, beside, lambda file: send_beside(shop, file))
    message = wish.message or f"Publish {shop.prepared.plan.recipe}"
    commit = commit_once(shop.hub, plan, additions, ground.head, message)
    refuse_other_head(shop.hub, (*files, *small), "the build")
    return commit


def _with_sent(plan: Publication, names: Collection[str]) -> Publication:
    """The plan as it was carried out: what it found on the hub, and this build had sent, was sent."""
    steps = (
        replace(step, way="send") if step.way == "found" and step.file.name in names else step
        for step in plan.steps
    )
    return replace(plan, steps=tuple(steps))
