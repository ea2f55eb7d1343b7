"""What a file or a folder is, where it is nearly a checkpoint, by first bytes and by names alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import islice

HEAD_BYTES = 512

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (
        b"version https://git-lfs",
        "a Git LFS pointer: fetch the file itself with `git lfs pull` or `hf download`",
    ),
    (b"GGUF", "a GGUF file (llama.cpp)"),
    (b"ggml", "a GGML file (llama.cpp)"),
    (b"PK\x03\x04", "a zip archive, such as torch.save writes"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"%PDF", "a PDF"),
)
_BEFORE = rb"^(\xef\xbb\xbf)?\s*(<!--.*?-->\s*)*"  # a byte-order mark, comments
_PAGE = re.compile(_BEFORE + rb"(<!doctype html|<html|<head|<body)", re.IGNORECASE | re.DOTALL)
_XML = re.compile(_BEFORE + rb"(<\?xml|<Error)", re.IGNORECASE | re.DOTALL)
_JSON_ERROR = re.compile(rb"^(\xef\xbb\xbf)?\s*\{\s*\"(error|message|detail|errors)\"", re.IGNORECASE)
_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")

FORMATS = {
    ".gguf": "GGUF files (llama.cpp)",
    ".bin": "PyTorch pickles",
    ".pt": "PyTorch pickles",
    ".pth": "PyTorch pickles",
    ".ckpt": "PyTorch or TensorFlow checkpoints",
    ".h5": "Keras files",
    ".msgpack": "Flax files",
    ".onnx": "ONNX files",
    ".nemo": "NeMo archives",
    ".npz": "NumPy archives",
    ".tflite": "TensorFlow Lite files",
    ".engine": "TensorRT engines",
    ".llamafile": "llamafiles",
    ".mlmodel": "Core ML files",
    ".parquet": "a data set",
    ".tar": "archives: unpack them first",
    ".tgz": "archives: unpack them first",
    ".gz": "archives: unpack them first",
    ".zip": "archives: unpack them first",
    ".7z": "archives: unpack them first",
    ".distcp": "a distributed checkpoint of PyTorch",
}


def what_it_is(head: bytes) -> str:
    """What the first bytes of a file say; "" where they say nothing."""
    for magic, what in _MAGIC:
        if head.startswith(magic):
            return what
    if _PAGE.match(head):
        return "an HTML page"
    if _XML.match(head):
        return "an XML error page"
    if _JSON_ERROR.match(head):
        return "a server's error message"
    if len(head) >= 16 and not head.strip(b"\0"):
        return "a file of zeros"
    return ""


def text_of(head: bytes) -> str:
    """`a text: 'Invalid username'` where the first bytes are plain words, such as a server's refusal."""
    words = head[:60].decode("ascii", "replace")
    plain = len(words) > 8 and all(letter.isprintable() or letter.isspace() for letter in words)
    return f"a text: {words.split(chr(10))[0]!r}" if plain and "\ufffd" not in words else ""


def folder_is(files: Mapping[str, int]) -> str:
    """What a folder without safetensors of its own is, as one sentence; "" where nothing is known of it."""
    top = [file for file in files if "/" not in file]
    inside = [file for file in files if file.endswith(".safetensors")]
    if "model_index.json" in top:
        parts = sorted({file.split("/")[0] for file in inside})
        return (
            f"a diffusers pipeline: ask about one of its folders ({', '.join(parts) or 'none has weights'})"
        )
    if any(file.startswith("snapshots/") for file in files):
        commits = sorted({"/".join(file.split("/")[:2]) for file in files if file.startswith("snapshots/")})
        return f"a repository of the Hugging Face cache: ask about {commits[-1]}"
    if "adapter_config.json" in top:
        return "an adapter (adapter_config.json): ask about the model that it belongs to"
    if inside:
        folders = Counter(file.rpartition("/")[0] for file in inside)
        named = ", ".join(sorted(folders)[:3])
        return (
            f"one level too high: ask about {named}"
            if len(folders) == 1
            else f"a folder of folders: ask about one of {named}"
        )
    endings = Counter(f".{file.rpartition('.')[2]}" for file in files)
    found = [
        f"{what} ({count:,} {ending})" for ending, what in FORMATS.items() if (count := endings.get(ending))
    ]
    return f"{', '.join(found)}: only safetensors are judged" if found else ""


_OF_ADAPTERS = re.compile(
    r"(^|[._])(lora_[AB]|lora_(up|down)|lora_embedding_[AB]|ia3_l|prompt_embeddings|hada_w|oft_R)"
)


def is_adapter(files: Mapping[str, int], names: Collection[str]) -> bool:
    """Whether a folder holds an adapter and no model: by its config, or as all of its tensors are an adapter's."""
    top = [file for file in files if "/" not in file]
    models = [file for file in top if file.endswith(".safetensors") and not file.startswith("adapter_")]
    if "adapter_config.json" in top and not models:
        return True
    return bool(names) and all(map(_OF_ADAPTERS.search, islice(names, 1_000)))


def unindexed(files: Mapping[str, int]) -> int:
    """How many files number themselves as shards."""
    return sum(bool(_SHARD.search(file)) for file in files if "/" not in file)
