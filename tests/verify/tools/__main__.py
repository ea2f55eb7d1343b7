"""Other tools make their checkpoints anew, and the judge is asked: `python -m tests.verify.tools FOLDER [TOOL ...]`

Every tool gets an environment of its own under FOLDER/venv. Asked are `verify all`, alone and beside the parent, and
`verify origin`; exit 1 on an error, a warning or a formula that is not the expected one. `--golden` writes the golden
files again from what was made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

from shardmill.verify.commands.all import ask_all
from shardmill.verify.commands.options import Bar
from shardmill.verify.questions.origin import origin
from shardmill.verify.reading.source import Folder
from tests.verify.tools import golden
from tests.verify.tools.make import REQUIREMENTS, TOOLS

ROOT = Path(__file__).resolve().parents[3]
SEED = 5


def python_of(folder: Path, tool: str) -> Path:
    """The Python of the tool's environment, which is made where it is absent."""
    home = folder / "venv" / tool
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
        command = [python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[tool]]
        subprocess.run([str(word) for word in command], check=True)
    return python


def made_by(folder: Path, tool: str) -> list[Path]:
    command = [str(python_of(folder, tool)), "-m", "tests.verify.tools.make", tool, str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    return [folder / f"{tool} {name}" for name in TOOLS[tool]]


def alarms(child: Path, parent: Path) -> Iterator[str]:
    """Rules that find something in a checkpoint, alone or beside its parent; formulas that are not the expected one."""
    with Bar() as bar:
        for beside in (None, Folder(parent)):
            for report in ask_all(Folder(child), beside, bar, SEED):
                for finding in report.findings:
                    if finding.severity != "info" and finding.rule.id not in golden.EXPECTED[child.name].true:
                        yield f"{finding.rule.id} {finding.tensor}: {finding.got}"
    report = origin(Folder(child), Folder(parent), SEED)
    said = "; ".join(str(fact) for key, fact in report.facts.items() if key != "seed")
    formula = golden.EXPECTED[child.name].formula
    if formula and (formula not in said or "no known formula" in said):
        yield f"origin: {said or report.not_checked}"


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    folder, wanted = Path(words[0]).absolute(), words[1:] or list(TOOLS)
    count = bad = 0
    for tool in wanted:
        for child in made_by(folder, tool):
            found = list(alarms(child, folder / f"parent {golden.EXPECTED[child.name].dtype}"))
            count, bad = count + 1, bad + bool(found)
            print(f"{child.name:<32} {'; '.join(found) or 'clean, and named'}", flush=True)
    print(f"{bad} of {count} checkpoints of {len(wanted)} tools with an alarm or another formula")
    if "--golden" in sys.argv:
        golden.write(folder)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
