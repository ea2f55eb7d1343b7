"""Which files beside the shards a child gets, by name alone: one rule for a folder and for a hub.

A child gets what a loader reads: configs, tokenizers, templates, processors, licences, the code that auto_map names,
the modules of a sentence model. It does not get other copies of the weights, training state, logs and caches.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from shardmill.pipeline.types import CONFIG_FILE, INDEX_FILE, LeftFile

SIDE_FILE_BYTES_MAX = 64 << 20  # the largest tokenizers have some 40 MB

_OF_PARENT_ALONE = frozenset({"README.md", "hf_quant_config.json", "shardmill.manifest.json"})
_SIGNATURES = (".sig", ".asc", ".sigstore", ".sigstore.json", ".minisig")
_OTHER_WEIGHTS = re.compile(
    r".*\.(bin|pt|pth|ckpt|gguf|ggml|nemo|onnx|onnx_data|msgpack|h5|hdf5|ot|tflite|mlmodel|mlpackage|engine|plan|llamafile"
    r"|npz|npy|pkl|pickle|joblib|distcp|tar|tgz|gz|zip|zst|xz|7z|safetensors|safetensors\.index\.json|bin\.index\.json)",
    re.IGNORECASE,
)
_TRAINING = re.compile(
    r"(optimizer|scheduler|trainer_state|training_args|rng_state|scaler|zero_to_fp32|events\.out\.tfevents|latest$|train_results"
    r"|all_results|eval_results)"
)
_TRAINING_FOLDERS = re.compile(r"(global_step|checkpoint-|runs|wandb|logs|tensorboard|mlruns)")
_LITTER = re.compile(
    r".*(\.log|\.out|\.err|\.tmp|\.lock|\.incomplete|\.swp|\.pyc|~|:Zone\.Identifier)|Thumbs\.db|desktop\.ini|nohup\.out"
)
# What transformers calls the files of custom code; a config may name them only after the model was converted.
_CODE_OF_MODELS = re.compile(
    r"(modeling|configuration|tokenization|processing|image_processing|feature_extraction|video_processing)_"
)
_READ_BY_LOADERS = re.compile(
    r".*\.(json|jsonl|txt|jinja|jinja2|model|tiktoken|vocab|spm|bpe|yaml|yml|toml|md|cfg)"
    r"|(LICEN[CS]E|NOTICE|COPYING|USE_POLICY|USAGE|PATENTS)[\w.-]*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class SideFiles:
    """What decides: the recipe's `[output] carry`, the code that configs name, the modules of a sentence model."""

    carry: tuple[str, ...] = ()  # globs over relative POSIX paths
    code: frozenset[str] = frozenset()  # .py files
    modules: frozenset[str] = frozenset()  # folders
    copies: frozenset[str] = field(default_factory=frozenset)  # folders that hold another copy of the weights

    def why_left(self, name: str, size: int) -> str | None:
        """Why the child does not get the file `name` (a relative POSIX path) of `size` bytes; None where it does."""
        path = PurePosixPath(name)
        if name in (INDEX_FILE, CONFIG_FILE) or name in _OF_PARENT_ALONE:
            return "it describes the parent alone"
        if any(fnmatchcase(name, glob) for glob in self.carry):
            return None
        if any(part.startswith(".") for part in path.parts):
            return "it is a dotfile"
        if path.name.endswith(_SIGNATURES):
            return "a signature does not hold for another checkpoint"
        return self._why_not_read(path, size)

    def _why_not_read(self, path: PurePosixPath, size: int) -> str | None:
        folders = path.parts[:-1]
        if folders and str(path.parent) in self.modules and path.suffix == ".safetensors":
            return None
        if _LITTER.fullmatch(path.name) or "__pycache__" in folders:
            return "it is a log or a cache"
        if _TRAINING.match(path.name) or any(_TRAINING_FOLDERS.match(part) for part in folders):
            return "it is training state"
        if _OTHER_WEIGHTS.fullmatch(path.name):
            return "it holds weights that the index does not name; list it in [output] carry to keep it"
        if self.copies & {str(parent) for parent in path.parents}:
            return "its folder holds another copy of the weights"
        if path.suffix == ".py":
            usual = not folders and _CODE_OF_MODELS.match(path.name)
            return None if usual or path.as_posix() in self.code else "no config's auto_map names this code"
        if not _READ_BY_LOADERS.fullmatch(path.name):
            return "no loader reads such a file; list it in [output] carry to keep it"
        if size > SIDE_FILE_BYTES_MAX:
            return f"it has more than {SIDE_FILE_BYTES_MAX >> 20} MiB; list it in [output] carry to keep it"
        return None


_NEEDED = re.compile(
    r"(tokenizer[\w.]*|chat_template[\w.]*|vocab[\w.]*|merges\.txt|.*\.tiktoken|spiece\.model)"
)


def missed(left: Mapping[str, LeftFile]) -> list[str]:
    """A sentence for each tokenizer or template at the top that the child does not get."""
    return [
        f"warning: the child does not get {name}: {each.reason}"
        for name, each in sorted(left.items())
        if _NEEDED.fullmatch(name)
    ]


def copies_in(names: Iterable[str], modules: Collection[str]) -> frozenset[str]:
    """Folders, below the top and apart from a sentence model's modules, in which weights of any format lie."""
    folders = {
        str(PurePosixPath(name).parent)
        for name in names
        if "/" in name and _OTHER_WEIGHTS.fullmatch(PurePosixPath(name).name)
    }
    return frozenset(folders - set(modules))


def module_folders(modules: Any) -> frozenset[str]:
    """The folders that a sentence model's modules.json (a list of objects with a `path`) names."""
    rows = modules if isinstance(modules, list) else []
    paths = (row.get("path") for row in rows if isinstance(row, dict))
    return frozenset(str(PurePosixPath(path)) for path in paths if isinstance(path, str) and path)


def code_named(configs: Iterable[Mapping[str, Any]], imports: Mapping[str, Iterable[str]]) -> frozenset[str]:
    """The .py files that the configs' auto_maps name, and those that they import from beside themselves.

    `imports` maps each .py file to the names of the modules that it imports with a leading dot.
    """
    wanted = [file for config in configs for file in _named(config.get("auto_map"))]
    found: set[str] = set()
    while wanted:
        file = wanted.pop()
        if file in imports and file not in found:
            found.add(file)
            folder = PurePosixPath(file).parent
            wanted += [(folder / f"{name.replace('.', '/')}.py").as_posix() for name in imports[file]]
    return frozenset(found)


def _named(auto_map: Any) -> Iterable[str]:
    """`{"AutoModel": "modeling_x.Model", "AutoTokenizer": ["tokenization_x.Slow", null]}` names two files."""
    values = auto_map.values() if isinstance(auto_map, Mapping) else ()
    for value in values:
        for each in value if isinstance(value, list) else [value]:
            if (
                isinstance(each, str) and "--" not in each
            ):  # org/repo--module.Class lies in another repository
                yield f"{each.rpartition('.')[0].replace('.', '/')}.py"


_RELATIVE_IMPORT = re.compile(
    r"^\s*from\s+\.([\w.]+)\s+import\b|^\s*from\s+\.\s+import\s+([\w, ]+)", re.MULTILINE
)


def relative_imports(source: str) -> list[str]:
    """The modules that Python code imports with one leading dot."""
    names: list[str] = []
    for module, listed in _RELATIVE_IMPORT.findall(source):
        names += [module] if module else [name.split(" as ")[0].strip() for name in listed.split(",")]
    return names
