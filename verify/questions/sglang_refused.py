"""What SGLang 0.5.23 refuses of a module whose method is known: sizes that do not fit, parts that do not agree."""

from __future__ import annotations

from shardmill.verify.formats.schemes import FLOATS
from shardmill.verify.formats.sglang_methods import FLOAT, METHODS, PACKED_IN_BYTES, Parameters
from shardmill.verify.formats.sglang_modules import BY_COLUMNS, BY_ROWS
from shardmill.verify.questions.sglang_config import Asked, Method
from shardmill.verify.questions.sglang_lists import RefusedError
from shardmill.verify.questions.sglang_place import Module
from shardmill.verify.reading.header import Tensor


def check_size(module: Module, tensor: Tensor, algo: str, leaf: str) -> None:
    """Two codes a byte do not fit where one number was expected, nor floats where a class copies with care."""
    if leaf != "weight":
        return
    last = module.name.rpartition(".")[2] if module.branch() == "single" else ""
    padded = last in BY_COLUMNS and (algo in PACKED_IN_BYTES or not algo)
    downcast = algo and last in BY_ROWS and tensor.dtype in FLOATS
    if downcast or ((algo in PACKED_IN_BYTES) != (tensor.dtype == "U8") and not padded):
        raise RefusedError(
            f"{tensor.name}: {tensor.dtype} {list(tensor.shape)} does not fit {algo or 'a float'} weight"
        )


def check_joined(module: Module, algo: str, parameters: Parameters) -> None:
    """DeepSeek's class puts the rows of the two a-projections together, of AWQ the columns, whatever they are."""
    for leaf in parameters:
        pair = [tensor for leaves in module.parts.values() for tensor in leaves.get(leaf, ())]
        across = {tensor.shape[-1] for tensor in pair if len(tensor.shape) == 2}
        if any(len(tensor.shape) == 1 for tensor in pair) or (algo != "awq" and len(across) > 1):
            raise RefusedError(f"{pair[0].name}: joined with the other a-projection's it does not fit")


def check_shared(modules: list[Module], method: Method) -> None:
    """DeepSeek's class asks the down projection of its shared experts for the block of their FP8."""
    algos = {module.name: method.algo(Asked(module.listed, module.holds)) for module in modules}
    for name, algo in algos.items():
        if (
            name.endswith(".mlp.shared_experts.gate_up_proj")
            and METHODS.get(algo, FLOAT).get("weight") == "F8_E4M3"
        ):
            down = name.replace("gate_up_proj", "down_proj")
            if algos.get(down, algo) == "":
                raise RefusedError(f"{down}: a float beside FP8 gate and up of the shared experts")


def check_merged(module: Module, algo: str, parameters: Parameters) -> None:
    """Its loader divides a weight of that name and scales with as many rows; a scale of the whole does not fit."""
    if "weight" not in parameters:
        raise RefusedError(f"{module.name}: {algo} gives it no weight for its loader to divide")
    for tensor in (one for leaf in parameters for one in module.parts[""].get(leaf, ())):
        if len(tensor.shape) < 2 and tensor.shape in ((), (1,)):
            raise RefusedError(f"{tensor.name}: {list(tensor.shape)} does not fit one scale for each part")


def check_blocks(module: Module, method: Method) -> None:
    """Every part of a fused module must be whole blocks."""
    for part, tensor in module.weights():
        if len(tensor.shape) < 2:
            continue
        rows = tensor.shape[-1] if part == "w2" else tensor.shape[-2]
        for each in method.joint(module.name) if module.branch() == "single" else [rows]:
            if each % method.block[0]:
                block = method.block[0]
                raise RefusedError(f"{tensor.name}: {each} rows do not divide into blocks of {block}")
