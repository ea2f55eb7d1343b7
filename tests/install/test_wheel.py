"""What `pip install` puts into site-packages."""

import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        return file.namelist()


def test_the_wheel_has_one_name_at_top_level(names: list[str]) -> None:
    """Nothing lies at the top level of site-packages but shardmill/ and its dist-info."""
    tops = {name.partition("/")[0] for name in names}
    assert {top.partition("-")[0] for top in tops} == {"shardmill"}
    assert sorted(top.endswith(".dist-info") for top in tops) == [False, True]


def test_the_wheel_carries_every_module_and_data_file(names: list[str]) -> None:
    """Every tracked Python file and every data file that code opens is in the wheel."""
    root = Path(__file__).parents[2]
    wanted = {
        f"shardmill/{path.relative_to(root)}"
        for top in ("pipeline", "kernels", "verify", "runtime_patch")
        for path in (root / top).rglob("*")
        if path.suffix in (".py", ".j2", ".css") or path.parent.name in ("presets", "protocols", "configs")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted |= {"shardmill/pipeline.toml"} | {
        f"shardmill/recipes/{each.name}" for each in root.glob("recipes/*.toml")
    }
    assert wanted - set(names) == set()
