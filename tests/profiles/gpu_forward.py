"""Logits of an FP8 build against those of its BF16 parent, on a GPU, by transformers.

    python -m tests.profiles.gpu_forward make DIR      # anywhere: a parent, our build, and one by another formula
    python -m tests.profiles.gpu_forward run DIR       # where torch, transformers and a GPU are: prints JSON

Two ways to serve each child: `weights`, decoded to BF16, so that only the weights' rounding shows; `served`, FP8 with
activations in groups of 128, as FineGrainedFP8 multiplies. For each the mean KL divergence from the parent's logits in
nats, and the relative error of the logits. The other formula is llm-compressor's: scale and division in BF16. `noise`
is the parent with random errors as large, matrix by matrix, as our rounding: what that size of error explains.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
TOKENS, SEQUENCES = 256, 8


def make(home: Path) -> None:
    """Writes parent/, ours/ and bf16-scales/ below `home`."""
    import numpy as np
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    from tests.profiles.small import child

    config = transformers.CONFIG_MAPPING["llama"](**CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    randoms = np.random.Generator(np.random.PCG64(53))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # heavy tails, as trained weights have
                values = randoms.standard_t(5, tuple(parameter.shape)) / np.sqrt(parameter.shape[1])
                parameter.copy_(torch.from_numpy(values))
    model.save_pretrained(home / "parent")
    child(home / "parent", home / "ours", "fp8")
    weights, made = (
        load_file(home / "parent" / "model.safetensors"),
        load_file(home / "ours" / "model.safetensors"),
    )
    for name in [name for name in made if f"{name}_scale_inv" in made]:
        made[name], made[f"{name}_scale_inv"] = in_bf16(weights[name])
    (home / "bf16-scales").mkdir(exist_ok=True)
    save_file(made, home / "bf16-scales" / "model.safetensors", {"format": "pt"})
    (home / "bf16-scales" / "config.json").write_bytes((home / "ours" / "config.json").read_bytes())


def in_bf16(weight: Any) -> tuple[Any, Any]:
    """llm-compressor's FP8_BLOCK: amax / 448 and the division both in BF16. [R, C] a multiple of 128."""
    import torch

    R, C = weight.shape
    blocks = weight.view(R // 128, 128, C // 128, 128)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
    codes = (blocks / scales).clamp(-448, 448).to(torch.float8_e4m3fn).view(R, C)
    return codes, scales[:, 0, :, 0].float().contiguous()


def run(home: Path) -> dict[str, Any]:
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.arange(SEQUENCES * TOKENS, device=device).mul(7919).remainder(CONFIG["vocab_size"])
    ids = ids.view(SEQUENCES, TOKENS)
    truth = logits(home / "parent", ids, None)
    report: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for name in ("ours", "bf16-scales"):
        for way in ("weights", "served"):
            try:
                report[f"{name} {way}"] = distance(truth, logits(home / name, ids, way))
            except Exception as error:
                report[f"{name} {way}"] = f"{type(error).__name__}: {error}"[:300]
    report["noise"] = distance(truth, noisy_logits(home, ids))
    return report


def noisy_logits(home: Path, ids: Any) -> Any:
    import torch

    model = loaded(home / "parent", ids, None)
    decoded = loaded(home / "ours", ids, "weights").state_dict()
    randoms = torch.Generator(device=ids.device).manual_seed(1)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            size = (decoded[name].float() - weight.float()).norm()
            noise = torch.randn(weight.shape, generator=randoms, device=ids.device)
            weight.copy_(weight.float() + noise * (size / noise.norm()))
        return model(ids).logits.float()


def logits(folder: Path, ids: Any, way: str | None) -> Any:
    """f32 [sequences, tokens, vocabulary]. way: None for a parent, else "weights" or "served"."""
    import torch

    with torch.no_grad():
        return loaded(folder, ids, way)(ids).logits.float()


def loaded(folder: Path, ids: Any, way: str | None) -> Any:
    import torch
    import transformers

    options = {}
    if way == "weights":
        options["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=ids.device.type, **options
    )
    codes = sum(parameter.dtype == torch.float8_e4m3fn for parameter in model.parameters())
    assert (codes > 0) == (way == "served"), f"{codes} parameters hold codes"
    return model


def distance(truth: Any, other: Any) -> dict[str, float]:
    import torch

    one, two = torch.log_softmax(truth.double(), -1), torch.log_softmax(other.double(), -1)
    kl = (one.exp() * (one - two)).sum(-1)
    return {
        "kl_mean": kl.mean().item(),
        "kl_max": kl.max().item(),
        "relative_error": ((other - truth).norm() / truth.norm()).item(),
        "same_top": (other.argmax(-1) == truth.argmax(-1)).double().mean().item(),
    }


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        print(json.dumps(run(Path(sys.argv[2]))))
