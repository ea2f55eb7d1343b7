"""Five seeded distributions of latents, and the two errors that matter: of the latent, and of attention's output."""

import numpy as np

from shardmill.kernels.formats import bf16_to_f32, f32_to_bf16

KINDS = ("Gaussian", "Student-t3", "outliers in tile 0", "outliers in every tile", "low rank")


def latents(kind: str, rows: int, seed: int = 7) -> np.ndarray:
    """f32 [rows, 512] of bf16 values with rows of norm sqrt(512), as behind a layer norm."""
    random = np.random.default_rng([seed, KINDS.index(kind)])
    z = random.standard_normal((rows, 512))
    if kind == "Student-t3":
        z = random.standard_t(3, (rows, 512))
    elif kind == "outliers in tile 0":
        z[:, random.choice(128, 8, replace=False)] *= random.uniform(15, 40, 8)
    elif kind == "outliers in every tile":
        z *= np.exp(0.7 * random.standard_normal(512))
        for tile in range(4):
            z[:, 128 * tile + random.choice(128, 2, replace=False)] *= random.uniform(10, 40, 2)
    elif kind == "low rank":
        z = random.standard_normal((rows, 64)) @ random.standard_normal((64, 512)) / 8 + 0.3 * z
        z *= np.exp(0.5 * random.standard_normal(512))
    z /= np.sqrt(np.square(z).mean(axis=1, keepdims=True))
    return bf16_to_f32(f32_to_bf16(z.astype(np.float32)))


def queries(x: np.ndarray, count: int, seed: int = 8) -> np.ndarray:
    """f64 [count, 512]: random directions leaning towards some of the rows, with scores of deviation 2."""
    random = np.random.default_rng(seed)
    towards = x[random.choice(len(x), count, replace=False)].astype(np.float64)
    q = random.standard_normal((count, 512))
    q = 0.7 * q / np.linalg.norm(q, axis=1, keepdims=True)
    q += 0.3 * towards / np.linalg.norm(towards, axis=1, keepdims=True)
    return 2 * q / (q @ x.T.astype(np.float64)).std(axis=1, keepdims=True)


def attention(q: np.ndarray, x: np.ndarray) -> np.ndarray:
    """softmax(q x^T) x in f64."""
    x = x.astype(np.float64)
    score = q @ x.T
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    return weight / weight.sum(axis=1, keepdims=True) @ x


def errors(x: np.ndarray, stored: np.ndarray, q: np.ndarray) -> tuple[float, float]:
    """Relative error of the stored latents and of the attention output over them."""
    latent = np.linalg.norm(stored.astype(np.float64) - x) / np.linalg.norm(x)
    exact = attention(q, x)
    return float(latent), float(np.linalg.norm(attention(q, stored) - exact) / np.linalg.norm(exact))
