"""Packs an installed vLLM 0.33.0 for a machine with one SM90 card, torch and no network: 60 MiB of archives.

    .venv-vllm/bin/python -m tests.runtime_patch.gpu.pack build/gpu-parts

| archive | what |
|---|---|
| vllm-so.tar.xz | the extensions on this path; fatbin payloads other than sm_90 code and compute_80/90 PTX are zeroed |
| vllm-py.tar.xz | the Python tree with DeepGEMM's headers and the metadata, no other binary |
| site.tar.xz | packages that the CUDA image lacks, as wheels for its Python |
| shardmill_serving*.whl | the plugin (`make serving-wheel`) |
"""

from __future__ import annotations

import importlib.util
import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
PYTHON, GLIBC = "3.12", 39  # of the GPU machine's image
# pip takes a tag literally: a wheel for an older glibc is found by that glibc's own tag alone.
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)), "manylinux2014_x86_64"]
EXTENSIONS = (
    "_C_stable_libtorch.abi3.so",
    "_moe_C_stable_libtorch.abi3.so",
    "_flashmla_C.abi3.so",
    "_flashmla_extension_C.abi3.so",
    "_flashkda_C.abi3.so",
    "cumem_allocator.abi3.so",
    "fs_io_C.abi3.so",
    "spinloop.abi3.so",
)
UNUSED = ("vllm-rs", "third_party/fmha_sm100", "third_party/tml_fa4")
KEEP_CODE, KEEP_PTX = {90}, {80, 90}
# What vLLM imports and an image with torch, triton, transformers and the scientific stack lacks.
PACKAGES = """
    annotated-doc annotated-types anyio apache-tvm-ffi astor blake3 cachetools cbor2 compressed-tensors
    depyf dill distro fastapi httpx2 ijson jiter jmespath jsonschema jsonschema-specifications lark
    llguidance loguru model-hosting-container-standards msgspec nvtx openai orjson oss-harmony
    partial-json-parser prometheus-fastapi-instrumentator pybase64 pydantic pydantic-core python-json-logger
    pyzmq referencing rpds-py setproctitle sniffio starlette typing-extensions typing-inspection uvicorn
    watchfiles xgrammar
"""
MAGIC = 0xBA55ED50


def sections(image: bytearray) -> Iterator[tuple[str, int, int]]:
    """(name, offset, bytes) of an ELF64 file's sections."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", image, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    names = rows[names_at][4]
    for name, _, _, _, offset, length in rows:
        yield bytes(image[names + name : image.index(0, names + name)]).decode(), offset, length


def payloads(image: bytearray, offset: int, length: int) -> Iterator[tuple[int, int, int, int]]:
    """(kind, architecture, offset, bytes) of a fatbin section's entries; kind 1 is PTX and 2 machine code."""
    at, end = offset, offset + length
    while at < end:
        if struct.unpack_from("<I", image, at)[0] != MAGIC:
            at += 8
            continue
        _, header, size = struct.unpack_from("<HHQ", image, at + 4)
        entry, stop = at + header, at + header + size
        while entry < stop:
            kind, _, begin, stored, *_, architecture = struct.unpack_from("<HHIQIIHHI", image, entry)
            yield kind, architecture, entry + begin, stored
            entry += begin + stored
        at = stop


def narrowed(library: Path) -> bytes:
    """The library with the payloads of other cards zeroed; headers and sizes stay."""
    image = bytearray(library.read_bytes())
    for name, offset, length in list(sections(image)):
        if name not in (".nv_fatbin", "__nv_relfatbin"):
            continue
        for kind, architecture, at, size in list(payloads(image, offset, length)):
            if architecture not in (KEEP_CODE if kind == 2 else KEEP_PTX):
                image[at : at + size] = bytes(size)
    return bytes(image)


# Branch targets of machine code as absolute addresses pack 2 % smaller; it costs text nothing.
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6}]


def archive(folder: Path, out: Path) -> None:
    with lzma.open(out, "wb", filters=FILTERS) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                tar.add(path, path.relative_to(folder))


def pack_extensions(root: Path, out: Path, work: Path) -> None:
    for name in EXTENSIONS:
        (work / "vllm").mkdir(parents=True, exist_ok=True)
        (work / "vllm" / name).write_bytes(narrowed(root / name))
    for path in root.glob("third_party/deep_gemm/*.so"):
        target = work / "vllm" / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
        subprocess.run(["strip", "--strip-debug", target], check=True)
    archive(work, out / "vllm-so.tar.xz")


def pack_tree(root: Path, out: Path, work: Path) -> None:
    def left_out(folder: str, names: list[str]) -> list[str]:
        below = Path(folder)
        return [
            n
            for n in names
            if n == "__pycache__" or ".so" in n or str((below / n).relative_to(root)) in UNUSED
        ]

    shutil.copytree(root, work / "vllm", ignore=left_out)
    for metadata in root.parent.glob("vllm-*.dist-info"):
        shutil.copytree(metadata, work / metadata.name)
    archive(work, out / "vllm-py.tar.xz")


def installed(names: list[str]) -> list[str]:
    """`name==version` of those that are installed here; which of them vLLM needs changes with its needs' releases."""
    found = []
    for name in names:
        try:
            found.append(f"{name}=={version(name)}")
        except PackageNotFoundError:
            print(f"{name}: not installed here, so not needed by this vLLM and not packed")
    return found


def pack_packages(out: Path, work: Path) -> None:
    wheels = work / "wheels"
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    words += ["--python-version", PYTHON, "--implementation", "cp", "--dest", str(wheels)]
    for platform in PLATFORMS:
        words += ["--platform", platform]
    subprocess.run([*words, *installed(PACKAGES.split())], check=True)
    site = work / "site"
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
    archive(site, out / "site.tar.xz")


def main(out: Path) -> int:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        print("vLLM is not installed for this Python; use .venv-vllm/bin/python (make gpu-forward-parts)")
        return 2
    root = Path(spec.origin).parent
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for part, name in ((pack_extensions, "so"), (pack_tree, "py")):
            (Path(folder) / name).mkdir()
            part(root, out, Path(folder) / name)
        pack_packages(out, Path(folder))
    for wheel in (REPOSITORY / "build" / "serving" / "dist").glob("*.whl"):
        shutil.copy(wheel, out / wheel.name)
    total = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {total / (1 << 20):.1f} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
