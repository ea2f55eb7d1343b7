"""What all tests share: hypothesis draws the same examples on every run, and each worker has a core of its own."""

import os
from collections import Counter
from typing import Any

from hypothesis import settings

settings.register_profile("here", deadline=None, derandomize=True)
settings.load_profile("here")

# Some machines pack processes that may run anywhere onto one core; workers of pytest-xdist are known by name.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line a reason of the skipped tests, and how to run them."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        where = report.longrepr
        text = where[2] if isinstance(where, tuple) else str(where)
        reasons[text.removeprefix("Skipped: ")] += 1
    if not reasons:
        return
    terminalreporter.section(
        f"left out: {sum(reasons.values())}; `make test-all` installs the extras", sep="-"
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count:5}  {reason}")
