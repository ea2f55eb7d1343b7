"""Logits of an FP8 build against those of its BF16 parent, on a GPU, by transformers.

    python -m tests.pipeline.profiles.gpu_forward make DIR      # anywhere: parents, our builds, and another formula
    python -m tests.pipeline.profiles.gpu_forward run DIR       # where torch, transformers and a GPU are: prints JSON

Two ways to serve each child: `weights`, decoded to BF16, so that only the weights' rounding shows; `served`, FP8 with
activations in groups of 128, as FineGrainedFP8 multiplies. For each the mean KL divergence from the parent's logits in
nats, and the relative error of the logits. transformers fetches its FP8 kernel from a hub; so here the product of its
FP8Linear is torch._scaled_mm on a GPU, and f32 over the same rounded operands on a CPU. The other formula is
llm-compressor's: scale and division in BF16. `noise` is the parent with random errors as large, matrix by matrix, as
our rounding: what that size of error explains. A gain is how much the other's KL exceeds ours, mean and standard
error over positions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
TOKENS, SEQUENCES = 256, 8


def make(home: Path) -> None:
    """Below `home`, for each kind of parent: parent/, ours/ and llm-compressor/.

    Kinds: `random`, weights with heavy tails; `native`, the same as a BF16 copy of block FP8, as GLM's are.
    """
    import numpy as np
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    from tests.pipeline.profiles.small import child

    config = transformers.CONFIG_MAPPING["llama"](**CONFIG)
    for kind in ("random", "native"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        randoms = np.random.Generator(np.random.PCG64(53))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2:
                    values = randoms.standard_t(5, tuple(parameter.shape)) / np.sqrt(parameter.shape[1])
                    weight = torch.from_numpy(values).bfloat16()
                    parameter.copy_(dequantized(weight) if kind == "native" and "_proj" in name else weight)
        folder = home / kind
        model.save_pretrained(folder / "parent")
        child(folder / "parent", folder / "ours", "fp8")
        weights = load_file(folder / "parent" / "model.safetensors")
        made = load_file(folder / "ours" / "model.safetensors")
        for name in [name for name in made if f"{name}_scale_inv" in made]:
            made[name], made[f"{name}_scale_inv"] = in_bf16(weights[name])
        (folder / "llm-compressor").mkdir(exist_ok=True)
        save_file(made, folder / "llm-compressor" / "model.safetensors", {"format": "pt"})
        (folder / "llm-compressor" / "config.json").write_bytes(
            (folder / "ours" / "config.json").read_bytes()
        )


def dequantized(weight: Any) -> Any:
    """[R, C] -> the BF16 copy of its block FP8."""
    import torch

    blocks = weight.float().view(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
    codes = (blocks / scales).to(torch.float8_e4m3fn)
    return (codes.float() * scales).bfloat16().view(weight.shape)


def in_bf16(weight: Any) -> tuple[Any, Any]:
    """llm-compressor's FP8_BLOCK: amax / 448 and the division both in BF16. [R, C] a multiple of 128.

    llm-compressor 0.14.0.1 itself, run on such a parent, gave the same codes and scales for 28 of 28 weights.
    """
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
    report: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    report["device"] = torch.cuda.get_device_name() if device == "cuda" else device
    for kind in ("random", "native"):
        report[kind] = look(home / kind, ids)
    return report


def look(folder: Path, ids: Any) -> dict[str, Any]:
    truth, kls, report = logits(folder / "parent", ids, None), {}, {}
    for way in ("weights", "served"):
        for name in ("ours", "llm-compressor"):
            try:
                found = logits(folder / name, ids, way)
            except Exception as error:
                report[f"{name} {way}"] = f"{type(error).__name__}: {error}"[:300]
                continue
            kls[name, way] = divergence(truth, found)
            report[f"{name} {way}"] = distance(truth, found, kls[name, way])
        if {("ours", way), ("llm-compressor", way)} <= kls.keys():
            gain = kls["llm-compressor", way] - kls["ours", way]
            report[f"gain {way}"] = [gain.mean().item(), (gain.std() / gain.numel() ** 0.5).item()]
    noisy = noisy_logits(folder, ids)
    report["noise"] = distance(truth, noisy, divergence(truth, noisy))
    return report


def product(self: Any, x: Any) -> Any:
    """FP8Linear's forward: activations x [..., K] in groups of 128 by amax / 448, weight [N, K] in blocks of 128."""
    import torch

    K, N = x.shape[-1], self.weight.shape[0]
    groups = x.reshape(-1, K // 128, 128).float()
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    codes = (groups / scales).to(torch.float8_e4m3fn)
    if x.is_cuda:
        rows_first = (
            scales[..., 0].t().contiguous().t()
        )  # [tokens, K / 128], as the 1 x 128 recipe wants them
        out = torch._scaled_mm(
            codes.view(-1, K),
            self.weight.t(),
            rows_first,
            self.weight_scale_inv.t(),
            out_dtype=torch.bfloat16,
        )
    else:
        wide = self.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        out = ((codes.float() * scales).view(-1, K) @ (self.weight.float() * wide).t()).bfloat16()
    return out.view(*x.shape[:-1], N)


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
    from transformers.integrations.finegrained_fp8 import FP8Linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    FP8Linear.forward = product
    FineGrainedFP8HfQuantizer.validate_environment = lambda self, *args, **kwargs: None  # it asks for a GPU
    options = {}
    if way == "weights":
        options["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=ids.device.type, **options
    )
    codes = sum(parameter.dtype == torch.float8_e4m3fn for parameter in model.parameters())
    assert (codes > 0) == (way == "served"), f"{codes} parameters hold codes"
    return model


def divergence(truth: Any, other: Any) -> Any:
    """KL of each position in nats, f64 [sequences, tokens]."""
    import torch

    one, two = torch.log_softmax(truth.double(), -1), torch.log_softmax(other.double(), -1)
    return (one.exp() * (one - two)).sum(-1)


def distance(truth: Any, other: Any, kl: Any) -> dict[str, float]:
    return {
        "kl_mean": kl.mean().item(),
        "relative_error": ((other - truth).norm() / truth.norm()).item(),
        "same_top": (other.argmax(-1) == truth.argmax(-1)).double().mean().item(),
    }


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        print(json.dumps(run(Path(sys.argv[2]))))
