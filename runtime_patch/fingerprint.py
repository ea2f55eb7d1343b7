"""Fingerprints of functions and classes in an installed package, read from its files without importing it.

The serving machine's vLLM is the one that was read and tried only if the code we lean on is the same. A
fingerprint is the first 16 hex digits of the sha256 of a definition's abstract syntax tree, so that comments and
blank lines may change and behaviour may not. Docstrings count as comments.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from functools import cache
from pathlib import Path

DIGITS = 16


def package_root(package: str) -> Path | None:
    """The folder of an installed package, or None. Does not import it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def fingerprint(root: Path, target: str) -> str | None:
    """Fingerprint of `target`, "path/module.py:Class.method" below `root`; None where it does not exist."""
    path, _, dotted = target.partition(":")
    file = root / path
    if not file.is_file():
        return None
    node = _find(_tree(file), dotted.split("."))
    return None if node is None else _digest(node)


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _find(tree: ast.AST, names: list[str]) -> ast.AST | None:
    """The definition reached by `names`: classes and functions by name, module constants by their target."""
    node: ast.AST | None = tree
    for name in names:
        node = next((child for child in getattr(node, "body", []) if name in _defined(child)), None)
    return node


def _defined(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


def _digest(node: ast.AST) -> str:
    """sha256 of the dump of `node` without docstrings. `ast.dump` leaves positions and comments out.

    The dump differs between Python versions where the grammar's fields do, so only fields that hold something
    are dumped, and `type_params` (3.12) is empty everywhere in vLLM.
    """
    return hashlib.sha256(_dump(node).encode()).hexdigest()[:DIGITS]


def _dump(value: object) -> str:
    if isinstance(value, ast.AST):
        fields = [(name, field) for name, field in ast.iter_fields(value) if field not in (None, [])]
        body = "".join(f"{name}={_dump(_without_docstring(value, name, field))};" for name, field in fields)
        return f"{type(value).__name__}({body})"
    if isinstance(value, list):
        return "[" + ",".join(map(_dump, value)) + "]"
    return repr(value)


def _without_docstring(owner: ast.AST, name: str, field: object) -> object:
    documented = isinstance(owner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    if not (documented and name == "body" and isinstance(field, list)):
        return field
    first = field[0]
    is_docstring = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    return field[1:] if is_docstring else field
