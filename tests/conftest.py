"""What all tests share: hypothesis draws the same examples on every run, and each worker has a core of its own."""

import os

from hypothesis import settings

settings.register_profile("here", deadline=None, derandomize=True)
settings.load_profile("here")

# Some machines pack processes that may run anywhere onto one core; workers of pytest-xdist are told apart by name.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
