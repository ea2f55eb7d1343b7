"""Which module of a running model gives other bits for the same input: the source of a difference between two runs.

Every module's first input and its output are summed as integers when it returns, on the device and without a wait.
Two runs of one prompt must give the same list; the modules whose sums of outputs differ while those of their inputs
agree are where bits part.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

RUNS = 4


def bits(value: Any) -> Any:
    """A tensor's bytes, each weighted by its place, as one integer on its device; None for anything else."""
    import torch

    while isinstance(value, tuple | list) and value:
        value = value[0]
    if not isinstance(value, torch.Tensor) or not value.is_cuda or value.numel() == 0:
        return None
    flat = value.detach().contiguous().view(torch.uint8).flatten().to(torch.int64)
    return (flat * (torch.arange(flat.numel(), device=flat.device) % 65521 + 1)).sum()


def trace(llm: Any, prompt: list[int]) -> dict[str, Any]:
    """{"modules": calls of a run, "parted": class and leaf name -> calls that parted over all pairs of runs, ...}"""
    from vllm import SamplingParams

    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    calls: list[tuple[str, str, Any, Any]] = []
    for name, module in model.named_modules():
        module.register_forward_hook(_noting(calls, name))
    how = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    runs = []
    for _ in range(RUNS):
        calls.clear()
        llm.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)
        runs.append([(n, c, _number(a), _number(b)) for n, c, a, b in calls])
    parted: Counter[str] = Counter()
    first = []
    for run in runs[1:]:
        differing = [
            (name, kind)
            for (name, kind, a, b), (_, _, c, d) in zip(runs[0], run, strict=True)
            if a is not None and a == c and b != d
        ]
        parted.update(f"{kind} {name.rpartition('.')[2]}" for name, kind in differing)
        first.append(differing[0] if differing else None)
    return {"modules": len(runs[0]), "parted": dict(parted.most_common()), "first": first}


def _noting(calls: list[tuple[str, str, Any, Any]], name: str) -> Any:
    def note(module: Any, inputs: Any, output: Any) -> None:
        calls.append((name, type(module).__name__, bits(inputs), bits(output)))

    return note


def _number(value: Any) -> int | None:
    return None if value is None else int(value)
