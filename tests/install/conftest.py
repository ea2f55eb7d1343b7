"""The wheels that a user installs, built once a session from the sources at hand."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build_wheel(source: Path, folder: Path) -> Path:
    """The wheel of the project in `source`, built without a network from a copy, so that no build folder is left."""
    words = ["pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, "-m", *words, "--wheel-dir", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of shardmill."""
    pytest.importorskip("setuptools", reason="a wheel is built with setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "pipeline.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("pipeline", "kernels", "verify", "runtime_patch", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT / "src",
        folder / "src",
        symlinks=True,
        ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"),
    )
    return build_wheel(folder, folder / "dist")
