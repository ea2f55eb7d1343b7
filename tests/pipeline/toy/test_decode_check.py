"""An independent script decodes a built toy and finds what each family lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from shardmill.pipeline.commands.main import shardmill
from shardmill.pipeline.container.header import read_header

SCRIPT = Path(__file__).with_name("decode_check.py")
ROOT = Path(__file__).parents[3]
# family: weights, lowest and highest relative error in percent
EXPECTED = {
    "vision": (124, 2.3, 2.7),
    "lm_head": (1, 2.3, 2.7),
    "o_proj": (46, 2.3, 2.7),
    "kda": (204, 2.3, 2.7),
    "mlp": (138, 0.1, 0.2),
    "mla": (36, 0.1, 0.2),
}


def built(recipe: str, parent: Path, out: Path) -> Path:
    arguments = [
        "build",
        "-c",
        str(ROOT / recipe),
        "--parent",
        str(parent),
        "--out",
        str(out),
        "--kernel",
        "numpy",
    ]
    result = CliRunner().invoke(shardmill, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def child(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every scale by amax/1."""
    return built("recipes/glm-5.3-flash-amax.toml", tiny, tmp_path_factory.mktemp("amax") / "out")


def test_recovered_families_decode_to_the_parents_bf16_and_lose_nothing(tiny: Path, tmp_path: Path) -> None:
    """The shipped recipe: 0 where the parent's BF16 is a copy of block FP8, 2.3 to 2.7 % elsewhere."""
    out = built("pipeline.toml", tiny, tmp_path / "out")
    command = [sys.executable, str(SCRIPT), str(tiny), str(out), "bf16"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {line.split()[0]: float(line.split()[3]) for line in lines}
    assert (found.pop("mlp"), found.pop("mla")) == (0.0, 0.0)
    assert all(2.3 <= percent <= 2.7 for percent in found.values())


def test_fresh_families_lose_two_and_a_half_percent_and_native_fp8_a_tenth_of_that(
    tiny: Path, child: Path
) -> None:
    """2.3 to 2.7 % where the weights never were FP8, 0.1 to 0.2 % where the BF16 is a copy of block FP8."""
    command = [sys.executable, str(SCRIPT), str(tiny), str(child)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {family: (int(count), float(percent)) for family, count, _, percent, _ in map(str.split, lines)}
    assert {family: count for family, (count, _) in found.items()} == {
        f: row[0] for f, row in EXPECTED.items()
    }
    for family, (_, low, high) in EXPECTED.items():
        assert low <= found[family][1] <= high, f"{family}: {found[family][1]} %"


def test_the_script_sees_a_scale_grid_that_is_off_by_a_percent(
    tiny: Path, child: Path, tmp_path: Path
) -> None:
    """So that its good word means something: every scale in one shard times 1.01, and MLA's error leaves its range."""
    for path in child.glob("*.safetensors"):
        copy = bytearray(path.read_bytes())
        header = read_header(path, path.name)
        for ref in header.tensors:
            if ref.name.endswith(".weight_scale_inv"):
                span = slice(header.data_begin + ref.begin, header.data_begin + ref.end)
                copy[span] = (np.frombuffer(copy[span], "<f4") * np.float32(1.01)).astype("<f4").tobytes()
        (tmp_path / path.name).write_bytes(copy)
    command = [sys.executable, str(SCRIPT), str(tiny), str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert next(float(line.split()[3]) for line in lines if line.startswith("mla")) > 0.9
