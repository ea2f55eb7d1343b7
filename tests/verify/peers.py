"""False alarms: checkpoints that other tools write are judged clean. `python -m tests.verify.peers FOLDER`

Needs llm-compressor, compressed-tensors and transformers, best in an environment of their own (CPU torch is enough);
the judge needs numpy, xxhash, click and rich beside them. Small random models are made, quantized by each tool, and
asked integrity and lint; the findings are printed, and the exit code is 1 if there is one that this page does not name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

IGNORE = ["lm_head", "re:.*mlp.gate$"]

# What is truly wrong with what a tool writes: its model_free_ptq gives gate and up of an expert own global scales.
TRUE_FINDINGS = {("moe", "free NVFP4A16"): {"fused-global-scale"}}


def make_models(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    common: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    moe = Qwen3MoeConfig(
        **common, moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2, head_dim=64
    )
    words = Tokenizer(models.WordLevel({str(i): i for i in range(512)}, unk_token="0"))
    for name, model in (
        ("llama", LlamaForCausalLM(LlamaConfig(**common))),
        ("moe", Qwen3MoeForCausalLM(moe)),
    ):
        model.to(torch.bfloat16).save_pretrained(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="0").save_pretrained(
            folder / name
        )


def model_free(scheme: str) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        from llmcompressor import model_free_ptq

        model_free_ptq(
            model_stub=str(source),
            save_directory=str(target),
            scheme=scheme,
            ignore=IGNORE,
            device="cpu",
            max_workers=1,
        )

    return write


def oneshot(scheme: str) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        import torch
        from datasets import Dataset
        from llmcompressor import oneshot as run
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(source, torch_dtype="auto")
        calibration: dict[str, Any] = {}
        if scheme in ("NVFP4", "FP8"):
            rows = {"input_ids": torch.randint(0, 512, (8, 32)).tolist(), "attention_mask": [[1] * 32] * 8}
            calibration = {
                "dataset": Dataset.from_dict(rows),
                "num_calibration_samples": 8,
                "max_seq_length": 32,
            }
        run(
            model=model,
            recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=IGNORE),
            **calibration,
        )
        model.save_pretrained(target, save_compressed=True)

    return write


def fine_grained(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8

    # It asks for a GPU to run on; making the checkpoint needs none.
    quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer.validate_environment = lambda self, *_, **__: setattr(
        self, "pre_quantized", False
    )
    config = FineGrainedFP8Config()
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, device_map="cpu")
    model.save_pretrained(target)


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "free FP8_BLOCK": model_free("FP8_BLOCK"),
    "free NVFP4A16": model_free("NVFP4A16"),
    "oneshot FP8_DYNAMIC": oneshot("FP8_DYNAMIC"),
    "oneshot FP8": oneshot("FP8"),
    "oneshot FP8_BLOCK": oneshot("FP8_BLOCK"),
    "oneshot NVFP4A16": oneshot("NVFP4A16"),
    "oneshot NVFP4": oneshot("NVFP4"),
    "transformers FineGrainedFP8": fine_grained,
}


def findings(folder: Path) -> Iterator[str]:
    from shardmill.verify.questions.integrity import integrity
    from shardmill.verify.questions.lint import lint
    from shardmill.verify.reading.source import Folder

    for question in (integrity, lint):
        for finding in question(Folder(folder)).findings:  # type: ignore[operator]
            if finding.severity != "info":
                yield finding.slug


def main() -> int:
    folder = Path(sys.argv[1])
    make_models(folder)
    alarms = 0
    for model in ("llama", "moe"):
        for name, write in WRITERS.items():
            target = folder / f"{model} {name}"
            write(folder / model, target)
            found = set(findings(target))
            expected = TRUE_FINDINGS.get((model, name), set())
            alarms += found != expected
            print(
                f"{model:<6} {name:<28} {', '.join(sorted(found)) or 'clean'}{' (true)' if expected else ''}"
            )
    print(f"{alarms} false alarms in {2 * len(WRITERS)} checkpoints")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
