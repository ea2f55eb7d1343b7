"""Files made to exhaust the judge: memory and time stay bounded, and the answer is a finding."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.verify.zoo.clean import plain
from tests.verify.zoo.headers import CASES

PEAK_KIB_MAX = 300 << 10
CODE = """
import resource, sys
from click.testing import CliRunner
from shardmill.verify.commands.group import verify
result = CliRunner().invoke(verify, ["integrity", sys.argv[1], "--json"])
lint = CliRunner().invoke(verify, ["lint", sys.argv[1], "--json"])
used = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss: a child begins with what its parent, the whole test suite, had at its largest.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
import json
rules = [row["rule"] for row in json.loads(result.stdout)["findings"]]
print(json.dumps([result.exit_code, lint.exit_code, rules[:1], peak, used.ru_utime + used.ru_stime]))
"""


def _animal(name: str) -> Callable[[Path], None]:
    return next(case for case in CASES if case.name == name).write


def _file(name: str, data: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        plain().write(folder)
        (folder / name).write_bytes(data)

    return write


def _index(count: int, files: int) -> bytes:
    return b'{"weight_map":{' + b",".join(b'"%x":"%x"' % (i, i % files) for i in range(count)) + b"}}"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("write", "rule"),
    [
        (_animal("header of 4 GB"), "SM002"),
        (_animal("header of 60 MB of NUL"), "SM003"),
        (_file("config.json", b'{"a":"' + b"x" * 60_000_000 + b'"}'), "SM000"),
        (_file("config.json", b"[" + b"[]," * 600_000 + b"[]]"), "SM040"),
        (_file("model.safetensors.index.json", _index(300_000, 300_000)), "SM020"),
        (_file("model.safetensors.index.json", _index(300_000, 19_000)), "SM022"),
        (_file("shardmill.manifest.json", b"[" + b"{}," * 490_000 + b"0]"), "SM050"),
    ],
    ids=["header length", "NUL", "long string", "many lists", "many files", "many names", "manifest"],
)
def test_a_bomb_ends_in_a_finding_within_300_mib_and_5_seconds(
    write: Callable[[Path], None], rule: str, tmp_path: Path
) -> None:
    write(tmp_path / "c")
    run = [sys.executable, "-c", CODE, str(tmp_path / "c")]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    exit_code, _, rules, peak, seconds = json.loads(done.stdout)
    assert peak <= PEAK_KIB_MAX
    assert seconds <= 10.0  # of CPU, for two questions
    assert (exit_code, rules) == ((0, []) if rule == "SM000" else (1, [rule]))
