"""Files beside the weights: each is what its name says, whole, and what others of the folder ask for.

A download that went wrong leaves a Git LFS pointer, an error page, an empty or a cut file; each is named as what it is.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.bounded_json import BadJsonError
from shardmill.verify.reading.checkpoint import INDEX, SUFFIX, Checkpoint
from shardmill.verify.reading.header import LENGTH_BYTES, header_length, parse_header
from shardmill.verify.reading.manifest import MANIFEST
from shardmill.verify.reading.source import read
from shardmill.verify.reading.what_it_is import HEAD_BYTES, what_it_is
from shardmill.verify.rules.findings import Finding, Report, UnreadableError

FILES_MAX = 3_000  # beside the weights; a checkpoint has a few dozen
READ_ELSEWHERE = (INDEX, MANIFEST, "config.json", "hf_quant_config.json")
MAY_BE_EMPTY = ("__init__.py", "added_tokens.json", ".nojekyll", "py.typed")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle")
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "merges.txt",
)
_MARKED = (".html", ".htm", ".xml", ".svg", ".md", ".rst")
IDS = ("eos_token_id", "bos_token_id", "pad_token_id")


def side_faults(checkpoint: Checkpoint, report: Report) -> Iterator[Finding]:
    """Looks at the first bytes of every side file, and reads JSON and nested headers whole; of a folder alone."""
    if checkpoint.source.remote:
        report.leaves_out("side files", "of a remote place")
        return
    report.checks("side files")
    left = FILES_MAX
    values: dict[str, Any] = {}
    for file, size in checkpoint.files.items():
        if (
            file in checkpoint.headers
            or file in READ_ELSEWHERE
            or (file.endswith(SUFFIX) and "/" not in file)
        ):
            continue
        left -= 1
        if left < 0:
            report.leaves_out("some side files", f"more than {FILES_MAX:,} of them")
            break
        yield from _one(checkpoint, file, size, values)
    yield from _second_index(checkpoint)
    yield from _alike(checkpoint)
    yield from _submodules(checkpoint, values.get("modules.json"))
    yield from _tokens(checkpoint, values)


def _one(checkpoint: Checkpoint, file: str, size: int, values: dict[str, Any]) -> Iterator[Finding]:
    leaf = file.rpartition("/")[2]
    if not size:
        if leaf not in MAY_BE_EMPTY:
            yield Finding("empty-file", file, "", "a file with content", "0 bytes")
        return
    try:
        head = read(checkpoint.source, file, 0, min(size, HEAD_BYTES))
        what = what_it_is(head)
        if what.startswith("a Git LFS") or (what.endswith("page") and not leaf.endswith(_MARKED)):
            yield Finding("not-the-file", file, "", "the file itself", what)
        elif file.endswith(SUFFIX):
            yield from _nested_header(checkpoint, file, size)
        elif file.endswith(".json"):
            yield from _json(checkpoint, file, size, values)
        elif leaf.endswith(PICKLES) and what in ("a pickle", "a zip archive, such as torch.save writes"):
            yield Finding("pickle-beside", file, "", "safetensors alone", what)
    except UnreadableError as error:
        yield error.finding


def _nested_header(checkpoint: Checkpoint, file: str, size: int) -> Iterator[Finding]:
    length = header_length(file, read(checkpoint.source, file, 0, min(LENGTH_BYTES, size)), size)
    header = parse_header(file, read(checkpoint.source, file, LENGTH_BYTES, LENGTH_BYTES + length), size)
    if file not in checkpoint.headers:
        checkpoint.nested[file] = header
    yield from header.findings


def _json(checkpoint: Checkpoint, file: str, size: int, values: dict[str, Any]) -> Iterator[Finding]:
    if size > bounded_json.BYTES_MAX:
        return
    try:
        value = bounded_json.loads(read(checkpoint.source, file, 0, size), values_max=SIDE_VALUES_MAX)
        if "/" not in file:
            values[file] = value
    except BadJsonError as error:
        yield Finding("config-json", file, "", "JSON", str(error))


_INDEX = re.compile(r"^[^/]*\.safetensors\.index(\.[\w-]+)?\.json$")  # of a variant too: .index.fp8.json
SIDE_VALUES_MAX = 4_000_000  # a tokenizer.json of 250,000 words and as many merges has 1,100,000


def _alike(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Files equal but for case or Unicode form: on many file systems one of them takes the other's place."""
    seen: dict[str, str] = {}
    for file in checkpoint.files:
        folded = file.lower() if file.isascii() else unicodedata.normalize("NFKC", file).casefold()
        other = seen.setdefault(folded, file)
        if other != file:
            yield Finding("names-alike", file, "", "names that differ in more than case or form", other)


