"""Settings and side files against the parent's: what makes the same weights another model.

Rope, heads, special tokens, the tokenizer's words and the chat template are the parent's own. Of a child with our
manifest every setting but the declared quantization must be; another tool writes settings in its own words, so that of
its child only those are compared that both state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardmill.verify.questions.companions import native_layout
from shardmill.verify.reading import bounded_json
from shardmill.verify.reading.bounded_json import BadJsonError
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.manifest import MANIFEST
from shardmill.verify.reading.source import read
from shardmill.verify.rules.findings import Finding, Report, UnreadableError

# Settings that a conversion writes anew, or that say nothing of the model.
FREE = frozenset(
    (
        *(
            "quantization_config",
            "compression_config",
            "torch_dtype",
            "dtype",
            "transformers_version",
            "use_cache",
        ),
        *("_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset"),
    )
)
# Settings that a parent states and a child may not lose, in a flat config.
KEPT = (
    *(
        "num_key_value_heads",
        "head_dim",
        "tie_word_embeddings",
        "sliding_window",
        "eos_token_id",
        "bos_token_id",
    ),
    *("num_experts_per_tok", "routed_scaling_factor", "norm_topk_prob", "scoring_func", "attention_bias"),
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "modules.json",
)
# What a build writes itself, and what a publisher adds afterwards: a card, a licence, a signature.
WRITTEN = frozenset(
    (
        *("config.json", "hf_quant_config.json", MANIFEST, "README.md", "model.sig"),
        *("provenance.intoto.json", "provenance.intoto.jsonl", "LICENSE", "NOTICE"),
    )
)
WEIGHTS_OR_INDEX = (".safetensors", ".safetensors.index.json")
SMALL_BYTES_MAX = 4 << 20  # of files that are no tokenizer's; of a larger one the size alone is compared
TOKENS = ("eos_token", "bos_token", "pad_token", "unk_token")
IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
BYTES_MAX = 48 << 20
DEPTH_MAX = 20


def beside_parent(child: Checkpoint, parent: Checkpoint, report: Report) -> Iterator[Finding]:
    """Faults of config and side files; what could not be compared is left out by name."""
    strict = child.manifest is not None
    if native_layout(child, parent):
        report.leaves_out(
            "settings, tokenizer and template beside the parent's", "Mistral's layout has its own"
        )
        return
    if child.config and parent.config:
        free = {"tie_word_embeddings"} if not strict and ties_head(child, parent) else set[str]()
        yield from _settings(child.config, parent.config, strict, free)
    report.checks("settings, tokenizer and template beside the parent's")
    unlisted = [each.source.where for each in (child, parent) if not each.source.listed]
    for file in (*TOKENIZERS, *PROCESSORS, "generation_config.json", "tokenizer_config.json"):
        if unlisted and (file in child.files) != (file in parent.files):
            report.leaves_out(file, f"{unlisted[0]} has no list of its files")
        elif file in parent.files:
            yield from _file(child, parent, file, report)
    if strict and not unlisted:
        yield from _carried(child, parent)
    if unlisted:
        report.leaves_out("the chat template beside the parent's", f"{unlisted[0]} has no list of its files")
    else:
        yield from _template(child, parent)


def ties_head(child: Checkpoint, parent: Checkpoint) -> bool:
    """Whether the child has no head and says so, where the parent has one: `head-tied` tells of it."""
    if any(name.endswith("lm_head.weight") for name in child.tensors):
        return False
    says = [each.config.get("tie_word_embeddings") for each in (child, parent)]
    return says[0] is True and any(name.endswith("lm_head.weight") for name in parent.tensors)


def _settings(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], strict: bool, free: set[str]
) -> Iterator[Finding]:
    for path, a, b in _differences(ours, theirs, "", strict, DEPTH_MAX):
        if path not in free and not _same_rope(path, ours, theirs):
            yield Finding("parent-config", "config.json", path, _brief(b), _brief(a))
    if not strict and _rope(ours) != _rope(theirs) and None not in (_rope(ours), _rope(theirs)):
        yield Finding("parent-config", "config.json", "rope_theta", repr(_rope(theirs)), repr(_rope(ours)))


def _differences(
    ours: Any, theirs: Any, path: str, strict: bool, depth: int
) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping) and depth:
        keys = (
            ours.keys() | theirs.keys()
            if strict
            else (ours.keys() & theirs.keys()) | (theirs.keys() & set(KEPT))
        )
        for key in sorted(keys - FREE):
            a, b = ours.get(key, _ABSENT), theirs.get(key, _ABSENT)
            yield from _differences(a, b, f"{path}.{key}" if path else key, strict, depth - 1)
    elif not _equal(ours, theirs):
        yield path, ours, theirs


def _equal(ours: Any, theirs: Any) -> bool:
    """NaN is itself here, and null is as good as absent."""
    if {ours is None or ours is _ABSENT, theirs is None or theirs is _ABSENT} == {True}:
        return True
    return bool(ours == theirs or (ours != ours and theirs != theirs))


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _rope(config: Mapping[str, Any]) -> Any:
    """The base of the rotary embedding, where a config states one number, in the words of either generation."""
    text = config.get("text_config")
    place = text if isinstance(text, Mapping) else config
    parameters = place.get("rope_parameters")
    inner = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    return place.get("rope_theta", inner)


def _same_rope(path: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return path.rpartition(".")[2] == "rope_theta" and _rope(ours) == _rope(theirs) is not None


def _brief(value: Any) -> str:
    if isinstance(value, (dict, list)) and len(value) > 4:
        return f"{type(value).__name__} of {len(value):,}"
    return repr(value)


def _file(child: Checkpoint, parent: Checkpoint, file: str, report: Report) -> Iterator[Finding]:
    if file not in child.files:
        if (
            file in TOKENIZERS and not any(other in child.files for other in TOKENIZERS)
        ) or child.manifest is not None:
            yield Finding("parent-side-file", file, "", "the parent's file", "none")
        return
    if max(child.files[file], parent.files[file]) > BYTES_MAX:
        report.leaves_out(file, f"larger than {BYTES_MAX:,} bytes")
        return
    ours, theirs = _bytes(child, file), _bytes(parent, file)
    if ours == theirs or None in (ours, theirs):
        return
    assert ours is not None
    assert theirs is not None
    said = _unlike(file, ours, theirs) if child.manifest is None else "other bytes"
    if said:
        yield Finding("parent-side-file", file, "", "as the parent's", said)


def _carried(child: Checkpoint, parent: Checkpoint) -> Iterator[Finding]:
    """Side files of a child with our manifest: each is the parent's, but for those that a build writes itself."""
    of_loaders = {*TOKENIZERS, *PROCESSORS, "generation_config.json", "tokenizer_config.json"}
    for file, size in child.files.items():
        if file in of_loaders or file in WRITTEN or file in child.headers or file.endswith(WEIGHTS_OR_INDEX):
            continue
        if file not in parent.files:
            yield Finding("parent-side-file", file, "", "a file of the parent", "one that the parent lacks")
        elif size != parent.files[file]:
            got = f"{size:,} bytes, the parent's has {parent.files[file]:,}"
            yield Finding("parent-side-file", file, "", "the parent's file", got)
        elif size <= SMALL_BYTES_MAX and _bytes(child, file) != _bytes(parent, file):
            yield Finding("parent-side-file", file, "", "the parent's file", "other bytes")
    for file in of_loaders:
        if file in child.files and file not in parent.files:
            yield Finding("parent-side-file", file, "", "a file of the parent", "one that the parent lacks")


