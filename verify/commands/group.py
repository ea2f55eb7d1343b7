"""The click group `verify`: one question a command, each loaded when it is asked.

`QUESTIONS` is the whole list. A question of another part, or one whose extra is not installed, is said so in a
sentence and stops nothing else.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from shardmill.verify.rules.findings import printable

MESSAGE_CHARS_MAX = 2_000

QUESTIONS: Mapping[str, tuple[str, str]] = {  # question -> (module:command, one line of help)
    "all": ("shardmill.verify.commands.all:all_command", "Every question that applies."),
    "integrity": (
        "shardmill.verify.commands.integrity:integrity_command",
        "Is it whole, and is it what was published?",
    ),
    "lint": (
        "shardmill.verify.commands.lint:lint_command",
        "Does it make sense: scales, names, groups, config?",
    ),
    "loads": (
        "shardmill.verify.commands.loads:loads_command",
        "Which loader takes every tensor, and in which module?",
    ),
    "diff": ("shardmill.verify.commands.pairs:diff_command", "What differs between two checkpoints?"),
    "roundtrip": (
        "shardmill.verify.commands.pairs:roundtrip_command",
        "How much did the weights lose against their parent?",
    ),
    "reproduce": (
        "shardmill.verify.commands.pairs:reproduce_command",
        "Are the blocks what their numerics make of the parent?",
    ),
    "origin": (
        "shardmill.verify.commands.origin:origin_command",
        "Which tool's formula made its codes and scales?",
    ),
    "sign": ("shardmill.verify.commands.signature:sign_command", "Sign it, with a provenance statement."),
    "signature": (
        "shardmill.verify.commands.signature:signature_command",
        "Are these the files that a key's owner signed?",
    ),
    "attested": (
        "shardmill.verify.commands.attested:attested_command",
        "Who vouches for what, by signed verdicts?",
    ),
    "sbom": ("shardmill.verify.commands.sbom:sbom_command", "Its bill of materials (CycloneDX)."),
    "accept": ("shardmill.verify.accept.commands:accept", "Is it as good as its parent, served?"),
    "fit": ("shardmill.verify.fit.commands:fit", "Does it fit the card, with how much context?"),
}


class Questions(click.Group):
    """Finds a command by name in the table, so that asking one question imports no other."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(QUESTIONS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in QUESTIONS:
            return None
        place, line = QUESTIONS[cmd_name]
        module, _, attribute = place.partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            return _absent(cmd_name, line, str(error))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """click's own; where there is no such question, with the nearest names, or the question that a place lacks."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = get_close_matches(args[0], QUESTIONS, n=2)
            if close:
                hint = f" Did you mean {' or '.join(close)}?"
            elif Path(args[0]).exists() or args[0].startswith(("hf://", "https://", "http://")):
                hint = f" To ask all of a checkpoint: {ctx.command_path} all {shlex.quote(args[0])}"
            else:
                raise
            raise click.UsageError(error.message + hint, ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Whatever a server or a file says reaches the terminal without its control characters."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            said = printable(error.message, MESSAGE_CHARS_MAX)
            if said == error.message:
                raise
            ended = (
                click.UsageError(said) if isinstance(error, click.UsageError) else click.ClickException(said)
            )
            raise ended from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Questions"):
            formatter.write_dl([(name, line) for name, (_, line) in QUESTIONS.items()])


def _absent(name: str, line: str, why: str) -> click.Command:
    @click.command(
        name,
        help=line,
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def absent(arguments: tuple[str, ...]) -> None:
        raise click.UsageError(
            f"`verify {name}` cannot be asked here: {why}. Install what it needs and ask again."
        )

    return absent


@click.group(cls=Questions)
def verify() -> None:
    """Yes/no questions about a checkpoint, asked of its files alone.

    \b
    Example: shardmill verify integrity build/checkpoint

    Exit code 0: clean or info only; 1: errors or warnings; 2: the question could not be asked.
    """
