"""preflight in a process that has vLLM."""

import os
from dataclasses import asdict
from pathlib import Path

from tests.runtime_patch.vllm import probe


def look(job):
    from shardmill.runtime_patch import preflight

    report = preflight.run(Path(job["model"]), None, os.environ)
    return {"ok": report.ok, **asdict(report)}


if __name__ == "__main__":
    probe.main(look)
