"""Style that a machine can hold: short functions, no circles, numbers born once, plain words, prose of one width."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.test_import_ladder import ROOT, imports, modules

FUNCTION_LINES_MAX = 50
LONGER = {  # function -> why it may be longer
    "shardmill.kernels.block_gemm.gemm": "one literal call that launches a kernel with all its sizes",
    "shardmill.pipeline.plan.plan.make_plan": "the plan's steps in their order, read from top to bottom",
    "shardmill.pipeline.stages.dag.arrange": "one graph algorithm with its refusals",
    "shardmill.pipeline.toy.config._text": "a literal table of config.json",
    "shardmill.verify.fit.commands.fit": "a command with an option a line",
    "shardmill.kernels.triton_gemm.stock_kernel": "a GPU kernel is one function",
    "shardmill.kernels.triton_gemm.gemv_kernel": "a GPU kernel is one function",
    "shardmill.kernels.triton_gemm.decode_kernel": "a GPU kernel is one function",
}
NUMBERS = {  # a number of a format -> the modules that may spell it
    448: (
        "kernels.formats",
        "kernels.kv_row",
        "kernels.recover",
        "kernels.triton_",
        "kernels.testing",
        "pipeline.toy.",
        "verify.formats.",
    ),
    656: ("kernels.kv_row", "verify.fit.preset", "verify.fit.scratch"),  # the judge keeps a copy of its own,
}
WORDS = ("deed", "settle", "settles", "shadow", "homeless", "mend", "mends", "told", "world", "lane", "lanes")
OF_THE_FIELD = {"kernels/": {"lane", "lanes"}}  # a lane of a GPU's warp is the field's own word
PROSE_WIDTH_MAX = 120


# vLLM calls the plugin's parts, and only then is the plugin known to be needed: they call it back.
CALLED_BACK = "runtime_patch.plugin"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions() -> Iterator[tuple[str, int]]:
    for module, path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"shardmill.{module}.{node.name}", (node.end_lineno or 0) - node.lineno + 1


def test_functions_are_short() -> None:
    """No function has more than 50 lines, but those that the table excuses."""
    longer = {name for name, lines in functions() if lines > FUNCTION_LINES_MAX}
    assert longer == set(LONGER)


def for_types_alone(path: Path) -> set[str]:
    """Modules that are imported under `if TYPE_CHECKING`, which is no import when the code runs."""
    return {
        str(node.module).removeprefix("shardmill.")
        for block in ast.walk(tree(path))
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Imports inside functions count: they hide a circle, they don't break it."""
    known = dict(modules())
    known |= {f"bench.{path.stem}": path for path in (ROOT / "bench").glob("*.py")}
    graph = {
        module: {
            name
            for each in imports(path, module)
            if (name := each.removeprefix("shardmill.")) in known
            and name not in {module, CALLED_BACK, *for_types_alone(path)}
        }
        for module, path in known.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports form a cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_of_a_format_is_born_once(number: int) -> None:
    """Elsewhere it has a name, which says where it comes from."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for module, path in modules()
        if not module.startswith(NUMBERS[number])
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value == number
    ]
    assert found == []


def sentences() -> Iterator[tuple[str, str]]:
    """Everything that a user or reader may see: strings and docstrings of the code, lines of the pages."""
    for _, path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    for path in pages():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_no_sentence_needs_a_glossary() -> None:
    """Words that only this project used, or used in a sense of its own, don't come back."""
    banned = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
    found = [
        (place, match[0])
        for place, text in sentences()
        if "--lane" not in text  # the old name of --preset, for one more release
        for match in banned.finditer(text)
        if not any(place.startswith(top) and match[0] in words for top, words in OF_THE_FIELD.items())
    ]
    assert found == []


def test_prose_has_one_width() -> None:
    """Tables, links and code apart, no line of a page is wider than the limit."""
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in pages()
        if path.name != "BENCHMARKS.md"  # bench.write writes it
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > PROSE_WIDTH_MAX
        and not line.startswith("    ")
        and not line.lstrip().startswith(("|", "<", "["))
    ]
    assert wide == []


TESTS_WITH_A_SENTENCE = {"kernels": 0.51, "pipeline": 0.45, "verify": 0.11, "runtime_patch": 0.96}


@pytest.mark.parametrize("folder", TESTS_WITH_A_SENTENCE)
def test_tests_read_as_a_specification(folder: str) -> None:
    """The share of tests with a docstring, one sentence of the specification each, never falls."""
    tests = [
        ast.get_docstring(node) is not None
        for path in (ROOT / "tests" / folder).rglob("test_*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert sum(tests) / len(tests) >= TESTS_WITH_A_SENTENCE[folder]
