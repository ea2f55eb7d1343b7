"""Clean checkpoints, changed in every place in turn: `python -m tests.verify.mutants` prints how many are found.

A mutant is killed if the question gives an error or a warning. With a manifest any changed byte must be found; without
one, whatever makes codes, scales, names and config disagree. Prints the kill rate by operator; below 100 % it exits 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import lint
from tests.verify.memory import Memory
from tests.verify.zoo.all import CASES, ask
from tests.verify.zoo.clean import CLEAN, mixed_child
from tests.verify.zoo.model import INDEX, MANIFEST, Blob, Model, bits, canonical, f32

Files = dict[str, bytes]
SCALES = ("weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "scale_weight")
FLOATS = {"F32": (b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\0\0", b"\0\0\x80\xbf")}  # NaN, inf, 0, -1


@dataclass(frozen=True)
class Mutant:
    operator: str
    what: str
    files: Files
    killed_by: Callable[[Memory], Any]


def files_of(model: Model) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def whole() -> Iterator[Mutant]:
    """Of the child with a manifest: any byte of any published file."""
    model = mixed_child()
    files = files_of(model)
    for file in sorted(files):
        yield _whole("file cut by a byte", file, {**files, file: files[file][:-1]})
        yield _whole("file grown by a byte", file, {**files, file: files[file] + b"\0"})
        if file != MANIFEST:  # without it structure alone is judged, and the report says so
            yield _whole("file removed", file, {k: v for k, v in files.items() if k != file})
        for n, at in enumerate(bits(file, 24).view("<u4") % len(files[file])):
            yield _whole(
                "bit flipped in a file", f"{file} at {at}", {**files, file: _flip(files[file], int(at), n)}
            )
    for name in model.names:
        yield _whole("bit flipped in a tensor", name, {**files, **_flipped(model, files, name)})
        yield _whole("tensor dropped, index kept", name, {**files, **_rewritten(model, name, None)})
        yield _whole(
            "tensor dropped, index too", name, {**files, **_rewritten(model, name, None, index=True)}
        )
        yield _whole("tensor renamed", name, {**files, **_rewritten(model, name, f"{name}_", index=True)})
    yield from _index_mutants(files)
    yield from _manifest_mutants(files)


def _whole(operator: str, what: str, files: Files) -> Mutant:
    return Mutant(operator, what, files, integrity)


def _flip(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit % 8]) + data[at + 1 :]


def _flipped(model: Model, files: Files, name: str) -> Files:
    file = next(file for file, shard in model.shards.items() if name in shard)
    data = files[file]
    begin = (
        8
        + int.from_bytes(data[:8], "little")
        + json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[name]["data_offsets"][0]
    )
    return {file: _flip(data, begin + len(model[name].data) // 2, len(name))}


def _rewritten(model: Model, name: str, to: str | None, index: bool = False) -> Files:
    """The shard (and the index) after a tensor was dropped or renamed; the manifest stays."""
    changed = model.copy()
    blob = changed.find(name)
    if to is None:
        del blob[name]
    else:
        blob[to] = blob.pop(name)
    changed.manifest = None
    files = files_of(changed)
    return {
        file: data
        for file, data in files.items()
        if file.endswith(".safetensors") or (index and file == INDEX)
    }


def _index_mutants(files: Files) -> Iterator[Mutant]:
    index = json.loads(files[INDEX])
    for name in index["weight_map"]:
        for operator, edit in (
            ("index entry dropped", lambda m, n: m.pop(n)),
            (
                "index entry to another file",
                lambda m, n: m.update(
                    {
                        n: "model-input-scales.safetensors"
                        if "input_scale" not in n
                        else "model-00001-of-00002.safetensors"
                    }
                ),
            ),
            ("index entry to no file", lambda m, n: m.update({n: "none.safetensors"})),
        ):
            changed = json.loads(files[INDEX])
            edit(changed["weight_map"], name)
            yield _whole(operator, name, {**files, INDEX: json.dumps(changed).encode()})


def _manifest_mutants(files: Files) -> Iterator[Mutant]:
    """Every leaf of the manifest: unsealed always; sealed again where the folder contradicts it."""
    import hashlib

    value = json.loads(files[MANIFEST])
    for path in _leaves(value):
        changed = json.loads(files[MANIFEST])
        _alter(changed, path)
        yield _whole(
            "manifest leaf, not sealed", ".".join(map(str, path)), {**files, MANIFEST: canonical(changed)}
        )
        if path[0] == "files" or (path[0] == "shards" and path[2] == "tensors"):
            changed.pop("self")
            changed["self"] = hashlib.sha256(canonical(changed)).hexdigest()
            yield _whole(
                "manifest leaf, sealed", ".".join(map(str, path)), {**files, MANIFEST: canonical(changed)}
            )


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, (dict, list)):
            yield from _leaves(item, (*path, key))
        else:
            yield (*path, key)


def _alter(value: Any, path: tuple[Any, ...]) -> None:
    for key in path[:-1]:
        value = value[key]
    old = value[path[-1]]
    if isinstance(old, bool) or old is None:
        value[path[-1]] = not old
    elif isinstance(old, int):
        value[path[-1]] = old + 1
    else:
        value[path[-1]] = ("1" if old[:1] != "1" else "2") + old[1:]


def meaning() -> Iterator[Mutant]:
    """Of each format, without a manifest: each scale and each weight of codes, harmed in each way."""
    for name, maker in CLEAN.items():
        clean = maker()
        clean.manifest = None
        for tensor in clean.names:
            leaf = tensor.rpartition(".")[2]
            blob = clean[tensor]
            if leaf in SCALES:
                yield from _scale_mutants(name, clean, tensor, blob)
            elif blob.dtype == "F8_E4M3" and leaf == "weight":
                yield _meant("NaN code", name, clean, tensor, lambda b: _set(b, len(b.data) // 3, b"\xff"))
                yield _meant("weight of codes dropped", name, clean, tensor, None)
            elif blob.dtype == "U8":
                yield _meant("packed weight dropped", name, clean, tensor, None)


def _scale_mutants(name: str, clean: Model, tensor: str, blob: Blob) -> Iterator[Mutant]:
    yield _meant("scale dropped", name, clean, tensor, None)
    for value in FLOATS.get(blob.dtype, ()):
        yield _meant(
            "scale NaN, infinite, zero or negative",
            name,
            clean,
            tensor,
            lambda b, v=value: _set(b, len(b.data) - 4, v),
        )
    if blob.dtype == "F8_E4M3":
        yield _meant("block scale NaN", name, clean, tensor, lambda b: _set(b, len(b.data) // 2, b"\x7f"))
        yield _meant("block scale negative", name, clean, tensor, lambda b: _set(b, 0, b"\xb8"))
    yield _meant("scale of another shape", name, clean, tensor, lambda b: _reshape(b))
    yield _meant("scale of another dtype", name, clean, tensor, lambda b: _retype(b))


def _set(blob: Blob, at: int, value: bytes) -> None:
    blob.data = blob.data[:at] + value + blob.data[at + len(value) :]


def _reshape(blob: Blob) -> None:
    grown = f32(1e-4, 101, 7)
    blob.dtype, blob.shape, blob.data = (
        blob.dtype,
        (101, 7),
        grown.data[: 707 * (4 if blob.dtype == "F32" else 1)],
    )


def _retype(blob: Blob) -> None:
    blob.dtype, blob.data = "I32", bytes(4 * max(len(blob.data) // (4 if blob.dtype == "F32" else 1), 1))


def _meant(
    operator: str, base: str, clean: Model, tensor: str, change: Callable[[Blob], None] | None
) -> Mutant:
    changed = clean.copy()
    if change is None:
        changed.drop(tensor)
    else:
        change(changed[tensor])
    return Mutant(
        operator, f"{base}: {tensor}", files_of(changed), lint if "code" not in operator else integrity
    )


def zoo() -> Iterator[tuple[str, str, bool]]:
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            case.write(Path(folder) / "c")
            found = {finding.slug for finding in ask(case.question, Path(folder) / "c").findings}
            yield "case of the zoo, by its rule", case.name, case.rule in found


Row = tuple[str, str, str, str, bool]  # form ("" of none), how, operator, what, killed


def verdicts(stride: int = 1) -> Iterator[tuple[str, str, bool]]:
    """(operator, what, killed) of every mutant without a form, or of each `stride`-th."""
    for _, _, operator, what, killed in _verdicts(stride, 0):
        yield operator, what, killed


def _verdicts(stride: int, first: int) -> Iterator[Row]:
    for maker in (whole, meaning):
        for number, mutant in enumerate(maker()):
            if number % stride == first:
                killed = mutant.killed_by(Memory(mutant.files)).exit_code == 1
                yield "", "", mutant.operator, mutant.what, killed
    if stride == 1:
        yield from (("", "", *row) for row in zoo())


def _verdicts_of_forms(stride: int, first: int, words: tuple[str, ...]) -> Iterator[Row]:
    from tests.verify.form_mutants import mutants as of_forms
    from tests.verify.other_mutants import mutants as of_others

    for maker in (of_forms, of_others):
        for number, mutant in enumerate(maker(words)):
            if number % stride == first:
                yield mutant.form, mutant.how, mutant.operator, mutant.what, mutant.killed()


def _part(asked: tuple[int, int, tuple[str, ...]]) -> list[Row]:
    """The share of one of several processes."""
    jobs, first, words = asked
    rows = [] if words else list(_verdicts(jobs, first))
    if not words and jobs > 1 and not first:
        rows += [("", "", *row) for row in zoo()]
    return rows + list(_verdicts_of_forms(jobs, first, words))


def _show_forms(rows: list[Row]) -> None:
    """The rate by form, alone and with the parent."""
    found: dict[str, dict[str, list[bool]]] = {}
    for form, how, operator, what, killed in rows:
        found.setdefault(form, {}).setdefault(how, []).append(killed)
        if not killed:
            print(f"    alive: {form}, {how}: {operator} ({what})")
    print(f"{'form':<42} {'alone':>12} {'with parent':>14}")
    for form, by_how in found.items():
        cells = [
            f"{sum(by_how.get(how, ())):>3} of {len(by_how.get(how, ())):>3}"
            for how in ("alone", "with parent")
        ]
        print(f"{form:<42} {cells[0]:>12} {cells[1]:>14}")
    print(f"forms: {sum(row[-1] for row in rows):,} of {len(rows):,} killed")


def _show_others(rows: list[Row]) -> None:
    by_operator: dict[str, list[Row]] = {}
    for row in rows:
        by_operator.setdefault(row[2], []).append(row)
    for operator, members in by_operator.items():
        alive = [what for *_, what, killed in members if not killed]
        print(f"{operator:<42} {len(members) - len(alive):>6,} of {len(members):>6,}")
        for what in alive[:5]:
            print(f"    alive: {what}")


def main() -> int:
    """`--jobs N` spreads them over N processes; words take only the forms whose names begin so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument(
        "forms", nargs="*", help="beginnings of forms' names; all mutants where none is given"
    )
    asked = parser.parse_args()
    words, jobs = tuple(asked.forms), max(asked.jobs, 1)
    parts = [(jobs, first, words) for first in range(jobs)]
    if jobs == 1:
        rows = _part(parts[0])
    else:
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            rows = [row for part in pool.imap_unordered(_part, parts) for row in part]
    rows.sort(key=lambda row: row[:2])
    _show_others([row for row in rows if not row[0]])
    _show_forms([row for row in rows if row[0]])
    killed = sum(row[-1] for row in rows)
    print(f"kill rate: {killed / max(len(rows), 1):.2%} ({killed:,} of {len(rows):,})")
    return 0 if killed == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
