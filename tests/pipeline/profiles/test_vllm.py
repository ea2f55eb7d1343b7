"""The real vLLM 0.33.0, unpatched, loads children of six architectures under both stock profiles, bit for bit.

Part of `make vllm-test`; it needs vLLM, which makes the small models too. No card: a stub driver and a fake platform.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.profiles.small import MODELS, child, save

ROOT = Path(__file__).parents[3]
HARNESS = ROOT / "build" / "vllm-test"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM 0.33.0: make vllm-test"),
    pytest.mark.skipif(not (HARNESS / "libcuda.so.1").exists(), reason="needs the harness: make vllm-test"),
    pytest.mark.filterwarnings("ignore"),
]
# DeepSeek's and Kimi's attention, Qwen3-MoE's experts: parameters that hold codes, of all
HOLDS = {"llama": 8, "qwen3": 8, "qwen3_moe": 8, "deepseek_v3": 12, "glm4_moe": 10, "kimi_linear": 20}
KEPT = {"deepseek_v3": 2, "kimi_linear": 1}  # of these, under fp8: MLA's kv_a, whose rows end inside a block


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Child -> what vLLM holds of it; one process looks at all of them."""
    import transformers

    home = tmp_path_factory.mktemp("vllm")
    children = []
    for name in MODELS:
        if name in transformers.CONFIG_MAPPING:
            parent = save(name, home / name)
            children += [child(parent, home / f"{name}-{p}", p) for p in ("fp8", "compressed-tensors")]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(HARNESS),
        "PYTHONPATH": os.pathsep.join([str(HARNESS / "site"), str(ROOT)]),
        "VLLM_PLUGINS": "fake",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "FAKE_CC": "9,0",
    }
    words = [
        sys.executable,
        "-m",
        "tests.pipeline.profiles.vllm_probe",
        str(home / "report.json"),
        *map(str, children),
    ]
    ended = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert (home / "report.json").exists(), ended.stderr[-3000:]
    found: dict[str, Any] = json.loads((home / "report.json").read_text())
    return found


@pytest.mark.parametrize("profile", ["fp8", "compressed-tensors"])
@pytest.mark.parametrize("name", MODELS)
def test_stock_vllm_holds_every_bit_that_was_built(reports: dict[str, Any], name: str, profile: str) -> None:
    if f"{name}-{profile}" not in reports:
        pytest.skip("this transformers does not know the architecture")
    report = reports[f"{name}-{profile}"]
    assert "error" not in report, report["error"]
    assert (report["missing"], report["unmatched"], report["wrong"]) == ([], [], {})
    assert report["fp8"] == HOLDS[name] - (KEPT.get(name, 0) if profile == "fp8" else 0)
