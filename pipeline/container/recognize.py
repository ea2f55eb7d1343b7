"""What is nearly a checkpoint: a file that is no safetensors file, a folder that is one level off. One sentence each.

Used where a reader would only say that eight bytes make no sense. The judge has a recognizer of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from shardmill.pipeline.types import CONFIG_FILE, INDEX_FILE, SINGLE_FILE

HEAD_BYTES = 512  # enough for every signature below
LFS_POINTER = b"version https://git-lfs.github.com/spec/"

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (LFS_POINTER, "a Git LFS pointer, not the file itself; run `git lfs pull` in the parent's folder"),
    (b"GGUF", "a GGUF file under another name; shardmill reads safetensors, so fetch that form of the model"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes it; fetch the safetensors form of the model"),
    (b"\x80\x02", "a Python pickle, as torch.save writes it; fetch the safetensors form of the model"),
    (b"\x89HDF\r\n", "an HDF5 file, as Keras writes it; fetch the safetensors form of the model"),
    (b"\x93NUMPY", "a NumPy array; fetch the safetensors form of the model"),
    (b"\x1f\x8b", "a gzip archive; unpack it"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it"),
    (b"BZh", "a bzip2 archive; unpack it"),
    (b"\xfd7zXZ", "an xz archive; unpack it"),
    (b"ustar", "a tar archive; unpack it"),
)


def looks_like(head: bytes, size: int) -> str | None:
    """What a file that begins with `head` (up to 512 bytes) is instead of safetensors or JSON; None where unknown."""
    for signature, words in _SIGNATURES:
        if head.startswith(signature) or (signature == b"ustar" and head[257:262] == signature):
            return words
    if size and not head.strip(b"\0"):
        return "zeros: a download that was not finished; fetch it again"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML web page, such as a log-in or error page; fetch it again with your access token"
    if text.startswith((b"<?xml", b"<error")):
        return "an XML error message of a storage server; fetch it again with your access token"
    if text.startswith((b'{"error', b'{"message')):
        return f"the error message of a server ({_line(head)!r}); fetch it again with your access token"
    if size < 4096 and _is_text(head):
        return f"a text that begins {_line(head)!r}; fetch it again"
    return None


def _is_text(head: bytes) -> bool:
    text = head.decode("utf-8", "ignore")
    return len(text) > 8 and all(char.isprintable() or char in "\r\n\t" for char in text)


def _line(head: bytes) -> str:
    return head.decode("utf-8", "replace").strip().splitlines()[0][:60]


def instead_of_checkpoint(folder: Path) -> str:
    """Why `folder`, which has neither an index nor a single model.safetensors, is no checkpoint. One clause."""
    return next(_reasons(folder), f"has neither {INDEX_FILE} nor {SINGLE_FILE}; give the checkpoint's folder")


def _reasons(folder: Path) -> Iterator[str]:
    names = sorted(path.name for path in folder.iterdir())
    tensors = [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]
    if snapshots := sorted(folder.glob("snapshots/*/")):
        place = snapshots[-1].relative_to(folder).as_posix()
        yield f"is a hub cache's folder, and the checkpoint is in {place}; give that folder"
    if "adapter_config.json" in names or "adapter_model.safetensors" in names:
        yield "holds an adapter (LoRA), not a whole model; merge it into its base model first"
    if "model_index.json" in names:
        parts = [path.parent.name for path in sorted(folder.glob(f"*/{CONFIG_FILE}"))]
        weighty = [part for part in parts if any((folder / part).glob("*.safetensors"))]
        yield f"is a diffusers pipeline; give one of its parts: {', '.join(weighty) or 'none holds safetensors'}"
    if odd := [name for name in names if name.endswith(".safetensors.index.json")]:
        yield f"has the index {odd[0]} and no {INDEX_FILE}; rename it, if it names this model's shards"
    if len(tensors) > 1:
        yield (
            f"has {len(tensors)} safetensors files and no {INDEX_FILE} that says which tensor is where; fetch the index"
        )
    if tensors:
        yield f"has {tensors[0]}, and a single file must be called {SINGLE_FILE}; rename it"
    if others := _other_weights(names):
        yield f"has weights as {others} and no safetensors; fetch or convert to that form first"
    if inner := _one_level_lower(folder):
        yield f"holds no weights itself, its folder {inner} does; give that folder"
    if not names:
        yield "is empty; fetch the checkpoint again"


def _other_weights(names: list[str]) -> str:
    endings = (".gguf", ".bin", ".pth", ".pt", ".ckpt", ".nemo", ".h5", ".msgpack", ".onnx")
    return ", ".join(sorted({Path(name).suffix for name in names if name.endswith(endings)}))


def _one_level_lower(folder: Path) -> str | None:
    found = [
        path.parent.name
        for name in (INDEX_FILE, SINGLE_FILE)
        for path in sorted(folder.glob(f"*/{name}"))
        if not path.parent.name.startswith(".")
    ]
    return found[0] if found else None


def json_problem(data: bytes) -> str | None:
    """Why the bytes of a .json file are not JSON, in one clause; None where they are."""
    if not data.strip():
        return "is empty; fetch it again"
    try:
        json.loads(data)
    except (ValueError, RecursionError) as error:
        found = looks_like(data[:HEAD_BYTES], len(data))
        if found and not data.lstrip().startswith((b"{", b"[")):
            return f"is {found}"
        return f"is not valid JSON ({error}); fetch it again"
    return None
