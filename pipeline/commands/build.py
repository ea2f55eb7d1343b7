"""The command build."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardmill.pipeline.commands.build_hub import build_into_hub, hub_or_folder_option
from shardmill.pipeline.commands.options import (
    is_quiet,
    json_option,
    lossless_option,
    paranoid_option,
    parent_option,
    recipe_option,
    show_json,
    show_next,
    source_option,
    tell,
)
from shardmill.pipeline.commands.printable import printable
from shardmill.pipeline.commands.progress import counted, human, meter
from shardmill.pipeline.commands.recipe import load_recipe, parent_words
from shardmill.pipeline.container.side_files import missed
from shardmill.pipeline.manifest.consumed import Records
from shardmill.pipeline.manifest.lock import load_lock, lock_path
from shardmill.pipeline.manifest.store import Store
from shardmill.pipeline.run import build as run
from shardmill.pipeline.run.cores import WORKERS_MAX, usable_workers
from shardmill.pipeline.run.prepare import prepare
from shardmill.pipeline.run.sole_owner import refuse_shared
from shardmill.pipeline.run.sources import folders_of
from shardmill.pipeline.run.unchanged import is_unchanged
from shardmill.pipeline.stages.job import Prepared, Settings, Watch

if TYPE_CHECKING:
    from shardmill.pipeline.publish.facts import Place


class Workers(click.ParamType[int]):
    """A number of workers, or "auto"."""

    name = f"auto|1-{WORKERS_MAX}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "auto":
            return usable_workers()
        if isinstance(value, str) and value.isdecimal() and 1 <= int(value) <= WORKERS_MAX:
            return int(value)
        if isinstance(value, int):
            return value
        return self.fail(f"{value!r} is neither auto nor a number from 1 to {WORKERS_MAX}", param, ctx)


@click.command()
@recipe_option
@parent_option
@source_option
@hub_or_folder_option
@click.option(
    "--workers",
    type=Workers(),
    default="auto",
    show_default=True,
    help="Processes that make shards; auto: as many as cores and memory allow.",
)
@click.option(
    "--kernel",
    type=click.Choice(["auto", "numpy", "numba"]),
    default="auto",
    show_default=True,
    help="What encodes the weights; auto: numba where it is installed and worth its start. The bytes are the same.",
)
@click.option(
    "--passthrough",
    type=click.Choice(["copy", "reflink", "hardlink"]),
    default="copy",
    show_default=True,
    help="How an unchanged file is passed on; copied where the file systems can't. A hard link is the parent's own "
    "file: editing one edits both.",
)
@click.option("--sha256/--no-sha256", default=True, show_default=True, help="Hash every output file.")
@click.option("--expect-key", help="Refuse to build any plan but the one with this key (see plan --json).")
@click.option(
    "--scheduler",
    help="Address of a dask.distributed scheduler, e.g. tcp://host:8786; default: processes of this machine.",
)
@click.option(
    "--connections",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Of an hf:// parent: ranges that are asked for at a time, for each shard being made.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Refuse NaN, Inf, matrices of zeros and empty tensors among what is passed on.",
)
@click.option("--create", is_flag=True, help="With --out hf://: make the repository or branch if need be.")
@click.option(
    "--private", is_flag=True, help="With --out hf://: make it private; one that is public is refused."
)
@click.option("--message", help="With --out hf://: the commit's message; by default it names the recipe.")
@click.option(
    "--consume-parent",
    is_flag=True,
    help="REMOVE each of the parent's shards once all that is made from it is whole and read back; for one disk. "
    "Needs a lock (`shardmill pin`) and a parent that nobody else uses.",
)
@lossless_option
@paranoid_option
@json_option
def build(
    recipe: Path,
    parent: Path,
    sources: tuple[tuple[str, Path], ...],
    out: Path | Place,
    workers: int,
    kernel: str,
    passthrough: Any,
    sha256: bool,
    expect_key: str | None,
    scheduler: str | None,
    connections: int,
    strict: bool,
    create: bool,
    private: bool,
    message: str | None,
    consume_parent: bool,
    lossless: bool,
    paranoid: bool,
    as_json: bool,
) -> None:
    """Do what the plan says. An interrupted build continues where it stopped; one that is done does nothing.

    With --out hf://org/name each shard is made, sent and removed, and one commit shows the whole.

    Example: shardmill build -c pipeline.toml --parent /data/parent --out /data/out
    """
    started = time.monotonic()
    _refuse_broken_numba(kernel)
    options = (workers, kernel, sha256, passthrough, paranoid, strict, lossless, scheduler)
    settings = Settings(*options, connections, consume_parent)
    _refuse_options(settings, out, create or private or bool(message))
    loaded, lock = load_recipe(recipe), load_lock(lock_path(recipe))
    folders = folders_of(loaded, dict(sources))
    if not isinstance(out, Path):
        prepared = prepare(loaded, parent, lock, paranoid, folders)
        _refuse_other_key(prepared.plan.key, expect_key)
        build_into_hub(prepared, out, (create, private, message), settings, as_json)
        return
    as_last_time = expect_key is None and not (strict or lossless or consume_parent)
    if as_last_time and is_unchanged(loaded, parent, out, settings, lock, folders):
        done = _nothing(out) if as_json else _Done(made={})
    else:
        consumed = Records(Store(out)).load() if consume_parent else None
        prepared = prepare(loaded, parent, lock, paranoid, folders, consumed)
        _refuse_other_key(prepared.plan.key, expect_key)
        if consume_parent:
            refuse_shared(prepared.parent, lock, lock_path(recipe))
        done = _built(prepared, out, settings, quiet=as_json or is_quiet())
    _report(done, out, [] if consume_parent else parent_words(parent, folders), started, as_json)


def _report(done: _Done, out: Path, parents: list[str], started: float, as_json: bool) -> None:
    seconds = time.monotonic() - started
    if as_json:
        show_json("build", {**_as_json(done), "seconds": round(seconds, 3)})
        return
    _show(done, out, seconds)
    show_next("shardmill", "verify", "all", str(out), *parents)


def _built(prepared: Prepared, out: Path, settings: Settings, quiet: bool) -> _Done:
    with meter(quiet) as progress:
        for line in missed(prepared.parent.left):
            tell(line)
        return _facts(run.build(prepared, out, settings, Watch(progress.advance), progress.begin, tell))


def _refuse_options(settings: Settings, out: Path | Place, wants_hub: bool) -> None:
    """Raises UsageError where options do not go together."""
    is_folder = isinstance(out, Path)
    if settings.consume and (not is_folder or settings.scheduler or settings.passthrough == "hardlink"):
        raise click.UsageError(
            "--consume-parent goes with a folder as --out, and not with --scheduler or --passthrough hardlink"
        )
    if wants_hub and is_folder:
        raise click.UsageError(
            "--create, --private and --message go with --out hf://org/name; leave them out"
        )


def _refuse_other_key(key: str, expected: str | None) -> None:
    if expected not in (None, key):
        raise click.ClickException(f"the plan's key is {key}, not {expected}; nothing was written")


def _refuse_broken_numba(kernel: str) -> None:
    if kernel != "numba":
        return
    if importlib.util.find_spec("numba") is None:
        raise click.UsageError("--kernel numba needs numba: pip install numba, or leave --kernel out")
    from shardmill.kernels.block_fp8 import why_no_numba

    if why := why_no_numba():
        raise click.ClickException(
            f"--kernel numba: numba does not run here ({why}); correct its installation, delete its cache, "
            f"or leave --kernel out"
        )


@dataclass(frozen=True, slots=True)
class _Done:
    """What the command did, as both of its ways tell it: a build, and the finding that nothing changed."""

    made: Mapping[str, str | None]  # shard -> why
    resumed: tuple[str, ...] = ()
    files_written: tuple[str, ...] = ()
    bytes_read: int = 0
    kernel: str = "none"
    workers: int = 0
    plan_key: str | None = None
    recipe: str | None = None
    shards: int = 0
    odd: tuple[str, ...] = ()


def _facts(summary: run.Summary) -> _Done:
    return _Done(
        made={verdict.file: verdict.reason for verdict in summary.made},
        resumed=summary.resumed,
        files_written=summary.files_written,
        bytes_read=summary.bytes_read,
        kernel=summary.kernel,
        workers=summary.workers,
        plan_key=summary.plan.key,
        recipe=summary.plan.recipe,
        shards=len(summary.plan.shards),
        odd=summary.odd,
    )


def _nothing(out: Path) -> _Done:
    """Nothing changed since the build that wrote the manifest in `out`, so its plan is the plan."""
    manifest = Store(out).load().manifest
    assert manifest is not None, f"{out} is unchanged, but has no manifest"
    return _Done(made={}, plan_key=manifest.plan_key)


def _as_json(done: _Done) -> dict[str, Any]:
    names = ("made", "resumed", "files_written", "bytes_read", "kernel", "workers", "plan_key", "odd")
    return {name: getattr(done, name) for name in names}


_ODD_SHOWN = 5


def _show(done: _Done, out: Path, seconds: float) -> None:
    for sentence in done.odd[:_ODD_SHOWN]:
        click.echo(f"warning: {printable(sentence)}")
    if len(done.odd) > _ODD_SHOWN:
        click.echo(f"warning: {len(done.odd) - _ODD_SHOWN} more tensors like it; the manifest lists them")
    if not done.files_written:
        click.echo(f"nothing to do: {out} is up to date ({seconds:.1f} s)")
        return
    fresh = done.shards - len(done.made)
    if fresh:
        for file, reason in done.made.items():
            click.echo(printable(f"{file}: {reason}"))
    resumed = f" ({len(done.resumed)} of them before an interruption)" if done.resumed else ""
    click.echo(
        f"built {out} in {seconds:.1f} s: {counted(len(done.made), 'shard')} made{resumed}, {fresh} up to date, "
        f"{counted(len(done.files_written), 'file')} written, {human(done.bytes_read)} read"
    )
    workers = counted(done.workers, "worker")
    click.echo(f"kernel: {done.kernel}; {workers}; recipe: {done.recipe}; plan key: {done.plan_key}")
