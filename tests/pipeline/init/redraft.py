"""Writes recipes/ anew from the true-size layouts: python -m tests.pipeline.init.redraft"""

from __future__ import annotations

from pathlib import Path

from shardmill.pipeline.init.draft import RecipeDraft, draft
from tests.pipeline.init.layouts import MODELS, model_parent

RECIPES = Path(__file__).parents[3] / "recipes"

# recipe -> (layout, repository, what the weights become)
DRAFTED = {
    "llama-3.1-8b-fp8": ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", "fp8"),
    "qwen3-8b-fp8": ("qwen3-8b", "Qwen/Qwen3-8B", "fp8"),
    "qwen3-30b-a3b-fp8": ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", "fp8"),
    "deepseek-v3-bf16": ("deepseek-v3", "deepseek-ai/DeepSeek-V3", "bf16"),
    "kimi-linear-48b-a3b-fp8": ("kimi-linear-48b-a3b", "moonshotai/Kimi-Linear-48B-A3B-Instruct", "fp8"),
    "glm-4.5-air-fp8": ("glm-4.5-air", "zai-org/GLM-4.5-Air", "fp8"),
}


def redraft(name: str) -> RecipeDraft:
    layout, repository, aim = DRAFTED[name]
    return draft(model_parent(MODELS[layout]), name, "fp8", aim, repository)  # type: ignore[arg-type]


if __name__ == "__main__":
    for recipe in DRAFTED:
        (RECIPES / f"{recipe}.toml").write_text(redraft(recipe).text, encoding="utf-8")