def _second_index(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A further index names files that are here, as a variant's does; else it is left from an older save."""
    used = checkpoint.index.file if checkpoint.index is not None else ""
    for file, size in checkpoint.files.items():
        if not _INDEX.search(file) or file == used:
            continue
        try:
            value = bounded_json.loads(read(checkpoint.source, file, 0, size))
            named = set(value["weight_map"].values())
        except (BadJsonError, UnreadableError, KeyError, TypeError, AttributeError):
            yield Finding("stale-index", file, "", "an index, or no such file", "no weight_map")
            continue
        lost = sorted(str(name) for name in named if name not in checkpoint.files)
        if lost:
            yield Finding(
                "stale-index",
                file,
                "",
                "an index of files that are here",
                f"{len(lost):,} absent, such as {lost[0]}",
            )


def _submodules(checkpoint: Checkpoint, modules: Any) -> Iterator[Finding]:
    """sentence-transformers: modules.json names folders; those with weights or settings must be there."""
    for row in modules if isinstance(modules, list) else ():
        path, kind = (row.get("path"), row.get("type")) if isinstance(row, dict) else (None, None)
        if not isinstance(path, str) or not path or str(kind).endswith("Normalize"):
            continue
        inside = [file for file in checkpoint.files if file.startswith(f"{path.rstrip('/')}/")]
        weights = any(file.endswith((SUFFIX, ".bin")) for file in inside)
        if not inside or (str(kind).endswith("Dense") and not weights):
            got = "no such folder" if not inside else "no weights in it"
            yield Finding("submodule-missing", "modules.json", path, "the folder that it names", got)


def _tokens(checkpoint: Checkpoint, values: dict[str, Any]) -> Iterator[Finding]:
    if "tokenizer_config.json" in checkpoint.files and not any(
        file in checkpoint.files for file in TOKENIZERS
    ):
        custom = any(
            file.endswith((".py", ".tiktoken", ".model", ".spm", ".bpe")) for file in checkpoint.files
        )
        if not custom:
            yield Finding(
                "tokenizer-missing",
                "tokenizer.json",
                "",
                "the tokenizer that tokenizer_config.json is of",
                "none",
            )
    rows = max(
        (t.shape[0] for n, t in checkpoint.tensors.items() if _is_embedding(n) and len(t.shape) == 2),
        default=0,
    )
    if not rows:
        return
    for file, place in (
        ("config.json", checkpoint.config),
        ("generation_config.json", values.get("generation_config.json")),
    ):
        for key, number in _ids(place):
            if number >= rows:
                slug = "token-idle" if _idle(checkpoint, values, key) else "token-range"
                yield Finding(slug, file, key, f"below {rows:,}, the embedding's rows", f"{number:,}")
    words = _largest_word(values.get("tokenizer.json"))
    if words >= rows:
        yield Finding(
            "token-range", "tokenizer.json", "", f"ids below {rows:,}, the embedding's rows", f"{words:,}"
        )


def _idle(checkpoint: Checkpoint, values: dict[str, Any], key: str) -> bool:
    """Whether no tokenizer here has this token, nor chats: a default that transformers writes, and nothing reads."""
    word = key.removesuffix("_id")
    tables = [values.get(file) for file in ("tokenizer_config.json", "special_tokens_map.json")]
    known = [table for table in tables if isinstance(table, dict)]
    chats = "chat_template.jinja" in checkpoint.files
    if chats or any(table.get(each) is not None for table in known for each in (word, "chat_template")):
        return False
    return bool(known) or not any(file in checkpoint.files for file in TOKENIZERS)


def _is_embedding(name: str) -> bool:
    return name.endswith(
        ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
    )


def _ids(place: Any) -> Iterator[tuple[str, int]]:
    for key in IDS if isinstance(place, dict) else ():
        value = place.get(key)
        for number in value if isinstance(value, list) else [value]:
            if type(number) is int:
                yield key, number


def _largest_word(tokenizer: Any) -> int:
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    words = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(words, dict):
        return max((number for number in words.values() if type(number) is int), default=-1)
    return len(words) - 1 if isinstance(words, list) else -1
