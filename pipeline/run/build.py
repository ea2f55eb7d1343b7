"""The build: which shards are stale, making them, and publishing the whole.

Effects live here, at the rim. Shards are made in whatever order a scheduler likes; their receipts are folded in the
order of the plan, so no schedule can change a byte.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from shardmill.pipeline.container.hub import other_commit
from shardmill.pipeline.errors import BuildError, PlanError, RecipeError
from shardmill.pipeline.manifest.lock import Lock, hold
from shardmill.pipeline.manifest.records import MANIFEST_FILE, Receipt
from shardmill.pipeline.manifest.store import StatCache, Store
from shardmill.pipeline.plan.plan import make_plan
from shardmill.pipeline.plan.types import Plan, ShardPlan
from shardmill.pipeline.recipe.tables import Recipe
from shardmill.pipeline.run.publish import publish, stale_beside_shards
from shardmill.pipeline.run.schedule import in_threads, on_cluster
from shardmill.pipeline.run.shard import Input, ShardTask
from shardmill.pipeline.run.stale import Verdict, judge
from shardmill.pipeline.run.unchanged import fingerprint, plan_inputs
from shardmill.pipeline.stages import STAGES
from shardmill.pipeline.stages.dag import arrange, unknown_options
from shardmill.pipeline.stages.job import Checkpoint, Prepared, Settings, Watch
from shardmill.pipeline.types import Parent

_PRODUCTS = ("headers", "assignments", "receipts", "index")  # what this room takes from the stages


@dataclass(frozen=True, slots=True)
class Summary:
    """What a build did."""

    plan: Plan
    made: tuple[Verdict, ...]  # the stale shards, with the reason for each
    files_written: tuple[str, ...]  # every published file that was written anew, shards included
    bytes_read: int
    kernel: str  # that encoded weights; none where none were

    @property
    def resumed(self) -> tuple[str, ...]:
        """Of the shards that were made, those that an earlier, cut run had finished."""
        return tuple(verdict.file for verdict in self.made if verdict.staged)


def prepare(recipe: Recipe, folder: Path, lock: Lock | None = None, paranoid: bool = False) -> Prepared:
    """Runs the stages that come before any shard, and plans. Reads headers and small JSON files only.

    With a `lock` the parent is held to it; `paranoid` hashes its shards for that.
    """
    if unknown := unknown_options({name: table.options for name, table in recipe.stages.items()}, STAGES):
        hint = "is not known; remove it or correct its spelling"
        raise RecipeError(
            [recipe.problem_at(("stages", *key), f"the key {key[1]!r} {hint}") for key in unknown]
        )
    inputs = plan_inputs(recipe, folder, lock)
    needs = {name: table.needs for name, table in recipe.stages.items()}
    dag = arrange(needs, STAGES, wanted_products=_PRODUCTS)
    if other := other_commit(folder, recipe.parent.repository, recipe.parent.revision):
        raise PlanError([other])
    checkpoint = Checkpoint(recipe, folder)
    products = dag.run("checkpoint", dag.before_shards(), checkpoint, {})
    parent, assignments = products["headers"], products["assignments"]
    if lock:
        hold(lock, parent, recipe.parent.repository, recipe.parent.revision, paranoid)
    plan = make_plan(recipe, parent, assignments)
    return Prepared(
        dag, products, Checkpoint(recipe, folder, plan), plan, parent, inputs, lock, bool(lock and paranoid)
    )


def explain(
    prepared: Prepared, out: Path, settings: Settings, tell: Callable[[str], None]
) -> tuple[Verdict, ...]:
    """What a build would make now, and why; writes nothing."""
    refuse_out(prepared.parent.folder, out)
    store = Store(out)
    plan, parent = prepared.plan, prepared.parent
    verdicts = judge(plan, parent, out, store.manifest(), _trusted(store, settings), tell)
    stale = {verdict.file for verdict in verdicts if verdict.reason}
    staged = _resumable([shard for shard in plan.shards if shard.file in stale], parent, store)
    return tuple(replace(verdict, staged=verdict.file in staged) for verdict in verdicts)


def explain_beside_shards(prepared: Prepared, out: Path, settings: Settings) -> list[str]:
    """The other files that a build would write anew now; the manifest comes with any change."""
    return stale_beside_shards(prepared, Store(out), settings)


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
    refuse_out(prepared.parent.folder, out)
    store = Store(out)
    store.open()
    try:
        with FileLock(store.lock, timeout=0):
            return _build(prepared, store, settings, watch, begin, tell)
    except Timeout:
        raise BuildError(
            f"{out}: another build is at work in it; wait until it ends, or choose another --out"
        ) from None


def _build(
    prepared: Prepared,
    store: Store,
    settings: Settings,
    watch: Watch,
    begin: Callable[[int], None],
    tell: Callable[[str], None],
) -> Summary:
    if store.finish_commit():
        tell("finished the commit of an earlier build")
    plan, parent = prepared.plan, prepared.parent
    manifest = store.manifest()
    verdicts = judge(plan, parent, store.out, manifest, _trusted(store, settings), tell)
    stale = {verdict.file: verdict for verdict in verdicts if verdict.reason}
    chosen = [shard for shard in plan.shards if shard.file in stale]
    finished = _resumable(chosen, parent, store)
    store.sweep(finished)
    store.start(parent.stats)
    todo = [shard for shard in chosen if shard.file not in finished]
    _refuse_full_disk(todo, parent, store.out, settings)
    begin(sum(input_bytes(parent, shard) for shard in todo))
    made = _make(todo, prepared, store, settings, watch)
    receipts = {**finished, **{receipt.file: receipt for receipt in made}}
    if manifest and (gone := sorted(set(manifest.shards) - {shard.file for shard in plan.shards})):
        tell(
            f"replaces another checkpoint: {gone[0]} goes ({len(gone)} of its {len(manifest.shards)} shards)"
        )
    written = publish(prepared, store, settings, manifest, receipts)
    store.remember(replace(store.stat_cache(), fingerprint=fingerprint(prepared.inputs, store, settings)))
    return Summary(
        plan=plan,
        made=tuple(replace(verdict, staged=verdict.file in finished) for verdict in stale.values()),
        files_written=tuple(written),
        bytes_read=sum(input_bytes(parent, shard) for shard in todo),
        kernel=_kernel_name(settings, todo),
    )


def input_bytes(parent: Parent, shard: ShardPlan) -> int:
    """Bytes of the parent's files that making `shard` reads."""
    return sum(parent.stats[file][0] for file in shard.inputs)


