"""Which room may import which, and why. The table is the law; a fault is told with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("kernels", "pipeline", "verify", "runtime_patch")
HEAVY = (
    "torch",
    "numba",
    "triton",
    "dask",
    "distributed",
    "click",
    "rich",
    "vllm",
    "huggingface_hub",
    "matplotlib",
)

# Rooms are written without `shardmill.`; those of the pipeline without its name in the second column.
# room -> what of ours it may import | which heavy packages | why no more. `room.*` is a package with all in it.
# The first row that a module fits holds; a room may always import itself, a stage nothing but itself.
LADDER = """
kernels.*           | -                | torch numba triton | it knows numbers, not models: no files, names or hashes
pipeline.errors     | -                | - | everything stands on it
pipeline.types      | errors           | - | planning needs no arrays: the standard library alone
pipeline.formats.*  | kernels errors types | - | a format is numbers and names; it opens no file and knows no model
pipeline.plan.sources | errors types   | - | it finds a parent's tensors by their names alone
pipeline.actions    | errors types plan.sources formats | - | metadata: no file, no recipe
pipeline.recipe.shipped | -              | - | it finds the files that come with the package
pipeline.recipe.*   | errors types actions container.regular | - | it reads TOML alone; names are opaque
pipeline.container.* | errors types    | huggingface_hub | bytes in and out: numbers are opaque
pipeline.manifest.* | errors types container.atomic container.filesystem container.regular | - | a record needs no maker
pipeline.plan.types | errors types actions | - | the plan's facts know neither recipe nor file
pipeline.plan.*     | errors types formats actions recipe container.header container.card manifest.digest | - | pure
pipeline.stages.dag | errors           | - | it orders stages and knows none of them
pipeline.stages     | stages           | - | the table names the stages and does no work
pipeline.stages.converting.* | {stage} | - | the parts of one stage; they know no other
pipeline.stages.*   | {stage}          | - | stages meet only in plan and run; no dask, no click
pipeline.toy.*      | kernels errors types container | - | it only makes parents
pipeline.run.schedule | kernels pipeline | dask distributed | it schedules: the only room that knows a cluster
pipeline.run.*      | kernels errors types actions recipe container manifest plan stages | - | click stays in commands
pipeline.delta.*    | errors types container manifest run.digests stages.job | - | it joins bytes and builds nothing
pipeline.publish.*  | errors types container manifest delta.child run.digests | huggingface_hub | it builds nothing
pipeline.stream.*   | errors types container manifest plan stages run publish | - | it builds into a hub
pipeline.init.*     | errors types formats actions recipe container plan stages | - | it drafts a recipe, builds nothing
pipeline.commands.* | kernels pipeline verify runtime_patch | {commands} | it parses and prints
verify.report.*     | kernels verify pipeline | matplotlib | it shows what pipeline and judge found
verify.commands.report | kernels pipeline verify | click rich | it parses and prints
verify.*            | kernels.formats  | {judge} | the judge shares only the table of formats
runtime_patch.*     | kernels          | torch triton vllm click | the serving image carries neither pipeline nor verify
""".format(
    stage="kernels errors types formats actions recipe container manifest.digest manifest.records plan.profiles "
    "plan.mismatch plan.types plan.sources plan.indented stages.job stages.dag stages.pairs stages.origins "
    "stages.exact stages.census stages.converting manifest.lock",
    commands="click rich torch huggingface_hub",
    judge="click rich torch matplotlib huggingface_hub",
)
ROOMS = [[cell.strip() for cell in row.split("|")] for row in LADDER.strip().splitlines()]


def modules() -> Iterator[tuple[str, Path]]:
    for top in OURS:
        for path in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield name, path


def imports(path: Path, module: str) -> Iterator[str]:
    """Every module that is imported, at the top or in a function; `from a import b` counts as a.b where that is one."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                inner = origin.removeprefix("shardmill.").replace(".", "/") + "/" + alias.name
                is_module = (ROOT / f"{inner}.py").exists() or (ROOT / inner).is_dir()
                yield f"{origin}.{alias.name}" if is_module else origin


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def fault(module: str, imported: str) -> str | None:
    """Why `module` may not import `imported`; None where it may."""
    top = imported.partition(".")[0]
    if top not in (*OURS, *HEAVY):
        return None
    room, ours, heavy, reason = next(
        row for row in ROOMS if module == row[0] or (row[0].endswith(".*") and within(module, row[0][:-2]))
    )
    own = module if room == "pipeline.stages.*" else room.removesuffix(".*")
    allowed = heavy.split() if top in HEAVY else [own, *map(full_name, ours.split())]
    if any(within(imported, each) for each in allowed):
        return None
    return f"{module} imports {imported}, but {reason}"


def full_name(room: str) -> str:
    """Rooms of the pipeline are written without its name."""
    return room if room.partition(".")[0] in OURS else f"pipeline.{room}"


@pytest.mark.parametrize("top", OURS)
def test_every_module_imports_only_what_its_folder_may(top: str) -> None:
    found = [
        told
        for module, path in modules()
        if module.partition(".")[0] == top
        for imported in (each.removeprefix("shardmill.") for each in imports(path, module))
        if (told := fault(module, imported))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("kernels.formats", "pipeline.types"),
        ("pipeline.stages.scales", "pipeline.stages.quantize"),
        ("pipeline.stages.scan", "dask"),
        ("pipeline.run.build", "distributed"),
        ("pipeline.plan.plan", "pipeline.run.build"),
        ("pipeline.types", "kernels.formats"),
        ("pipeline.manifest.store", "pipeline.container.header"),
        ("verify.questions.integrity", "pipeline.container.header"),
        ("verify.questions.integrity", "kernels.block_fp8"),
        ("runtime_patch.plugin", "verify.rules.findings"),
        ("pipeline.toy.write", "click"),
    ],
)
def test_the_ladder_has_no_missing_rung(module: str, imported: str) -> None:
    """The imports that matter most are refused, each with its reason."""
    assert fault(module, imported)


def test_the_command_starts_without_heavy_imports() -> None:
    """`shardmill --help` imports neither numpy nor dask: only click and the standard library's parts."""
    import subprocess
    import sys

    heavy = (*HEAVY[:5], *HEAVY[7:], "numpy", "pydantic", "safetensors")
    code = f"import sys, shardmill.pipeline.commands.main; print([name for name in {heavy!r} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
