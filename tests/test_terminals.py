"""Every kind of terminal gets whole names and no traceback; a reader that goes away gets no verdict's exit code."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardmill.pipeline.commands.main import shardmill
from tests.pipeline.parents import RECIPE, micro_tensors, write_parent, write_recipe

MAIN = "from shardmill.pipeline.commands.main import main; main()"
NAME = "mlp of some length, with a word or two"
COMMANDS = {
    "plan": ("plan", "-c", "pipeline.toml", "--parent", "parent"),
    "explain": ("explain", "-c", "pipeline.toml", "--parent", "parent", "--out", "child"),
    "integrity": ("verify", "integrity", "child"),
    "all": ("verify", "all", "child"),
    "help": ("--help",),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a parent, its recipe with a long family name, and its child."""
    folder = tmp_path_factory.mktemp("terminals")
    write_parent(folder / "parent", micro_tensors())
    write_recipe(folder, RECIPE.replace('"mlp"', f'"{NAME}"'))
    words = (
        "build",
        "-c",
        folder / "pipeline.toml",
        "--parent",
        folder / "parent",
        "--out",
        folder / "child",
    )
    result = CliRunner().invoke(shardmill, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return folder


def _on_terminal(
    words: tuple[str, ...], home: Path, width: int, variables: dict[str, str]
) -> tuple[int, str]:
    """Exit code and what a terminal of `width` columns is sent, its colours and line ends removed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        (sys.executable, "-c", MAIN, *words),
        cwd=home,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm-256color", **variables},
    )
    os.close(theirs)
    sent = b"".join(_read(ours))
    os.close(ours)
    text = sent.decode("utf-8").replace("\r\n", "\n")
    return process.wait(), text


def _read(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # the other side is closed
            return
        if not part:
            return
        yield part


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("width", "variables"),
    [(40, {}), (60, {}), (80, {}), (200, {}), (80, {"NO_COLOR": "1"}), (80, {"TERM": "dumb"}), (80, ASCII)],
    ids=["40", "60", "80", "200", "no colour", "dumb", "ascii"],
)
def test_a_plan_is_whole_on_every_terminal(home: Path, width: int, variables: dict[str, str]) -> None:
    """A family's name, its action and its block are never cut or folded; narrow ones lose sizes."""
    code, sent = _on_terminal(COMMANDS["plan"], home, width, variables)
    text = _plain(sent)
    assert (code, "Traceback" in text) == (0, False), text
    line = next(line for line in text.splitlines() if NAME in line)
    assert ("quantize" in line, "[8,8]" in line) == (True, True), text
    coloured = re.findall(r"\x1b\[[0-9;]*3[0-7]m", sent)
    assert not (coloured and "NO_COLOR" in variables), coloured
    assert ("\x1b" in sent) <= (variables.get("TERM") != "dumb")
    assert text.isascii() or variables is not ASCII


@pytest.mark.parametrize("command", ["explain", "init", "integrity", "all", "help"])
def test_a_command_answers_on_a_narrow_terminal_without_utf_8(
    home: Path, tmp_path: Path, command: str
) -> None:
    """No traceback, no letter that the terminal does not have; the judge has findings in so small a model."""
    words = COMMANDS[command] if command != "init" else ("init", "parent", "-o", str(tmp_path / "new.toml"))
    code, sent = _on_terminal(words, home, 40, {**ASCII, "TERM": "dumb"})
    assert code == (1 if "verify" in words else 0), sent
    assert ("Traceback" in sent, sent.isascii(), "\x1b" in sent) == (False, True, False), sent


@pytest.mark.parametrize("command", ["plan", "explain", "integrity", "help"])
def test_a_reader_that_goes_away_gets_141(home: Path, command: str) -> None:
    """As of other programs under `| head`; 1 would be read as findings."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        words = (sys.executable, "-c", MAIN, *COMMANDS[command])
        done = subprocess.run(words, cwd=home, stdout=writes, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writes)
    assert (done.returncode, b"Traceback" in done.stderr) == (141, False), done.stderr
