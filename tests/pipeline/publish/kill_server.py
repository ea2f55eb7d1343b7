"""Forks commands that the hub will kill: answers a line, a JSON list of a command's words, with the child's process
id, and starts it at the next line, "go", or "go SECONDS" to kill it then. Then says how it ended. A process of its
own, so that a fork is quick and no test process is forked.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import huggingface_hub
from huggingface_hub import hf_api, lfs

from shardmill.pipeline.commands import main as commands
from shardmill.pipeline.commands import publish
from shardmill.pipeline.publish import publish as work
from shardmill.pipeline.stream import build

LOADED = (
    huggingface_hub,
    hf_api,
    lfs,
    publish,
    work,
    build,
)  # imported before the forks, which then start at once


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(reading, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.argv = ["shardmill", *words]
            os._exit(commands.answer())
        print(child, flush=True)
        seconds = sys.stdin.readline().split()[1:]
        os.write(writing, b"x")
        if seconds:
            time.sleep(float(seconds[0]))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        print("killed" if os.WIFSIGNALED(status) else f"ended {os.WEXITSTATUS(status)}", flush=True)


main()
