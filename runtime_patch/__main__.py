"""`python -m runtime_patch preflight|serve`: for the serving image, which carries neither click nor the pipeline."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
if (SOURCES / "shardmill").is_dir():  # a checkout: its own code, whatever else is installed
    sys.path.insert(0, str(SOURCES))

from shardmill.runtime_patch import preflight, presets, settings  # noqa: E402
from shardmill.runtime_patch.errors import PresetError  # noqa: E402

LAYOUT_HELP = (
    "another KV layout than the preset's: stock, 8888, 8666, 6666, 6666f, or 6666-stock for other scales"
)
CARD_HELP = "the card's compute capability, 9.0 or 12.0; by default that of the card here"


def run_preflight(
    model: str | None, preset_name: str | None, as_json: bool, layout: str | None = None
) -> int:
    """Prints the ledger's table and the findings; 0 where nothing would be served wrong, else 1."""
    shell = dict(os.environ)
    preset, wrong = preflight.preset_of(preset_name, layout)
    environ = preflight.environment_with(preset)
    if layout and not preset_name:
        environ |= _layout_variables(layout)
    os.environ.update(environ)
    found = preflight.run(Path(model) if model else None, preset, environ)
    findings = (*wrong, *preflight.overruled(preset, shell), *found.findings)
    report = preflight.Report(found.states, findings)
    if as_json:
        print(json.dumps({"format": "shardmill/preflight/1", "ok": report.ok, **asdict(report)}, indent=2))  # noqa: T201
    else:
        print("\n".join(_lines(report)))  # noqa: T201
    return 0 if report.ok else 1


def _layout_variables(layout: str) -> dict[str, str]:
    """The variables of a KV layout without a preset; an unknown one is left to be refused where they are read."""
    tiles, _, scales = layout.partition("-")
    return {} if tiles == presets.STOCK else {settings.TILES: tiles, settings.SCALES: scales}


def _lines(report: preflight.Report) -> list[str]:
    if all(
        row.state.startswith("refused: ") for row in report.states
    ):  # one reason for all of them, told below
        lines = [f"none of the {len(report.states)} patches is applied; --json lists them"]
    else:
        lines = _ledger(report)
    lines += [f"{finding.level}: {finding.subject}: {finding.told}" for finding in report.findings]
    return [*lines, "preflight: ok" if report.ok else "preflight: refused"]


def _ledger(report: preflight.Report) -> list[str]:
    """Three lines a patch: its state here, what it changes, and until when."""
    lines = []
    for row in report.states:
        lines.append(f"{row.patch.name} ({row.patch.kind}): {row.state}")
        lines.append(f"    {row.patch.target}: {row.patch.why}")
        lines.append(f"    until {row.patch.remove_when}; upstream: {row.patch.upstream}")
    return lines


def run_serve(
    preset_name: str,
    model: str,
    only_print: bool,
    extra: tuple[str, ...],
    layout: str | None = None,
    card: str | None = None,
) -> int:
    """Prints the preset's command with a reason for every flag, or becomes it after a preflight.

    `card` is a compute capability, by default that of the card which is visible here. 1 where the preflight refuses,
    2 where there is no such preset, KV layout or card.
    """
    try:
        preset = presets.with_layout(presets.load(preset_name), layout)
        preset = presets.on_card(preset, card or preflight.capability())
    except PresetError as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    words = presets.command(preset, model, extra)
    if only_print:
        _print_command(preset, words)
        return 0
    environ = preset.environment_over(os.environ)
    if run_preflight(model, preset_name, as_json=False, layout=layout) == 0:
        os.execvpe(words[0], words, environ)
    return 1


def _print_command(preset: presets.Preset, words: list[str]) -> None:
    lost = [f"{name}: {told}" for name, told in preset.overruled(os.environ).items()]
    dropped = [name for name in preset.overruled(os.environ) if name not in preset.environment]
    given = " ".join(f"{name}={value}" for name, value in preset.environment.items())
    prefix = f"env {' '.join('-u ' + name for name in dropped)} {given}" if dropped else given
    print("\n".join(f"# {line}" for line in (preset.summary, *presets.explanation(preset), *lost)))  # noqa: T201
    print(f"{prefix} {shlex.join(words)}")  # noqa: T201


def _split(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Our own arguments, and vLLM's behind the first `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], tuple(arguments[at + 1 :])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime_patch")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "preflight", help="say what the plugin does here and what would be served wrong"
    )
    check.add_argument("--model", help="the checkpoint's folder")
    check.add_argument("--preset", "--lane", dest="preset", help="a preset's name or file")
    check.add_argument("--kv-layout", "--rung", dest="layout", help=LAYOUT_HELP)
    check.add_argument("--json", action="store_true", help="one JSON object on stdout")
    serve = commands.add_parser("serve", help="print or run a preset's command")
    serve.add_argument("preset", help=f"one of {', '.join(presets.names())}, or a file")
    serve.add_argument("--model", required=True, help="the checkpoint's folder")
    serve.add_argument(
        "--print", action="store_true", dest="only_print", help="print the command, run nothing"
    )
    serve.add_argument("--kv-layout", "--rung", dest="layout", help=LAYOUT_HELP)
    serve.add_argument("--card", help=CARD_HELP)
    serve.epilog = "Arguments after -- go to vLLM and win."
    own, extra = _split(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(own)
    if given.command == "preflight":
        return run_preflight(given.model, given.preset, given.json, given.layout)
    return run_serve(given.preset, given.model, given.only_print, extra, given.layout, given.card)


if __name__ == "__main__":
    raise SystemExit(main())
