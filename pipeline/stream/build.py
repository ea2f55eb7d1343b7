"""A build whose output is a branch on a hub: shards go there as they are made, all else with the one commit.

Nothing is visible before that commit, and the hub keeps every shard that was sent whole. Interrupted at any moment,
the same command goes on: it asks the hub by sha256 what is there. A shard that equals the parent's is read for its
digests, written nowhere, and copied by the server where it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardmill.pipeline.container.filesystem import losses
from shardmill.pipeline.container.hub import origin_of
from shardmill.pipeline.errors import BuildError, CheckpointError
from shardmill.pipeline.manifest.records import MANIFEST_FILE, FileRecord, Manifest
from shardmill.pipeline.manifest.state import Staged
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.plan.types import Plan, ShardPlan
from shardmill.pipeline.publish.facts import Listing, LocalFile, Place
from shardmill.pipeline.publish.hub import CopyRefusedError, Hub, HubError
from shardmill.pipeline.publish.local import local_file
from shardmill.pipeline.publish.plan import Publication, plan_publication, with_found
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
from shardmill.pipeline.run.digests import steadily
from shardmill.pipeline.run.locking import locked
from shardmill.pipeline.run.lossless import uncounted
from shardmill.pipeline.run.publish import (
    copied,
    manifest_of,
    odd_sentences,
    receipt_before,
    refuse_losses,
    refuse_odd,
    small_files,
)
from shardmill.pipeline.run.shard import input_bytes
from shardmill.pipeline.stages.job import Prepared, Products, Settings, Watch
from shardmill.pipeline.stream.notes import Notes, working_folder
from shardmill.pipeline.stream.shards import Workshop, as_file, batches, make_and_send, read_passed_on


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a build into a hub did."""

    plan: Plan
    publication: Publication
    commit: str
    made: Mapping[str, str]  # shard -> why it was made or read
    bytes_read: int
    kernel: str
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
                return _Build(shop, head, source, wish).run(begin)
            except CopyRefusedError as error:
                tell(f"{error}; what should be copied is sent instead")
                return _Build(shop, head, None, wish).run(begin)
    finally:
        for loss in losses():
            tell(loss)


def _head(hub: Hub, wish: Wish) -> Listing:
    head = hub.head()
    base = head or hub.listing(hub.place.repository, None)
    refuse_place(hub.place, wish, head, base)
    return head or made_branch(hub, base, wish.private)


def _with_sent(plan: Publication, names: Collection[str]) -> Publication:
    """The plan as it was carried out: what it found on the hub, and this build had sent, was sent."""
    steps = (
        replace(step, way="send") if step.way == "found" and step.file.name in names else step
        for step in plan.steps
    )
    return replace(plan, steps=tuple(steps))


