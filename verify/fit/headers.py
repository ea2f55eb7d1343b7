"""The two things read of a checkpoint: its config.json and its tensors' names, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardmill.verify.fit.families import with_defaults
from shardmill.verify.fit.shape import ConfigError, Shape, read_shape
from shardmill.verify.fit.weights import Headers, WeightBytes, weights_per_rank
from shardmill.verify.questions.structure import structure_faults
from shardmill.verify.reading.checkpoint import Checkpoint, open_checkpoint
from shardmill.verify.reading.declarations import declarations_in
from shardmill.verify.reading.source import Source
from shardmill.verify.rules.findings import Report, Severity


@dataclass(frozen=True, slots=True)
class Facts:
    """What `fit` knows of a checkpoint."""

    shape: Shape
    headers: Headers
    kv_heads: int

    @property
    def block_fp8(self) -> bool:
        """Whether any weight goes through the block-FP8 GEMM path."""
        return any(name.endswith(".weight_scale_inv") for name in self.headers)

    def weights(self, ranks: int, *, draft: bool, vision: bool) -> WeightBytes:
        layers = len(self.shape.layers)
        return weights_per_rank(
            self.headers, ranks, layers=layers, draft=draft, vision=vision, kv_heads=self.kv_heads
        )


def read_facts(source: Source) -> Facts:
    """Open a checkpoint. Raises ConfigError without a config.json, or where not every tensor's header can be read."""
    report = Report("fit")
    checkpoint = open_checkpoint(source, report)
    if not checkpoint.config:
        raise ConfigError(
            f"{source.where}: config.json is missing or unreadable; fit reads the cache's layout there"
        )
    if not checkpoint.tensors:
        raise ConfigError(
            f"{source.where}: no .safetensors header could be read; fit counts the weights there"
        )
    report.add(*structure_faults(checkpoint))
    errors = [finding for finding in report.worst_first() if finding.severity is Severity.ERROR]
    if errors:
        first = f"{errors[0].rule.sentence} ({errors[0].file})"
        raise ConfigError(
            f"{source.where}: {len(errors):,} errors in its files, the first: {first} fit would count too few weights; "
            "see shardmill verify integrity"
        )
    headers = {name: (tensor.dtype, tensor.shape) for name, tensor in checkpoint.tensors.items()}
    config = with_defaults(_declaring(checkpoint))
    return Facts(read_shape(config), headers, _linear_free_heads(config))


def _declaring(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """config.json, with what hf_quant_config.json declares where it declares nothing itself."""
    if not checkpoint.quantization or any(declarations_in(checkpoint.config)):
        return checkpoint.config
    return {**checkpoint.config, "quantization_config": checkpoint.quantization}


def _linear_free_heads(config: Mapping[str, Any]) -> int:
    """KV heads that k_proj and v_proj are cut by; 0 where those names belong to linear attention and cut by rank."""
    text = config.get("text_config") or config
    if text.get("linear_attn_config"):
        return 0
    return int(text.get("num_key_value_heads", 0) or 0)