def _trusted(store: Store, settings: Settings) -> StatCache:
    return StatCache() if settings.paranoid else store.stat_cache()


def refuse_out(parent: Path, out: Path) -> None:
    """Raises BuildError where `out` is no place for a build from `parent`."""
    one, other = parent.resolve(), out.resolve()
    if one == other:
        raise BuildError(
            f"{out}: is the parent itself; choose another --out, a build never writes to its parent"
        )
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise BuildError(
            f"--out {out} and --parent {parent} overlap: one contains the other; choose another --out"
        )
    for above in other.parents:
        if (above / MANIFEST_FILE).exists():
            raise BuildError(
                f"{out}: lies in the checkpoint {above}, which it would spoil; choose another --out"
            )
    if foreign := Store(out).foreign_files():
        raise BuildError(
            f"{out}: holds {foreign[0]} (of {len(foreign)} entries) and no manifest of shardmill's; "
            f"choose an empty --out"
        )


def _refuse_full_disk(todo: Sequence[ShardPlan], parent: Parent, out: Path, settings: Settings) -> None:
    """What is passed on as a hard link takes no room, where `out` lies on the parent's file system."""
    device = out.stat().st_dev
    needed = sum(
        shard.header.file_bytes
        for shard in todo
        if shard.rewritten
        or settings.passthrough != "hardlink"
        or parent.path(shard.file).stat().st_dev != device
    )
    free = shutil.disk_usage(out).free
    if needed > free:
        raise BuildError(
            f"{out}: needs {needed} bytes and the disk has {free} free; make room or choose another --out"
        )


def _resumable(chosen: Sequence[ShardPlan], parent: Parent, store: Store) -> dict[str, Receipt]:
    """Receipts of the stale shards that a cut run completed from the same parent files."""
    started = store.started()
    found = {}
    for shard in chosen:
        receipt = store.staged_receipt(shard.file, shard.key, shard.header.file_bytes)
        if receipt and all(tuple(started.get(file, ())) == parent.stats[file] for file in shard.inputs):
            found[shard.file] = receipt
    return found


def _make(
    todo: Sequence[ShardPlan], prepared: Prepared, store: Store, settings: Settings, watch: Watch
) -> Sequence[Receipt]:
    """The receipts of `todo`, in its order; the largest shards are begun first."""
    if not todo:
        return []
    parent = prepared.parent
    headers = {header.shard: header for header in parent.headers}
    bytes_moved = sum(input_bytes(parent, shard) + shard.header.file_bytes for shard in todo)
    tasks = {
        shard.file: ShardTask(
            plan=shard,
            dag_needs=prepared.dag.needs,
            inputs=tuple(
                Input(parent.path(file), parent.stats[file], headers[file].data_begin)
                for file in shard.inputs
            ),
            out=store.out,
            settings=settings,
            once=settings.scheduler is None and bytes_moved > memory_bytes(),
        )
        for shard in todo
    }
    largest_first = sorted(tasks, key=lambda file: (-tasks[file].plan.header.file_bytes, file))
    ordered = {file: tasks[file] for file in largest_first}
    if settings.scheduler:
        made = on_cluster(ordered, settings.scheduler, watch)
    else:
        made = in_threads(ordered, settings.workers, watch)
    return [made[shard.file] for shard in todo]


def memory_bytes() -> int:
    """What this process may fill: the machine's memory, or its container's (cgroup v2)."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        container = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return min(machine, int(container)) if container.isdigit() else machine


def _kernel_name(settings: Settings, made: Sequence[ShardPlan]) -> str:
    """The kernel that encoded the weights of the shards that were made; "none" where there were none."""
    if not any(piece.part == "codes" for shard in made for piece in shard.pieces):
        return "none"
    from shardmill.kernels.block_fp8 import known_kernels

    return known_kernels()[-1] if settings.kernel == "auto" else settings.kernel
