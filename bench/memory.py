"""The memory that a command and all its processes hold together, sampled: PSS, in which shared pages count once."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

_SAMPLE_SECONDS = 0.02


def together_mib(command: list[str]) -> float:
    """The most memory that a command and its children hold together, by PSS: shared pages count once."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    most = [0]

    def sample() -> None:
        while process.poll() is None:
            most[0] = max(most[0], sum(map(pss_kib, of_session(process.pid))))
            time.sleep(_SAMPLE_SECONDS)

    thread = threading.Thread(target=sample)
    thread.start()
    thread.join()
    if process.returncode:
        raise SystemExit(f"{command}: exit {process.returncode}")
    return most[0] / 1024


def of_session(leader: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(path.parent.name))
    return found


def pss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