def _bytes(checkpoint: Checkpoint, file: str) -> bytes | None:
    try:
        return read(checkpoint.source, file, 0, checkpoint.files[file])
    except UnreadableError:  # integrity says it of the child, parent-faulty of the parent
        return None


def _unlike(file: str, ours: bytes, theirs: bytes) -> str:
    """What differs in meaning between two files of other bytes; "" where nothing that matters does."""
    if not file.endswith(".json"):
        return "" if ours.split() == theirs.split() and file.endswith(".txt") else "other bytes"
    try:
        a, b = (bounded_json.loads(each, constants=True) for each in (ours, theirs))
    except BadJsonError:
        return "other bytes"
    if not isinstance(a, dict) or not isinstance(b, dict):
        return "" if a == b else "other values"
    if file == "tokenizer.json":
        return _unlike_tokenizer(a, b)
    keys = (
        TOKENS if file == "tokenizer_config.json" else IDS if file == "generation_config.json" else tuple(a)
    )
    other = [key for key in keys if key in a and key in b and _token(a[key]) != _token(b[key])]
    return f"other {', '.join(other[:4])}" if other else ""


def _token(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) and "content" in value else value


def _unlike_tokenizer(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    ours, theirs = _words(a), _words(b)
    if ours != theirs:
        return f"a vocabulary of {len(ours):,} words where the parent's has {len(theirs):,}, or other numbers for them"
    return "" if _added(a) == _added(b) else "other added tokens"


def _words(tokenizer: Mapping[str, Any]) -> Any:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    return vocabulary if isinstance(vocabulary, (dict, list)) else {}


def _added(tokenizer: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    added = tokenizer.get("added_tokens")
    rows = [row for row in added if isinstance(row, Mapping)] if isinstance(added, list) else []
    return sorted(((row.get("id"), row.get("content")) for row in rows), key=repr)


def _template(child: Checkpoint, parent: Checkpoint) -> Iterator[Finding]:
    theirs, ours = _template_of(parent), _template_of(child)
    if theirs is not None and ours != theirs:
        got = "none" if ours is None else "another one"
        yield Finding("parent-side-file", "chat_template.jinja", "", "the parent's chat template", got)


def _template_of(checkpoint: Checkpoint) -> Any:
    """The chat template, wherever it is written: a file of its own, or a field of tokenizer_config.json."""
    if 0 < checkpoint.files.get("chat_template.jinja", 0) < BYTES_MAX:
        return (_bytes(checkpoint, "chat_template.jinja") or b"").decode("utf-8", "replace").rstrip()
    for file in ("chat_template.json", "tokenizer_config.json"):
        if not 0 < checkpoint.files.get(file, 0) < BYTES_MAX:
            continue
        try:
            value = bounded_json.loads(_bytes(checkpoint, file) or b"", constants=True)
        except BadJsonError:
            continue
        template = value.get("chat_template") if isinstance(value, dict) else None
        if template is not None:
            return template.rstrip() if isinstance(template, str) else template
    return None
