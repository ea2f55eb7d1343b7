"""The parameters that a module of SGLang 0.5.23 has under each quantization method: literal tables.

Read from sglang/srt/layers/quantization: `create_weights` of fp8.py, modelopt_quant.py, gptq, awq and the schemes of
compressed_tensors, as on a card of capability 9.0. Of a bank of experts each name has `w13_` or `w2_` before it. The
first is what holds the codes.
"""

from __future__ import annotations

from collections.abc import Mapping

Parameters = Mapping[str, str]  # name -> dtype in memory

FLOAT: Parameters = {"weight": "BF16"}
METHODS: Mapping[str, Parameters] = {
    "fp8 by block": {"weight": "F8_E4M3", "weight_scale_inv": "F32"},
    "fp8 by tensor": {"weight": "F8_E4M3", "weight_scale": "F32"},
    "fp8 by tensor, static": {"weight": "F8_E4M3", "weight_scale": "F32", "input_scale": "F32"},
    "FP8": {"weight": "F8_E4M3", "weight_scale": "F32", "input_scale": "F32"},
    "FP8_PB_WO": {"weight": "F8_E4M3", "weight_scale_inv": "F32"},
    "FP8_BLOCK_SCALES": {"weight": "F8_E4M3", "weight_scale_inv": "F32"},
    "NVFP4": {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"},
    "W4A16_NVFP4": {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"},
    "float-quantized": {"weight": "F8_E4M3", "weight_scale": "F32"},
    "float-quantized, block": {"weight": "F8_E4M3", "weight_scale": "F32"},
    "float-quantized, static": {"weight": "F8_E4M3", "weight_scale": "F32", "input_scale": "F32"},
    "nvfp4-pack-quantized": {
        "weight_packed": "U8",
        "weight_scale": "F8_E4M3",
        "weight_global_scale": "F32",
        "input_global_scale": "F32",
    },
    "pack-quantized": {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"},
    "gptq": {"qweight": "I32", "qzeros": "I32", "scales": "BF16", "g_idx": "I32"},
    "awq": {"qweight": "I32", "qzeros": "I32", "scales": "BF16"},
    "mxfp4": {"weight": "U8", "weight_scale": "U8"},
}
# Names in the checkpoint of gpt-oss's stacked codes; under this method its class looks for no others.
MXFP4_LEAVES = {"blocks": "weight", "scales": "weight_scale", "weight": "weight of floats"}
# Where a bank's parameter has another dtype.
IN_BANKS: Mapping[str, Parameters] = {"pack-quantized": {"weight_shape": "F32"}, "gptq": {"qzeros": "BF16"}}
# Methods whose parts of a fused module, and whose gate and up, must each be whole blocks.
BLOCKED = ("fp8 by block", "float-quantized, block", "FP8_PB_WO", "FP8_BLOCK_SCALES")
COMPRESSED = tuple(method for method in METHODS if "quantized" in method)  # whose banks have no biases
PACKED_IN_BYTES = (
    "NVFP4",
    "W4A16_NVFP4",
)  # two codes a byte under the name `weight`: half of a float's columns

# quant_method, and where it has one quant_algo, that no table follows; SGLang may know them.
ALGOS = ("FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
FORMATS = ("float-quantized", "nvfp4-pack-quantized", "pack-quantized")
