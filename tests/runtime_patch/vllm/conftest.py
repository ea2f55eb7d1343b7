"""The tier that runs the real vLLM 0.33.0 on a CPU: `make vllm-test`. Not collected where vLLM is not installed."""

import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
BUILD = REPOSITORY / "build" / "vllm-test"

# Of one child, in seconds of its own CPU time: a slow box is no fault of what is tested.
CPU_SECONDS = int(os.environ.get("VLLM_TEST_CPU_SECONDS", "1800"))

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_[!c]*.py"]


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
        given = folder / "job.json"
        given.write_text(json.dumps(job))
        words = [sys.executable, "-m", f"tests.runtime_patch.vllm.{self.module}", f"@{given}"]
        with log.open("w") as stream:
            process = subprocess.Popen(
                words,
                cwd=REPOSITORY,
                env=self._environ(),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=limit_cpu,
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


def limit_cpu():
    """Run in the child: the kernel ends it at its limit, whoever still waits for it."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))


@dataclass
class Running:
    process: subprocess.Popen
    out: Path
    log: Path

    def report(self) -> dict:
        """What the child found. It ends with its CPU time, or with this process's patience: none is left behind."""
        try:
            ended = self.process.wait()
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        assert ended != -signal.SIGXCPU, f"the child used its {CPU_SECONDS} s of CPU time"
        assert self.out.exists(), self.log.read_text()[-3000:]
        return json.loads(self.out.read_text())


@pytest.fixture
def look(tmp_path):
    """Runs a case and gives its report."""

    def run(job, **options):
        folder = tmp_path / f"case{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return Case(job, **options).start(folder).report()

    return run