@dataclass(frozen=True, slots=True)
class _Build:
    """One build upon the branch's `head`, copying from `source`, the parent's repository, where there is one."""

    shop: Workshop
    head: Listing
    source: Listing | None
    wish: Wish

    def run(self, begin: Callable[[int], None]) -> Streamed:
        shards = self.shop.prepared.plan.shards
        known = self._known(shards)
        unknown = [shard for shard in shards if shard.file not in known]
        to_read = [shard for shard in unknown if self._is_read(shard)]
        to_make = [shard for shard in unknown if shard not in to_read]
        begin(self._bytes(to_read, to_make))
        known |= read_passed_on(self.shop, to_read, self._stated(to_read))
        absent = self._absent(list(known.values()))
        todo = [shard for shard in shards if shard.file in absent or shard in to_make]
        operations: dict[str, Any] = {}
        for batch in batches(self.shop, todo):
            for file, (staged, operation) in make_and_send(self.shop, batch, known).items():
                known[file], operations[file] = staged, operation
        made = {shard.file: "the hub does not hold it" for shard in todo}
        made |= {shard.file: "it was not read yet" for shard in to_read if shard not in todo}
        return self._finished([known[shard.file] for shard in shards], operations, made)

    def _known(self, shards: Sequence[ShardPlan]) -> dict[str, Staged]:
        """What is known of shards: noted here, or in the manifest on the branch."""
        if self.shop.settings.paranoid:
            return {}
        known = {shard.file: staged for shard in shards if (staged := self.shop.notes.of(shard))}
        rest = [shard for shard in shards if shard.file not in known]
        known |= self._of_branch(rest) if rest else {}
        if not self.shop.settings.lossless:
            return known
        counts = {name: each for staged in known.values() for name, each in staged.receipt.counts.items()}
        lacking = set(uncounted(self.shop.prepared.plan, counts))
        return {file: staged for file, staged in known.items() if file not in lacking}

    def _of_branch(self, shards: Sequence[ShardPlan]) -> dict[str, Staged]:
        """What the branch's own manifest tells, where it was built from the same commit of a hub."""
        plan, parent = self.shop.prepared.plan, self.shop.prepared.parent
        if (
            origin_of(parent.folder) is None
            or parent.replaced
            or parent.others
            or MANIFEST_FILE not in self.head.files
        ):
            return {}
        try:
            manifest = Manifest.from_json(self.shop.hub.small_file(self.head, MANIFEST_FILE))
        except CheckpointError:
            return {}  # of another version, or damaged: it tells nothing, and is replaced
        if manifest.parent != {"repository": plan.repository, "revision": plan.revision}:
            return {}
        found = {}
        for shard in shards:
            record, file = manifest.shards.get(shard.file), manifest.files.get(shard.file)
            held = self.head.files.get(shard.file)
            if record and file and held and record.key == shard.key and held.sha256 == file.sha256:
                receipt = receipt_before(manifest, shard)
                found[shard.file] = Staged(receipt, (held.bytes, 0, 0, 0), {})
                self.shop.notes.keep(found[shard.file])
        return found

    def _is_read(self, shard: ShardPlan) -> bool:
        """Whether a shard need not be made here: it is passed on, and this disk or the hub has it."""
        return not shard.rewritten and (self.shop.is_here(shard) or bool(self._stated([shard])))

    def _stated(self, shards: Sequence[ShardPlan]) -> dict[str, str]:
        """Shard -> its sha256, of parents' files that a hub gives and can copy."""
        held = self.source.files if self.source else {}
        return {
            shard.file: each.sha256
            for shard in shards
            if not self.shop.is_here(shard)
            and (each := held.get(shard.inputs[0]))
            and each.sha256
            and each.copyable
        }

    def _bytes(self, to_read: Sequence[ShardPlan], to_make: Sequence[ShardPlan]) -> int:
        held = self.source.files if self.source else {}
        sent = [shard for shard in to_read if shard.file not in held] + list(to_make)
        read = sum(input_bytes(self.shop.prepared.parent, shard) for shard in (*to_read, *to_make))
        return read + sum(shard.header.file_bytes for shard in sent)

    def _absent(self, known: Sequence[Staged]) -> set[str]:
        """Of shards that are known, those that the hub neither holds nor can copy."""
        plan = self._publication([as_file(each.receipt) for each in known])
        return {step.file.name for step in plan.of("send")}

    def _publication(self, files: Sequence[LocalFile]) -> Publication:
        plan = plan_publication(files, self.head, self.source)
        return with_found(plan, self.shop.hub.held(plan.candidates))

    def _finished(
        self, known: Sequence[Staged], operations: dict[str, Any], made: Mapping[str, str]
    ) -> Streamed:
        shop, prepared = self.shop, self.shop.prepared
        receipts = [each.receipt for each in known]
        if shop.settings.strict:
            refuse_odd(receipts)
        if shop.settings.lossless:
            refuse_losses(prepared.plan, receipts)
        files = [as_file(receipt) for receipt in receipts]
        small = self._small(receipts)
        plan = self._publication((*files, *small))
        wanted = {step.file.name for step in plan.steps if step.way in ("send", "found")}
        lost = {step.file.name for step in plan.of("send")} & {file.name for file in files} - set(operations)
        if lost:
            raise HubError(
                f"{shop.hub.place}: the hub no longer holds {min(lost)}; run the same command again"
            )
        commit = self.head.commit
        if not plan.changes_nothing:
            held = [file for file in files if file.name in wanted and file.name not in operations]
            additions = [operation for name, operation in operations.items() if name in wanted]
            additions += [shop.hub.held_addition(file) for file in held]
            additions += at_once(2, [file for file in small if file.name in wanted], self._send_small)
            commit = commit_once(shop.hub, plan, additions, self.head, self._message)
            refuse_other_head(shop.hub, (*files, *small), "the build")
        shop.notes.forget_others(receipt.file for receipt in receipts)
        shop.store.sweep(keep=())
        todo = [shard for shard in prepared.plan.shards if shard.file in made]
        read = sum(input_bytes(prepared.parent, shard) for shard in todo)
        kernel = kernel_name(shop.settings, todo)
        shown = _with_sent(plan, operations)
        return Streamed(prepared.plan, shown, commit, made, read, kernel, odd_sentences(receipts))

    @property
    def _message(self) -> str:
        return self.wish.message or f"Publish {self.shop.prepared.plan.recipe}"

    def _send_small(self, file: LocalFile) -> Any:
        operation = self.shop.hub.addition(self.shop.store.staging, file)
        self.shop.hub.upload(operation)
        return operation

    def _small(self, receipts: Sequence[Any]) -> list[LocalFile]:
        """Everything beside the shards, written into the staging folder: the manifest describes the rest."""
        shop, prepared = self.shop, self.shop.prepared
        names = prepared.dag.after_shards()
        made = Products(**prepared.products, receipts=receipts)
        products = prepared.dag.run("checkpoint", names, prepared.checkpoint, made)
        small = small_files(prepared.plan, products["index"])
        for name, data in small.items():
            shop.store.stage(name, data)
        files = [local_file(shop.store.staging, name, None) for name in small]
        files += [self._carried(name) for name in prepared.plan.carried]
        records = {
            **{receipt.file: FileRecord(receipt.file_bytes, receipt.sha256) for receipt in receipts},
            **{file.name: FileRecord(file.bytes, file.sha256) for file in files},
        }
        manifest = manifest_of(prepared, shop.settings, records, receipts)
        shop.store.stage(MANIFEST_FILE, manifest.to_json())
        return [*files, local_file(shop.store.staging, MANIFEST_FILE, None)]

    def _carried(self, name: str) -> LocalFile:
        parent, staged = self.shop.prepared.parent, self.shop.store.staging / name
        staged.parent.mkdir(parents=True, exist_ok=True)
        digest, _ = steadily(parent.folder / name, parent.stats[name], lambda opened: copied(opened, staged))
        return local_file(self.shop.store.staging, name, digest)
