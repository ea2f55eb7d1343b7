"""Checkpoints by other tools' own exporters, from the seeded parent. `python -m tests.verify.tools.make TOOL FOLDER`

Runs under the tool's own Python, on a CPU, without a network. One folder for each checkpoint; a checkpoint that the
tool refuses to make is named on stderr, and the exit code is 1. `REQUIREMENTS` are the versions that made the golden
files. Not here: convert-to-quant's NVFP4 and MXFP8, whose scales lie in the order of a GPU's tiles, and the exports of
torchao, optimum-quanto, HQQ and bitsandbytes, whose forms are not judged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from tests.verify.tools import seeded

Make = Callable[[Path, Path], None]  # (parent's folder, folder to write)


def _model(parent: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(parent, **options)


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(seeded.WORDS)}, unk_token="0"))
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="0")
    made.save_pretrained(folder)
    return made


def llm_compressor(scheme: str) -> Make:
    def make(parent: Path, folder: Path) -> None:
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier

        model = _model(parent, torch_dtype="auto")
        oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]))
        model.save_pretrained(folder, save_compressed=True)

    return make


def transformers_fp8(**options: Any) -> Make:
    def make(parent: Path, folder: Path) -> None:
        from transformers import FineGrainedFP8Config
        from transformers.quantizers import quantizer_finegrained_fp8

        # It asks for a GPU to run on; making the checkpoint needs none.
        quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer.validate_environment = lambda self, *_, **__: (
            setattr(self, "pre_quantized", False)
        )
        config = FineGrainedFP8Config(**options)
        _model(parent, quantization_config=config, device_map="cpu").save_pretrained(folder)

    return make


def modelopt(config: str) -> Make:
    def make(parent: Path, folder: Path) -> None:
        import modelopt.torch.quantization as mtq
        import torch
        from modelopt.torch.export import export_hf_checkpoint

        model = _model(parent, torch_dtype="auto")
        tokens = torch.arange(64).reshape(2, 32)
        mtq.quantize(model, getattr(mtq, config), lambda each: each(tokens))
        export_hf_checkpoint(model, export_dir=folder)

    return make


def auto_round(scheme: str, form: str) -> Make:
    def make(parent: Path, folder: Path) -> None:
        import torch
        from auto_round import AutoRound

        tokenizer = _tokenizer(folder.with_name(f"{folder.name}.words"))
        rounder = AutoRound(
            _model(parent, torch_dtype="auto"), tokenizer, scheme=scheme, iters=0, disable_opt_rtn=True,
            dataset=[torch.arange(64).reshape(2, 32)], seqlen=32, nsamples=2,
        )  # fmt: skip
        rounder.quantize_and_save(str(folder), format=form)
        for inner in [path for path in folder.iterdir() if path.is_dir()]:  # it names a folder of its own
            for file in inner.iterdir():
                file.rename(folder / file.name)
            inner.rmdir()

    return make


def quark(kind: str) -> Make:
    def make(parent: Path, folder: Path) -> None:
        import torch
        from quark.torch import ModelQuantizer, export_safetensors
        from quark.torch.quantization.config import config as q

        model = _model(parent, torch_dtype="auto")
        spec = {
            "fp8": lambda: q.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False),
            "fp8 channel": lambda: q.FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0),
            "mxfp4": lambda: q.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
        }[kind]().to_quantization_spec()
        config = q.QConfig(global_quant_config=q.QLayerConfig(weight=spec), exclude=["lm_head"])
        quantizer = ModelQuantizer(config)
        batches = [torch.arange(64).reshape(2, 32)]
        with torch.no_grad():
            made = quantizer.freeze(quantizer.quantize_model(model, batches))
            export_safetensors(model=made, output_dir=str(folder), weight_format="real_quantized")

    return make


def convert_to_quant(*options: str) -> Make:
    def make(parent: Path, folder: Path) -> None:
        import subprocess

        folder.mkdir(parents=True)
        target = folder / "model.safetensors"
        source = parent / "model.safetensors"
        command = [
            sys.executable,
            "-m",
            "convert_to_quant.convert_to_quant",
            "-i",
            source,
            "-o",
            target,
            *options,
        ]
        subprocess.run([str(word) for word in command], check=True)

    return make


_TORCH = "torch==2.13.0"
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "transformers": (_TORCH, "transformers==5.24.0", "accelerate"),
    "llmcompressor": (_TORCH, "llmcompressor==0.14.0.1"),
    "nvidia-modelopt": (_TORCH, "nvidia-modelopt==0.47.0", "transformers==5.24.0", "accelerate"),
    "auto-round": (_TORCH, "auto-round==0.15.1", "compressed-tensors==0.19.0", "transformers==5.17.0"),
    "amd-quark": (_TORCH, "amd-quark==0.13", "transformers==5.24.0", "accelerate", "datasets", "psutil"),
    "convert-to-quant": (_TORCH, "convert-to-quant==1.3.4", "safetensors", "numpy", "tqdm", "packaging"),
}

TOOLS: dict[str, dict[str, tuple[str, Make]]] = {
    "transformers": {
        "block fp8": ("BF16", transformers_fp8()),
        "block fp8 32": ("BF16", transformers_fp8(weight_block_size=(32, 32))),
    },
    "llmcompressor": {
        "fp8 block": ("BF16", llm_compressor("FP8_BLOCK")),
        "fp8 channel": ("BF16", llm_compressor("FP8_DYNAMIC")),
        "fp8 channel f32": ("F32", llm_compressor("FP8_DYNAMIC")),
        "nvfp4": ("BF16", llm_compressor("NVFP4A16")),
        "mxfp4": ("BF16", llm_compressor("MXFP4A16")),
        "mxfp8": ("BF16", llm_compressor("MXFP8A16")),
        "int8": ("BF16", llm_compressor("W8A8")),
        "int4": ("BF16", llm_compressor("W4A16")),
        "int4 zero points": ("BF16", llm_compressor("W4A16_ASYM")),
    },
    "nvidia-modelopt": {
        "fp8 tensor": ("BF16", modelopt("FP8_DEFAULT_CFG")),
        "fp8 channel": ("BF16", modelopt("FP8_PER_CHANNEL_PER_TOKEN_CFG")),
        "fp8 block": ("BF16", modelopt("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG")),
        "nvfp4": ("BF16", modelopt("NVFP4_DEFAULT_CFG")),
        "mxfp8": ("BF16", modelopt("MXFP8_DEFAULT_CFG")),
    },
    "auto-round": {
        "mxfp4": ("BF16", auto_round("MXFP4", "llm_compressor")),
        "nvfp4": ("BF16", auto_round("NVFP4", "llm_compressor")),
        "mxfp8": ("BF16", auto_round("MXFP8", "llm_compressor")),
        "fp8 block": ("BF16", auto_round("FP8_BLOCK", "fp8")),
    },
    "amd-quark": {
        "fp8 tensor": ("BF16", quark("fp8")),
        "fp8 channel": ("BF16", quark("fp8 channel")),
        "mxfp4": ("BF16", quark("mxfp4")),
    },
    "convert-to-quant": {
        "fp8 tensor": ("BF16", convert_to_quant("--simple")),
        "fp8 channel": ("BF16", convert_to_quant("--simple", "--scaling_mode", "row")),
    },
}  # fmt: skip


def main() -> int:
    tool, folder = sys.argv[1], Path(sys.argv[2]).absolute()
    wanted, refused = sys.argv[3:], 0
    for name, (dtype, make) in TOOLS[tool].items():
        target = folder / f"{tool} {name}"
        if target.exists() or (wanted and name not in wanted):
            continue
        parent = folder / f"parent {dtype}"
        seeded.write(parent, dtype)
        try:
            make(parent, target)
            (target / "tool.txt").write_text(f"{tool} {version(tool)}\n")
        except Exception as error:
            refused += 1
            print(f"{tool} {name}: {type(error).__name__}: {error}"[:2000], file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
