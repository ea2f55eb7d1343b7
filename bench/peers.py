"""The same work done by peers, in turns with ours: llm-compressor's model_free_ptq and a hand-written torch loop.

    python -m bench.peers --python .venv-peers/bin/python [--rounds 3] [--work DIR] [--json FILE]

The peers run in a virtual environment of their own, on the CPU, each as its documentation says. llm-compressor is
told to ignore what our recipe keeps; it writes blocks of 128 everywhere, since it has no [32,32], and BF16 scales.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.build import build_seconds, clean, in_turns, kernels, machine, options, tell, toy, warm
from shardmill.pipeline.recipe.read import load
from shardmill.pipeline.run.prepare import prepare

RECIPE = Path(__file__).resolve().parents[1] / "pipeline.toml"

LLM_COMPRESSOR = """
import json, sys
from llmcompressor import model_free_ptq
parent, out, ignore = sys.argv[1], sys.argv[2], json.load(open(sys.argv[3]))
model_free_ptq(model_stub=parent, save_directory=out, scheme="FP8_BLOCK", ignore=ignore["ignore"], device="cpu")
"""

TORCH_LOOP = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file

def quantize(weight, rows, cols):
    R, C = weight.shape
    blocks = weight.float().view(R // rows, rows, C // cols, cols)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448.0
    codes = (blocks / torch.where(scales > 0, scales, 1.0)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(R, C), scales.view(R // rows, C // cols).contiguous()

parent, out, converted = Path(sys.argv[1]), Path(sys.argv[2]), json.load(open(sys.argv[3]))["blocks"]
out.mkdir()
for path in sorted(parent.glob("*.safetensors")):
    tensors = load_file(path)
    for name in [name for name in tensors if name in converted]:
        tensors[name], tensors[name + "_scale_inv"] = quantize(tensors[name], *converted[name])
    save_file(tensors, out / path.name, {"format": "pt"})
"""


def peer_seconds(python: Path, script: str, parent: Path, out: Path, facts: Path) -> float:
    """Seconds of a peer's script, its start included and a sync behind it, as our own builds are timed.

    Its threads are pinned, a core each, as ours are.
    """
    clean(out)
    cores = " ".join(map(str, sorted(os.sched_getaffinity(0))))
    started = time.perf_counter()
    subprocess.run(
        [str(python), "-c", script, str(parent), str(out), str(facts)],
        check=True,
        capture_output=True,
        env={**os.environ, "GOMP_CPU_AFFINITY": cores},
    )
    os.sync()
    return time.perf_counter() - started


def what_converts(parent: Path, path: Path) -> None:
    """Tells the peers what our recipe converts, and which modules it keeps."""
    plan = prepare(load(RECIPE), parent).plan
    converted = {
        name: [action.block.rows, action.block.cols] for name, (_, action) in plan.conversions.items()
    }
    kept = [name for name in plan.weight_map if name.endswith(".weight") and name not in converted]
    modules = [name.removesuffix(".weight") for name in kept]
    path.write_text(json.dumps({"blocks": converted, "ignore": modules}))


def main() -> int:
    parser = options(__doc__, "peers.json", rounds=3)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--size", default="small")
    asked = parser.parse_args()
    work = asked.work
    python = asked.python.absolute()
    parent, out, facts = toy(work, asked.size), work / "peer-out", work / "converts.json"
    what_converts(parent, facts)
    warm(parent)
    contenders: dict[str, Callable[[], float]] = {}
    for kernel in kernels():
        contenders[kernel] = partial(build_seconds, parent, out, "--kernel", kernel)
        contenders[f"{kernel}, no sha256"] = partial(
            build_seconds, parent, out, "--kernel", kernel, "--no-sha256"
        )
    contenders["torch loop"] = lambda: peer_seconds(python, TORCH_LOOP, parent, out, facts)
    contenders["llm-compressor"] = lambda: peer_seconds(python, LLM_COMPRESSOR, parent, out, facts)
    seconds = in_turns(asked.rounds, contenders)
    clean(out)
    names = ("torch", "safetensors", "llmcompressor")
    versions = f"from importlib.metadata import version; print(*map(version, {names}))"
    told = subprocess.run(
        [str(python), "-c", versions], capture_output=True, text=True, check=True
    ).stdout.split()
    result = {
        "machine": machine(),
        "seconds": seconds,
        "peers": dict(zip(names, told, strict=True)),
    }
    tell(result, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
