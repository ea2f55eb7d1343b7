"""A toy parent whose logits carry information: what goes in comes out through 46 layers, and errors do not grow.

The shipped toy's weights all have one size. Its embedding is then 1/45 of what the first layer adds, its attention is
uniform, and its logits are nearly flat: every error looks like every other. `inform` rescales it, by powers of two
so that BF16 weights and copies of FP8 keep their mantissas, and writes an lm_head:

| tensors | factor | then |
|---|---|---|
| embed_tokens | 2^6 | an element has size 1, and all layers together add less than that |
| o_proj of KDA | 2^2 | a layer adds 0.06: 34 of them 0.35 |
| q_b_proj | 2^4 | attention scores spread enough for attention to pick rows, so that their errors show |
| o_proj of MLA | 2 | a layer adds 0.2: 11 of them 0.6 |
| down_proj, dense and shared | 2 | an MLP adds 0.08 |
| down_proj of routed experts | 2^-4 | experts add 0.06: 42 layers 0.4 |
| lm_head | new | word w's successor leans to w's embedding by 0 to 0.8, the rest is noise; logits spread by 2 |

So a word's successor is certain after some words and open after others, as in text, and what the layers add decides
the open ones. The embedding passes through by the residual streams, hence a small error stays a small error.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

SEED = 18
LEAN_MOST, SPREAD = 0.8, 2.0
EMBED, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
KDA_OUT, MLA_OUT, QUERY, MLP_OUT, EXPERT_OUT = 2.0**2, 2.0, 2.0**4, 2.0, 2.0**-4

Entry = tuple[Path, dict, int]  # file, header entry, where the file's data begin


def tensors(folder: Path) -> Iterator[tuple[str, Entry]]:
    """Every tensor of a folder of safetensors files, with where its bytes are."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, (path, entry, 8 + size)


def read(entry: Entry) -> np.ndarray:
    path, fields, begin = entry
    first, last = fields["data_offsets"]
    dtype = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F32": np.float32}[
        fields["dtype"]
    ]
    return (
        np.fromfile(path, np.uint8, last - first, offset=begin + first).view(dtype).reshape(fields["shape"])
    )


def overwrite(entry: Entry, values: np.ndarray) -> None:
    path, fields, begin = entry
    assert values.nbytes == fields["data_offsets"][1] - fields["data_offsets"][0]
    with path.open("r+b") as stream:
        stream.seek(begin + fields["data_offsets"][0])
        stream.write(np.ascontiguousarray(values).tobytes())


def factor(name: str, layer_of_mla: Callable[[int], bool]) -> float:
    """The power of two by which `inform` scales a tensor."""
    if name == EMBED:
        return 2.0**6
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if layer is None or "visual" in name:
        return 1.0
    if name.endswith("self_attn.o_proj.weight"):
        return MLA_OUT if layer_of_mla(int(layer[1])) else KDA_OUT
    if name.endswith("q_b_proj.weight"):
        return QUERY
    # A routed expert is packed: its global scale is scaled.
    if ".experts." in name:
        return EXPERT_OUT if name.endswith(".down_proj.weight_scale_2") else 1.0
    return MLP_OUT if name.endswith(".down_proj.weight") else 1.0


def inform(folder: Path) -> None:
    """Rescales a toy parent in place and gives it the lm_head described above."""
    config = json.loads((folder / "config.json").read_text())["text_config"]
    kinds = config["layer_types"]
    found = dict(tensors(folder))
    for name, entry in found.items():
        by = factor(name, lambda layer: layer >= len(kinds) or kinds[layer] != "linear_attention")
        if by != 1.0:
            values = read(entry)
            overwrite(entry, (values.astype(np.float32) * np.float32(by)).astype(values.dtype))
    overwrite(found[HEAD], successors(read(found[EMBED]).astype(np.float32)).astype(ml_dtypes.bfloat16))


def successors(embeddings: np.ndarray) -> np.ndarray:
    """lm_head f32 [words, hidden] for embeddings f32 [words, hidden]."""
    words, hidden = embeddings.shape
    rng = np.random.Generator(np.random.PCG64(SEED))
    head = rng.standard_normal((words, hidden), np.float32)
    lean = rng.random(words, np.float32) * np.float32(LEAN_MOST)
    size = np.sqrt(np.square(embeddings).mean(1, keepdims=True))
    head[rng.permutation(words)] += lean[:, None] * embeddings / size
    return head * np.float32(SPREAD / np.sqrt(hidden))


def add_processor(folder: Path) -> None:
    """The file by which transformers finds the model's picture processor; pictures of 16 to 256 tokens.

    Videos keep a bound beyond the context: vLLM counts frames until they fill it, even where none is allowed.
    """
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    sizes = {name: vision[name] for name in ("patch_size", "temporal_patch_size")}
    sizes |= {"merge_size": vision["spatial_merge_size"], "patch_expand_factor": 1}
    sizes |= {"min_image_tokens": 16, "max_image_tokens": 256}
    processor = {
        "processor_class": "Glm5NextProcessor",
        "image_processor": {"image_processor_type": "Glm5NextImageProcessor", **sizes},
        "video_processor": {
            "video_processor_type": "Glm5NextVideoProcessor",
            **sizes,
            "max_image_tokens": 30_000,
        },
    }
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=1))


def twin(folder: Path, out: Path) -> dict[str, Entry]:
    """A copy of a checkpoint that may be overwritten; its tensors."""
    if out.exists():
        shutil.rmtree(out)
    shutil.copytree(folder, out)
    return dict(tensors(out))


def one_bit(parent: Path, out: Path) -> None:
    """The parent with the lowest bit of every element of its embedding drawn anew: the least noise there is."""
    entry = twin(parent, out)[EMBED]
    bits = read(entry).view(np.uint16)
    drawn = np.random.Generator(np.random.PCG64(SEED)).integers(0, 2, bits.shape, np.uint16)
    overwrite(entry, (bits & np.uint16(0xFFFE)) | drawn)


def decoded(parent: Path, child: Path, out: Path) -> int:
    """The parent with the child's block-FP8 weights decoded to BF16 in place of its own; how many there were."""
    from shardmill.kernels.block_fp8 import decode

    target, source = twin(parent, out), dict(tensors(child))
    layers = json.loads((child / "config.json").read_text())["quantization_config"]["quantized_layers"]
    count = 0
    for name, (_, fields, _) in source.items():
        if fields["dtype"] != "F8_E4M3" or f"{name}_scale_inv" not in source:
            continue
        side = int(layers[name.removesuffix(".weight")]["group_size"])
        codes, scales = read(source[name]).view(np.uint8), read(source[f"{name}_scale_inv"])
        overwrite(target[name], decode(codes, scales, (side, side)).astype(ml_dtypes.bfloat16))
        count += 1
    return count
