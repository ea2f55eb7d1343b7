"""`verify accept` on served toys: parent, child and KV layouts behind vLLM's own API server, all at once on this GPU.

    python3 -m tests.runtime_patch.gpu.accept WORK OUT      after `forward` has unpacked vLLM and made the toys

Every server is recorded; parent and child twice, for the noise floor. Then the command judges the pairs. The documents
are 80 of 160 drawn words of the toy's vocabulary.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.runtime_patch.gpu import inside
from tests.runtime_patch.gpu.cases import BASE, kvq
from tests.runtime_patch.gpu.forward import REPOSITORY, environment

PORT, DOCUMENTS, WORDS, START_SECONDS = 18_900, 80, 160, 150
SERVERS: dict[str, tuple[str, bool, dict[str, str], str]] = {
    "parent": ("parent", False, {}, ""),
    "child": ("child", True, {}, ""),
    "child-8888": ("child", True, kvq(TILES="8888"), "8888"),
    "child-8666": ("child", True, kvq(TILES="8666"), "8666"),
    "child-6666": ("child", True, kvq(TILES="6666"), "6666"),
}
TWICE = ("parent", "child")
PAIRS = (
    ("parent", "child"),
    ("parent", "child-8666"),
    ("parent", "child-6666"),
    ("child", "child-8888"),
    ("child", "child-8666"),
    ("child", "child-6666"),
)


def protocol() -> str:
    draw = random.Random(16)
    lines = [
        'name = "forward"',
        'summary = "80 documents of drawn words"',
        "seed = 16",
        "[scoring]",
        "top_k = 20",
    ]
    lines += ["window_tokens = 2048", "skip_tokens = 4", "confident = 0.9"]
    for metric, bound in (("top1_agreement", "at_least = 0.95"), ("mean_kl", "at_most = 0.05")):
        lines += ["[[gates]]", f'metric = "{metric}"', bound]
    lines += ["[[gates]]", 'metric = "confident_flips"', "at_most = 0.02"]
    for number in range(DOCUMENTS):
        words = [draw.randrange(300, 1024) for _ in range(WORDS)]
        lines += ["[[documents]]", f'id = "d{number:02}"', f"token_ids = {words}"]
    return "\n".join(lines) + "\n"


def flags() -> list[str]:
    """BASE as the API server's words."""
    words: list[str] = []
    for name, value in BASE.items():
        flag = name.replace("_", "-")
        if name == "skip_tokenizer_init":
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--disable-{flag.removeprefix('enable-')}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def start(name: str, port: int, work: Path, environ: dict[str, str], device: str) -> subprocess.Popen[bytes]:
    folder, plugin, variables, _ = SERVERS[name]
    own = {
        "VLLM_PLUGINS": "harness,shardmill" if plugin else "harness",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        inside.ORDERED: "1",
        "CUDA_VISIBLE_DEVICES": device,
    }
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(work / "toys" / folder),
    ]
    words += ["--served-model-name", "toy", "--host", "127.0.0.1", "--port", str(port), *flags()]
    log = (work / "accept" / f"{name}.log").open("w")
    environ = environ | own | variables
    return subprocess.Popen(
        words, cwd=work, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def wait(process: subprocess.Popen[bytes], port: int) -> bool:
    ends = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < ends:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return True
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    return False


def shardmill(work: Path, *words: object) -> tuple[int, str]:
    """The command of this checkout: the serving wheel on the servers' path has no judge."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(work / "site")])}
    program = "from shardmill.pipeline.commands.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        cwd=REPOSITORY,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def record(name: str, port: int, work: Path) -> str:
    """The runs of one server; what failed, in words."""
    said = ""
    for again in ("", "-again") if name in TWICE else ("",):
        words: list[object] = ["verify", "accept", "record", f"http://127.0.0.1:{port}"]
        words += [
            "-o",
            work / "accept" / "runs" / f"{name}{again}",
            "--tokens",
            work / "accept" / "tokens.json",
        ]
        words += ["--protocol", work / "accept" / "forward.toml", "--only", "score"]
        words += ["--checkpoint", work / "toys" / SERVERS[name][0]]
        rung = SERVERS[name][3]
        code, text = shardmill(work, *words, *(("--rung", rung) if rung else ()))
        said += f"{name}{again}: {code} {text[-400:]}\n"
    return said


def main(work: Path, out: Path) -> int:
    devices = os.environ.get("ACCEPT_DEVICES", "0").split(",")
    folder = work / "accept"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "forward.toml").write_text(protocol())
    leading = [str(work / part) for part in ("plugin", "site", "tree")]
    environ = environment(work, leading)
    ports = {name: PORT + index for index, name in enumerate(SERVERS)}
    servers = {
        name: start(name, port, work, environ, devices[index % len(devices)])
        for index, (name, port) in enumerate(ports.items())
    }
    try:
        with ThreadPoolExecutor(len(servers)) as pool:
            up = dict(zip(servers, pool.map(lambda n: wait(servers[n], ports[n]), servers), strict=True))
            print(f"servers up: {up}", flush=True)
            if not (running := [name for name in servers if up[name]]):
                print(f"no server came up; their logs lie in {folder}")
                return 1
            words = ["verify", "accept", "freeze", f"http://127.0.0.1:{ports[running[0]]}"]
            words += ["--protocol", str(folder / "forward.toml"), "-o", str(folder / "tokens.json")]
            print(*shardmill(work, *words), flush=True)
            for said in pool.map(lambda n: record(n, ports[n], work), running):
                print(said, flush=True)
    finally:
        for process in servers.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return judge(work, out)


def judge(work: Path, out: Path) -> int:
    """Both forms of every pair's verdict, into `out` and onto the screen. 1 where a pair could not be compared."""
    folder, runs = work / "accept", work / "accept" / "runs"

    def compared(pair: tuple[str, str]) -> tuple[int, str, str]:
        base, test = pair
        words: list[object] = ["verify", "accept", "compare", runs / base, runs / test]
        words += ["--noise", runs / f"{base}-again", "--tokens", folder / "tokens.json"]
        words += ["--protocol", folder / "forward.toml"]
        return *shardmill(work, *words), shardmill(work, *words, "--json")[1]

    with ThreadPoolExecutor(len(PAIRS)) as pool:
        verdicts = dict(zip(PAIRS, pool.map(compared, PAIRS), strict=True))
    for (base, test), (code, text, _) in verdicts.items():
        print(f"== {base} | {test}: exit code {code}\n{text}", flush=True)
    named = {f"{base} | {test}": found for (base, test), found in verdicts.items()}
    out.write_text(
        json.dumps({n: dict(zip(("code", "text", "json"), f, strict=True)) for n, f in named.items()})
    )
    return int(any(code > 1 for code, *_ in verdicts.values()))


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()))
