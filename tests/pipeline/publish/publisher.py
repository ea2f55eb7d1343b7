"""Starts publications in a process of their own, for the hub or the clock to kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from tests.pipeline.publish.hub import Hub

_ROOT = Path(__file__).resolve().parents[3]


class Publisher:
    """Runs commands against `hub`, one at a time, each in a fork of a process that has imported everything.

    log: where standard error goes; else nowhere.
    """

    def __init__(self, hub: Hub, log: Path | None = None) -> None:
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = os.pathsep.join([str(_ROOT), str(_ROOT / "src"), *filter(None, given)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.publish.kill_server"],
            cwd=_ROOT,
            env={**os.environ, "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.address, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab") if log else subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdin
        assert self.process.stdout
        self.to: IO[str] = self.process.stdin
        self.back: IO[str] = self.process.stdout
        assert self.back.readline() == "ready\n"

    def run(
        self,
        hub: Hub,
        words: list[str],
        kill_at: tuple[int, str] | None = None,
        seconds: float | None = None,
    ) -> str:
        """How the command ended: "killed", or "ended" and its exit code. It is killed at a call, or after `seconds`."""
        self.to.write(json.dumps(words) + "\n")
        self.to.flush()
        hub.victim, hub.kill_at = int(self.back.readline()), kill_at
        self.to.write("go\n" if seconds is None else f"go {seconds}\n")
        self.to.flush()
        ended = self.back.readline().strip()
        hub.victim, hub.kill_at = 0, None
        return ended

    def close(self) -> None:
        self.to.close()
        self.process.wait()
        self.back.close()
