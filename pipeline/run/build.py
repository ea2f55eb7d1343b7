"""The build: which shards are stale, making them, and publishing the whole.

Effects are here, at the rim. Shards are made in whatever order a scheduler likes; their receipts are combined in the
order of the plan, so no schedule can change a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from shardmill.pipeline.container.filesystem import losses
from shardmill.pipeline.errors import BuildError, PlanError
from shardmill.pipeline.manifest.state import Memory, Staged
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.plan.types import Plan, ShardPlan
from shardmill.pipeline.run import kernel as kernels
from shardmill.pipeline.run.beside import stale_beside_shards
from shardmill.pipeline.run.consume import Consumer, refuse_interrupted, refuse_lost
from shardmill.pipeline.run.locking import locked
from shardmill.pipeline.run.lossless import never_exact, uncounted
from shardmill.pipeline.run.place import refuse_full_disk, refuse_out
from shardmill.pipeline.run.publish import publish, signatures_in
from shardmill.pipeline.run.resume import holds_receipt, is_as_staged
from shardmill.pipeline.run.schedule import make_shards
from shardmill.pipeline.run.shard import input_bytes
from shardmill.pipeline.run.stale import Verdict, judge
from shardmill.pipeline.run.unchanged import Inputs, noted
from shardmill.pipeline.stages.job import Prepared, Settings, Watch
from shardmill.pipeline.types import Parent


@dataclass(frozen=True, slots=True)
class Summary:
    """What a build did."""

    plan: Plan
    made: tuple[Verdict, ...]  # the stale shards, with the reason for each
    files_written: tuple[str, ...]  # every published file that was written anew, shards included
    bytes_read: int
    kernel: str  # that encoded weights; none where none were
    workers: int = 0  # of this machine that made shards
    odd: tuple[str, ...] = ()  # a sentence for each tensor that holds NaN, Inf or nothing but zeros

    @property
    def resumed(self) -> tuple[str, ...]:
        """Of the shards that were made, those that an earlier, interrupted run had finished."""
        return tuple(verdict.file for verdict in self.made if verdict.staged)


def build(
    prepared: Prepared,
    out: Path,
    settings: Settings,
    watch: Watch,
    begin: Callable[[int], None] = lambda total: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Makes what is stale in `out` and publishes it whole. `begin` hears how many bytes of input will be read.

    Raises BuildError or CheckpointError, the earlier checkpoint in `out` untouched; built again, it goes on
    where it stopped.
    """
    out = out.absolute()  # as workers of a cluster must be given it
    _refuse_out(prepared, out)
    store = Store(out)
    store.open()
    try:
        with locked(store.lock, out):
            return _build(prepared, store, settings, watch, begin, tell)
    except OSError as error:
        raise error if error.filename else OSError(error.errno, error.strerror, str(out)) from None
    finally:
        for loss in losses():
            tell(loss)


def _refuse_out(prepared: Prepared, out: Path) -> None:
    for folder in (prepared.parent.folder, *prepared.checkpoint.sources.values()):
        refuse_out(folder, out)


def _build(
    prepared: Prepared,
    store: Store,
    settings: Settings,
    watch: Watch,
    begin: Callable[[int], None],
    tell: Callable[[str], None],
) -> Summary:
    plan, parent = prepared.plan, prepared.parent
    if store.finish_commit(tell):
        tell("finished the commit of an earlier build")
    memory = store.load()
    if settings.lossless and (refused := never_exact(plan)):
        raise PlanError(refused)
    verdicts = _verdicts(prepared, store.out, memory, settings, tell)
    stale = [verdict for verdict in verdicts if verdict.reason]
    resumed = {verdict.file for verdict in stale if verdict.staged}
    made_anew = {verdict.file for verdict in stale} - resumed
    todo = [shard for shard in plan.shards if shard.file in made_anew]

    refuse_lost(stale, plan.shards, parent)
    if not settings.consume:
        refuse_interrupted(store)
        refuse_full_disk(todo, parent, store.out, settings.passthrough)
    store.sweep(keep=resumed)
    bytes_read = sum(input_bytes(parent, shard) for shard in todo)
    begin(bytes_read)
    settings = kernels.chosen(settings, bytes_read)
    kernels.tell_of_compiling(settings, todo, tell)
    if settings.consume:
        workers, prepared = Consumer(prepared, store, memory, settings, watch, tell).make(todo)
    else:
        workers = make_shards(todo, prepared, store.out, settings, watch).workers
    made = _made(stale, store)
    _tell_what_goes(plan, memory, tell)
    _tell_of_numba(settings, todo, tell)
    judged = {verdict.file: verdict.stat for verdict in verdicts if verdict.stat}
    signed = signatures_in(store.out)
    published = publish(prepared, store, memory, settings, made, judged)
    if gone := sorted(set(signed) - set(signatures_in(store.out))):
        tell(
            f"removed {' and '.join(gone)}, of the checkpoint before; sign again: shardmill verify sign {store.out}"
        )
    inputs = Inputs(prepared.inputs, prepared.began)
    store.save(noted(inputs, published.files, store.out, published.stats, settings))
    kernel = kernel_name(settings, todo)
    return Summary(plan, tuple(stale), published.written, bytes_read, kernel, workers, published.odd)


