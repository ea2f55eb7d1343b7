"""docs/commands.md, written from the commands themselves: `python -m shardmill.pipeline.commands.reference`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from shardmill.pipeline.commands.main import shardmill

_HEAD = """# Commands
Every command with its options.

Written from the commands by `python -m shardmill.pipeline.commands.reference`; `--help` prints the same.
"""


def reference() -> str:
    """The page: one section a command, with what `--help` prints at 100 columns."""
    sections = [f"## {name}\n\n{_help(name, command)}" for name, command in _commands("shardmill", shardmill)]
    return "\n".join([_HEAD, *sections])


def _commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command, info_name=name)
    for each in command.list_commands(context):
        inner = command.get_command(context, each)
        if inner is not None and not inner.hidden:
            yield from _commands(f"{name} {each}", inner)


def _help(name: str, command: click.Command) -> str:
    names = shardmill.context_settings["help_option_names"]  # what commands inherit when they are called
    context = click.Context(
        command, info_name=name, terminal_width=100, max_content_width=100, help_option_names=names
    )
    command._help_option = None  # click keeps the one of the first context that asked
    lines = command.get_help(context).splitlines()
    return "\n".join(f"    {line}".rstrip() for line in lines) + "\n"


if __name__ == "__main__":
    click.echo(reference(), nl=False)
