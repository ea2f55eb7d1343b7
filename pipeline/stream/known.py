"""What is known of shards before any is read or made: from notes here, the branch's manifest, and the hub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardmill.pipeline.container.hub import origin_of
from shardmill.pipeline.errors import CheckpointError
from shardmill.pipeline.manifest.records import MANIFEST_FILE, Manifest
from shardmill.pipeline.manifest.state import Staged
from shardmill.pipeline.plan.types import ShardPlan
from shardmill.pipeline.publish.facts import Listing, LocalFile
from shardmill.pipeline.publish.plan import Publication, plan_publication, with_found
from shardmill.pipeline.run.lossless import uncounted
from shardmill.pipeline.run.receipts import receipt_before
from shardmill.pipeline.run.shard import input_bytes
from shardmill.pipeline.stream.shards import Workshop


@dataclass(frozen=True, slots=True)
class Ground:
    """What a build begins from: the branch's `head`, and `source`, the parent's repository, where the hub may copy."""

    shop: Workshop
    head: Listing
    source: Listing | None

    def known(self) -> dict[str, Staged]:
        """File -> what it holds, of the shards that are noted here or in the manifest on the branch."""
        plan = self.shop.prepared.plan
        if self.shop.settings.paranoid:
            return {}
        known = {shard.file: staged for shard in plan.shards if (staged := self.shop.notes.of(shard))}
        rest = [shard for shard in plan.shards if shard.file not in known]
        known |= self._of_branch(rest) if rest else {}
        if not self.shop.settings.lossless:
            return known
        counts = {name: each for staged in known.values() for name, each in staged.receipt.counts.items()}
        lacking = set(uncounted(plan, counts))
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

    def is_read(self, shard: ShardPlan) -> bool:
        """Whether a shard need not be made here: it is passed on, and this disk or the hub has it."""
        return not shard.rewritten and (self.shop.is_here(shard) or bool(self.stated([shard])))

    def stated(self, shards: Sequence[ShardPlan]) -> dict[str, str]:
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

    def is_shown(self, staged: Staged) -> bool:
        """Whether the branch shows this very shard."""
        held = self.head.files.get(staged.receipt.file)
        return held is not None and held.sha256 == staged.receipt.sha256

    def bytes_to_go(self, to_read: Sequence[ShardPlan], to_make: Sequence[ShardPlan]) -> int:
        """Bytes that will be read and sent."""
        held = self.source.files if self.source else {}
        sent = [shard for shard in to_read if shard.file not in held] + list(to_make)
        read = sum(input_bytes(self.shop.prepared.parent, shard) for shard in (*to_read, *to_make))
        return read + sum(shard.header.file_bytes for shard in sent)

    def publication(self, files: Sequence[LocalFile]) -> Publication:
        """What becomes of each file, once the hub was asked what it holds."""
        plan = plan_publication(files, self.head, self.source)
        return with_found(plan, self.shop.hub.held(plan.candidates))


def names_to_send(plan: Publication) -> set[str]:
    """The files that the hub neither holds nor can copy."""
    return {step.file.name for step in plan.of("send")}


def reasons(made: Iterable[str], read: Iterable[str], resumed: Iterable[str]) -> dict[str, str]:
    """Shard -> why it was made, read or taken up again."""
    return {
        **dict.fromkeys(resumed, "the branch does not show it"),
        **dict.fromkeys(read, "it was not read yet"),
        **dict.fromkeys(made, "the hub does not hold it"),
    }
