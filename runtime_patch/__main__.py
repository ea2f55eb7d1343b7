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

from shardmill.runtime_patch import preflight, presets  # noqa: E402
from shardmill.runtime_patch.errors import PresetError  # noqa: E402


def run_preflight(model: str | None, preset_name: str | None, as_json: bool) -> int:
    """Prints the ledger's table and the findings; 0 where nothing would be served wrong, else 1."""
    preset, wrong = preflight.preset_of(preset_name)
    environ = preflight.environment_with(preset)
    os.environ.update(environ)
    found = preflight.run(Path(model) if model else None, preset, environ)
    report = preflight.Report(found.states, (*wrong, *found.findings))
    if as_json:
        print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2))  # noqa: T201
    else:
        print("\n".join(_lines(report)))  # noqa: T201
    return 0 if report.ok else 1


def _lines(report: preflight.Report) -> list[str]:
    lines = []
    for row in report.states:
        lines.append(f"{row.patch.name} ({row.patch.kind}): {row.state}")
        lines.append(f"    {row.patch.target}: {row.patch.why}")
        lines.append(f"    until {row.patch.remove_when}; upstream: {row.patch.upstream}")
    lines += [f"{finding.level}: {finding.subject}: {finding.told}" for finding in report.findings]
    return [*lines, "preflight: ok" if report.ok else "preflight: refused"]


def run_serve(preset_name: str, model: str, only_print: bool, extra: tuple[str, ...]) -> int:
    """Prints the preset's command with a reason for every flag, or becomes it after a preflight.

    1 where the preflight refuses, 2 where there is no such preset.
    """
    try:
        preset = presets.load(preset_name)
    except PresetError as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    words = presets.command(preset, model, extra)
    if only_print:
        settings = " ".join(f"{name}={value}" for name, value in preset.environment.items())
        print("\n".join(f"# {line}" for line in (preset.summary, *presets.explanation(preset))))  # noqa: T201
        print(f"{settings} {shlex.join(words)}")  # noqa: T201
        return 0
    if run_preflight(model, preset_name, as_json=False) == 0:
        os.execvpe(words[0], words, preflight.environment_with(preset))
    return 1


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
    check.add_argument("--json", action="store_true", help="one JSON object on stdout")
    serve = commands.add_parser("serve", help="print or run a preset's command")
    serve.add_argument("preset", help=f"one of {', '.join(presets.names())}, or a file")
    serve.add_argument("--model", required=True, help="the checkpoint's folder")
    serve.add_argument(
        "--print", action="store_true", dest="only_print", help="print the command, run nothing"
    )
    serve.epilog = "Arguments after -- go to vLLM and win."
    own, extra = _split(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(own)
    if given.command == "preflight":
        return run_preflight(given.model, given.preset, given.json)
    return run_serve(given.preset, given.model, given.only_print, extra)


if __name__ == "__main__":
    raise SystemExit(main())
