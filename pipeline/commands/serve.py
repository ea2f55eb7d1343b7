"""The commands serve and preflight: the serving side's own, mounted here."""

from __future__ import annotations

import click

from shardmill.pipeline.commands.options import json_option
from shardmill.runtime_patch import __main__ as serving
from shardmill.runtime_patch import presets


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("preset")
@click.option("--model", required=True, help="The checkpoint's folder, or its name on the hub.")
@click.option("--print", "only_print", is_flag=True, help="Print the command, with a reason for every flag.")
@click.option("--kv-layout", "--rung", "layout", help=f"{serving.LAYOUT_HELP.capitalize()}.")
@click.option("--card", help=f"{serving.CARD_HELP.capitalize()}.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def serve(
    ctx: click.Context,
    preset: str,
    model: str,
    only_print: bool,
    layout: str | None,
    card: str | None,
    extra: tuple[str, ...],
) -> None:
    """Run vLLM with the flags of PRESET, a name or a .toml file, after a preflight. EXTRA goes to vLLM and wins.

    Example: shardmill serve everything-512k --model /data/child --kv-layout 6666 --print
    """
    ctx.exit(serving.run_serve(preset, model, only_print, extra, layout, card))


@click.command()
@click.option("--model", help="The checkpoint's folder.")
@click.option("--preset", "--lane", "preset", help=f"A preset's name ({', '.join(presets.names())}) or file.")
@click.option("--kv-layout", "--rung", "layout", help=f"{serving.LAYOUT_HELP.capitalize()}.")
@json_option
@click.pass_context
def preflight(
    ctx: click.Context, model: str | None, preset: str | None, layout: str | None, as_json: bool
) -> None:
    """Would this vLLM, with the plugin, serve this checkpoint right? Exit code 1 where it would not.

    Example: shardmill preflight --model /data/child --preset everything-512k
    """
    ctx.exit(serving.run_preflight(model, preset, as_json, layout))
