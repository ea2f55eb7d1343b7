"""Forks builds and kills them: reads lines "seconds parent recipe out" and answers "killed" or "ended".

A process of its own, so that a fork costs milliseconds and no test process is forked.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tests.pipeline.parents import build


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, parent, recipe, out = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            build(Path(parent), Path(out), Path(recipe))
            os._exit(0)
        time.sleep(float(seconds))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else "ended", flush=True)


main()
