"""The command `shardmill`. Its subcommands are imported when they are called, so that `--help` is instant."""

from __future__ import annotations

import atexit
import gc
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from shardmill.pipeline.commands.printable import printable
from shardmill.pipeline.errors import MissingExtraError, OutputFolderError, RecipeError, ShardmillError

# name -> (module:attribute, the line that --help shows)
COMMANDS: Mapping[str, tuple[str, str]] = {
    "plan": ("shardmill.pipeline.commands.plan:plan", "What a build would make, from headers alone."),
    "build": (
        "shardmill.pipeline.commands.build:build",
        "Do what the plan says; continue an interrupted build.",
    ),
    "explain": (
        "shardmill.pipeline.commands.explain:explain",
        "What a build would do now, and why, file by file.",
    ),
    "init": (
        "shardmill.pipeline.commands.init:init",
        "Look at a checkpoint and write a recipe for it.",
    ),
    "recipes": (
        "shardmill.pipeline.commands.recipes:recipes",
        "List the recipes that come with shardmill, or print one.",
    ),
    "pin": (
        "shardmill.pipeline.commands.pin:pin",
        "Write the parent's lock file: size and sha256 of each file.",
    ),
    "publish": (
        "shardmill.pipeline.commands.publish:publish",
        "Publish a checkpoint on a hub, in one commit, sending what the hub lacks.",
    ),
    "delta": (
        "shardmill.pipeline.commands.delta:delta",
        "What turns one checkpoint into another, as a folder.",
    ),
    "apply": (
        "shardmill.pipeline.commands.delta:apply_command",
        "Make the new checkpoint from the old one and a delta.",
    ),
    "toy-parent": (
        "shardmill.pipeline.commands.toy:toy_parent",
        "Make a parent with the real one's structure, in toy size.",
    ),
    "verify": (
        "shardmill.verify.commands.group:verify",
        "Judge a checkpoint: whole? sane? made from that parent?",
    ),
    "report": ("shardmill.verify.commands.report:report", "A page on what a checkpoint is and what it lost."),
    "preflight": (
        "shardmill.pipeline.commands.serve:preflight",
        "Would this vLLM serve this checkpoint right?",
    ),
    "serve": ("shardmill.pipeline.commands.serve:serve", "Print or run the vLLM command of a preset."),
    "tune": ("shardmill.pipeline.commands.tune:tune", "Tune the block-FP8 GEMM for this machine's GPU."),
}


def _is_devnull(number: int) -> bool:
    try:
        return os.fstat(number).st_rdev == Path(os.devnull).stat().st_rdev
    except OSError:
        return True


_HAD_READER = not _is_devnull(1)  # when the process started
_USAGE = (
    RecipeError,
    MissingExtraError,
    OutputFolderError,
)  # what a user asked for can't be done: exit code 2
_NOBODY_READS = 128 + signal.SIGPIPE  # as of any program whose reader went away; never the code of a verdict
_INTERRUPTED, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


class LazyGroup(click.Group):
    """A group whose commands are imported only when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """click's own, with the nearest names where there is no such command."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            close = get_close_matches(args[0], COMMANDS, n=2)
            if close:
                message = f"{error.message} Did you mean {' or '.join(close)}?"
                raise click.UsageError(message, ctx) from None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


# extra -> a module that it brings
EXTRAS: Mapping[str, str] = {
    "fast": "numba",
    "hub": "huggingface_hub",
    "report": "matplotlib",
    "sign": "model_signing",
    "cluster": "distributed",
    "accept": "scipy",
}


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value:
        return
    there = {extra: find_spec(module) is not None for extra, module in EXTRAS.items()}
    kernel = "numba" if there["fast"] else "numpy"
    import platform
    from importlib.metadata import version  # 0.05 s, which no other command needs

    click.echo(f"shardmill {version('shardmill')}")
    click.echo(f"kernel: {kernel}; Python {platform.python_version()}, {platform.machine()}")
    click.echo(f"extras: {', '.join(extra for extra, found in there.items() if found) or 'none'}")
    if missing := [extra for extra, found in there.items() if not found]:
        click.echo(f"not installed: {', '.join(missing)}")
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="The version, the kernel and the extras.",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress and no notes; answers and errors alone.")
@click.option("-v", "--verbose", is_flag=True, help="Say at the end what the command took.")
@click.pass_context
def shardmill(context: click.Context, quiet: bool, verbose: bool) -> None:
    """Rewrite a published safetensors checkpoint into one that fits and serves better, and prove every byte.

    Example: shardmill plan -c pipeline.toml --parent /data/parent
    """
    if verbose:
        started = time.monotonic()
        context.call_on_close(lambda: _tell_cost(time.monotonic() - started))


def _tell_cost(seconds: float) -> None:
    """One line: time, and processor time and the largest memory, workers included."""
    here, workers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    processor = sum(usage.ru_utime + usage.ru_stime for usage in (here, workers))
    peak = max(here.ru_maxrss, workers.ru_maxrss) / 1024
    click.echo(
        f"took {seconds:.1f} s, {processor:.1f} s of processor time, at most {peak:.0f} MiB in one process",
        err=True,
    )


def main() -> NoReturn:
    """Runs `shardmill` and ends the process at once, with the exit code of `answer`.

    What a stopped build's threads hold is staged, and safe to lose; and to free a plan and a compiler object by object
    would take a third of a second.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it; no file of ours may get its number
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    code = answer()
    _ignore_signals()
    if code not in (_INTERRUPTED, _TERMINATED):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            code = _NOBODY_READS
        except OSError:
            code = code or 1
    os._exit(code)


def answer() -> int:
    """Runs `shardmill`. Exit codes: 0 done, 1 findings or failure, 2 usage, 130 interrupted, 143 terminated."""
    # Plans and compilers are millions of small objects without a cycle; looking for one at every 700th costs a quarter
    # of their time.
    gc.set_threshold(1_000_000, 50, 100)
    signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may have no letter for a name
    try:
        code = shardmill(standalone_mode=False)  # click returns the code of `ctx.exit` here
        return code if isinstance(code, int) else 0
    except SystemExit as left:
        if _lost_its_reader():
            return _NOBODY_READS
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        click.echo(left.code, err=True)
        return 1
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _stopped("stopped", _INTERRUPTED)
    except _TerminatedError:
        return _stopped("terminated", _TERMINATED)
    except ShardmillError as error:
        click.echo(f"Error: {printable(str(error))}", err=True)
        return 2 if isinstance(error, _USAGE) else 1
    except BrokenPipeError:
        return _NOBODY_READS
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        told = printable(f"{where}{error.strerror or error}")
        click.echo(f"Error: {told}; correct that and run the same command again", err=True)
        return 1
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        click.echo(
            f"Error: {error}; raise the limit of processes (ulimit -u) and run the command again", err=True
        )
        return 1


def _lost_its_reader() -> bool:
    """Whether click or rich met a broken pipe: each then replaces standard output and exits with 1, as findings do."""
    if type(sys.stdout).__name__.endswith(
        "PacifyFlushWrapper"
    ):  # click 8.5 put an underscore before the name
        return True
    return _HAD_READER and _is_devnull(1)


class _TerminatedError(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt it passes every `except Exception`."""


def _terminated(signum: int, frame: FrameType | None) -> None:
    raise _TerminatedError


def _stopped(how: str, code: int) -> int:
    _ignore_signals()
    resumable = sys.argv[1:2] in (["build"], ["publish"])
    click.echo(how + ("; run the same command to continue" if resumable else ""), err=True)
    return code


def _ignore_signals() -> None:
    """For the last steps, which a second Ctrl-C must not turn into a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
