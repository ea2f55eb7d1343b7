"""What a parameter of vLLM's GLM-5.3 must hold after loading, told from the checkpoint alone.

Independent of the loaders under test: a table of how each module's rows or columns are dealt over the ranks.
"""

import re
from collections.abc import Callable

import torch

Read = Callable[[str], torch.Tensor]

JOINED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvbfg_a": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
    "wk_weights_proj": ("wk", "weights_proj"),
}
WHOLE_ON_EVERY_RANK = {"q_a_proj", "kv_a_proj_with_mqa", "f_a_proj", "g_a_proj", "wk", "weights_proj"}
BY_ROWS = {"q_b_proj", "kv_b_proj", "f_b_proj", "g_b_proj", "q_conv1d", "k_conv1d", "v_conv1d"}
BY_ROWS |= {"lm_head", "embed_tokens", "dt_bias"}
BY_COLUMNS = {"o_proj", "down_proj"}
EXPERTS = re.compile(
    r"(.*\.experts)\.routed_experts\.(w13|w2)_(weight|weight_scale|weight_scale_2|input_scale)$"
)


def checkpoint_name(parameter: str) -> str:
    """The checkpoint's spelling of a parameter's name."""
    name = parameter.replace(".mtp_block.", ".", 1)
    for inner, outer in (
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        ("visual.", "model.visual."),
        ("model.layers.", "model.language_model.layers."),
        ("model.embed_tokens.", "model.language_model.embed_tokens."),
    ):
        if name.startswith(inner):
            return outer + name[len(inner) :]
    return name


def expected(parameter: str, read: Read, rank: int, ranks: int) -> torch.Tensor:
    """The tensor that rank `rank` of `ranks` must hold, in the checkpoint's dtype."""

    def share(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(ranks, dim)[rank]

    name = checkpoint_name(parameter)
    if found := EXPERTS.match(name):
        return _experts(read, share, *found.groups())
    *path, module, kind = name.split(".")
    parent = ".".join(path)
    if module in JOINED:
        parts = [(part, read(f"{parent}.{part}.{kind}")) for part in JOINED[module]]
        return torch.cat([t if part in WHOLE_ON_EVERY_RANK else share(t, 0) for part, t in parts])
    tensor = read(name)
    if name.startswith("model.visual."):
        return _vision(tensor, module, kind, path, share)
    if kind == "A_log":
        return share(tensor.view(1, 1, -1, 1), 2)
    if module in BY_ROWS or kind in BY_ROWS:
        return share(tensor, 0)
    return share(tensor, 1) if module in BY_COLUMNS else tensor


def _vision(tensor, module, kind, path, share):
    """The tower's qkv is dealt head by head; `proj` of attention by columns, `proj` of the merger by rows."""
    if module == "qkv":
        return torch.cat([share(third, 0) for third in tensor.chunk(3, 0)])
    if module == "down_proj" or (module == "proj" and path[-1] == "attn"):
        return tensor if kind == "bias" else share(tensor, 1)
    return share(tensor, 0) if (path[-1], module) == ("merger", "proj") else tensor


def _experts(read, share, bank, which, kind):
    """w13 stacks gate over up, each dealt by rows; w2 is dealt by columns; scalars are whole."""
    experts = []
    for expert in range(10_000):
        try:
            experts.append([read(f"{bank}.{expert}.{m}.{kind}") for m in _members(which)])
        except KeyError:
            break
    if kind in ("weight_scale_2", "input_scale"):
        return torch.stack([torch.stack([t.reshape(()) for t in e]) for e in experts]).squeeze(-1)
    dim = 0 if which == "w13" else 1
    return torch.stack([torch.cat([share(t, dim) for t in e]) for e in experts])


def _members(which):
    return ("gate_proj", "up_proj") if which == "w13" else ("down_proj",)