def _made(stale: Sequence[Verdict], store: Store) -> dict[str, Staged]:
    """File -> Staged, of every shard that was stale. Raises BuildError where one is not there."""
    made = store.staged(verdict.file for verdict in stale)
    if gone := [verdict.file for verdict in stale if verdict.file not in made]:
        raise BuildError(
            f"{store.staging / gone[0]}: is not there though it was made, so nothing is published; something else "
            f"removes files there, or a worker has another folder under the name {store.out}; correct that, then "
            f"build again"
        )
    return made


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a build would do now."""

    shards: tuple[Verdict, ...]  # every shard of the plan
    others: tuple[str, ...]  # files beside them that would be written; the manifest comes with any change


def explain(prepared: Prepared, out: Path, settings: Settings, tell: Callable[[str], None]) -> Explanation:
    """What a build would make now, and why. Writes nothing."""
    _refuse_out(prepared, out)
    memory = Store(out).load()
    verdicts = _verdicts(prepared, out, memory, settings, tell)
    return Explanation(verdicts, stale_beside_shards(prepared, out, memory, settings))


def _verdicts(
    prepared: Prepared, out: Path, memory: Memory, settings: Settings, tell: Callable[[str], None]
) -> tuple[Verdict, ...]:
    """One a shard. `staged`: an interrupted build has made the stale shard already, from the same parent files."""
    plan, parent = prepared.plan, prepared.parent
    trusted = memory.trusted(settings.paranoid)
    trusted = replace(
        trusted, parent={**trusted.parent, **{file: parent.stats[file] for file in parent.consumed}}
    )
    verdicts = judge(plan, parent, out, memory.manifest, trusted, tell)
    verdicts = _counted(plan, memory, settings, verdicts)
    staging = Store(out).staging
    return tuple(
        replace(
            verdict,
            staged=bool(verdict.reason) and is_resumable(shard, parent, memory, staging, settings, tell),
        )
        for verdict, shard in zip(verdicts, plan.shards, strict=True)
    )


def _counted(
    plan: Plan, memory: Memory, settings: Settings, verdicts: tuple[Verdict, ...]
) -> tuple[Verdict, ...]:
    """Under `--lossless` what an earlier build did not count is made again."""
    if not settings.lossless:
        return verdicts
    records = memory.manifest.conversions if memory.manifest else {}
    files = set(uncounted(plan, {name: record.counts for name, record in records.items()}))
    why = "its blocks were not counted when it was made"
    return tuple(
        replace(each, reason=why, stat=None) if each.reason is None and each.file in files else each
        for each in verdicts
    )


def is_resumable(
    shard: ShardPlan,
    parent: Parent,
    memory: Memory,
    staging: Path,
    settings: Settings,
    tell: Callable[[str], None],
) -> bool:
    """Whether an interrupted run has completed this very shard from the parent's files as they are."""
    staged = memory.staged.get(shard.file)
    if staged is None or (staged.receipt.key, staged.receipt.file_bytes) != (
        shard.key,
        shard.header.file_bytes,
    ):
        return False
    there = [file for file in shard.inputs if file not in parent.consumed]
    if any(staged.inputs.get(file) != parent.stats[file] for file in there):
        return False
    if is_as_staged(staging, staged, settings.paranoid):
        return True
    tell(f"reading {staging / shard.file}: its size or times are not those under which it was made")
    if holds_receipt(staging / shard.file, shard.header, staged.receipt):
        return True
    tell(f"{staging / shard.file}: was damaged since it was made; it is made again")
    return False


def _tell_what_goes(plan: Plan, memory: Memory, tell: Callable[[str], None]) -> None:
    before = set(memory.manifest.shards) if memory.manifest else set()
    if gone := sorted(before - {shard.file for shard in plan.shards}):
        tell(f"replaces another checkpoint: {gone[0]} goes ({len(gone)} of its {len(before)} shards)")


def _tell_of_numba(settings: Settings, todo: Sequence[ShardPlan], tell: Callable[[str], None]) -> None:
    """Says why the slower kernel was used where numba is installed."""
    if settings.kernel == "auto" and kernel_name(settings, todo) == "numpy" and find_spec("numba"):
        from shardmill.kernels.block_fp8 import why_no_numba

        tell(
            f"numba does not run here ({why_no_numba()}): numpy gave the same bytes, only slower; "
            f"a damaged cache of numba's may be deleted"
        )


def kernel_name(settings: Settings, made: Sequence[ShardPlan]) -> str:
    """The kernel that encoded the weights of the shards that were made; "none" where there were none."""
    if not any(piece.part == "codes" for shard in made for piece in shard.pieces):
        return "none"
    from shardmill.kernels.block_fp8 import known_kernels

    return known_kernels()[-1] if settings.kernel == "auto" else settings.kernel
