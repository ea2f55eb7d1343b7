"""The tier that runs the real vLLM 0.33.0 on a CPU: `make vllm-test`. Not collected where vLLM is not installed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
CPU_SECONDS = float(os.environ.get("SHARDMILL_TEST_CPU_SECONDS", "900"))
BUILD = REPOSITORY / "build" / "vllm-test"

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def parent() -> Path:
    """A toy parent whose dimensions vLLM's kernels accept."""
    folder = BUILD / "parent"
    shardmill("toy-parent", str(folder), "--size", "vllm")
    return folder


@pytest.fixture(scope="session")
def child(parent) -> Path:
    """What our own pipeline makes of it with the shipped recipe."""
    folder = BUILD / "child"
    recipe = REPOSITORY / "pipeline.toml"
    shardmill("build", "-c", str(recipe), "--parent", str(parent), "--out", str(folder), "--kernel", "numpy")
    return folder


def shardmill(*arguments):
    program = "from shardmill.pipeline.commands.main import main; main()"
    subprocess.run([sys.executable, "-c", program, *arguments], cwd=REPOSITORY, check=True)


@dataclass
class Case:
    """One process that looks at vLLM: a module of this folder, its job and its environment."""

    job: dict
    card: str = "12,0"
    plugin: bool = True
    module: str = "probe"
    environment: dict = field(default_factory=dict)

    def start(self, folder: Path) -> "Running":
        out, log = folder / "report.json", folder / "log"
        job = {"meeting": str(folder.parent / f"{folder.name}.meeting"), **self.job, "out": str(out)}
        words = [sys.executable, "-m", f"tests.runtime_patch.vllm.{self.module}", json.dumps(job)]
        with log.open("w") as stream:
            process = subprocess.Popen(
                words,
                cwd=REPOSITORY,
                env=self._environ(),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Running(process, out, log)

    def _environ(self):
        mine = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        return mine | {
            "LD_LIBRARY_PATH": str(BUILD),
            "PYTHONPATH": os.pathsep.join([str(BUILD / "site"), str(REPOSITORY / "src"), str(REPOSITORY)]),
            "VLLM_PLUGINS": "fake,shardmill" if self.plugin else "fake",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "FAKE_CC": self.card,
            **self.environment,
        }


@dataclass
class Running:
    process: subprocess.Popen
    out: Path
    log: Path

    def report(self) -> dict:
        """What the process found. It may take CPU_SECONDS with its children, however slow the machine is."""
        spent = 0.0
        while self.process.poll() is None:
            spent = max(spent, cpu_seconds(self.process.pid))
            if spent > CPU_SECONDS:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
                pytest.fail(f"killed after {spent:.0f} s of CPU: {self.log.read_text()[-2000:]}")
            time.sleep(0.5)
        assert self.out.exists(), self.log.read_text()[-3000:]
        return json.loads(self.out.read_text())


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of those below it; 0 once it is gone."""
    import psutil

    try:
        one = psutil.Process(pid)
        family = [one, *one.children(recursive=True)]
        return sum(sum(member.cpu_times()[:4]) for member in family)
    except psutil.Error:
        return 0.0


@pytest.fixture
def look(tmp_path):
    """Runs a case and gives its report."""

    def run(job, **options):
        folder = tmp_path / f"case{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return Case(job, **options).start(folder).report()

    return run
