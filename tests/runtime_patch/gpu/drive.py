"""One case: the toy served in process by the real vLLM on this GPU. Writes what it answered, as JSON.

    python3 -m tests.runtime_patch.gpu.drive CASE CHECKPOINTS OUT.json

Questions: `short`, sixteen prompts of 160 tokens and two shorter ones, scored and continued; `long`, one of 9,000
tokens, beyond the indexer's 2,048 and a block of the cache and prefilled in chunks, scored and continued; `again`, it
once more, now from the prefix cache; `four`, four requests at once, one of them long; `alone`, the short three of
those, one after the other; `pictures`, where the case allows them, four drawn pictures in a prompt each, scored.

What is changed inside vLLM, and why, is in inside.py.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.runtime_patch.gpu import inside
from tests.runtime_patch.gpu.audit import install
from tests.runtime_patch.gpu.cases import BASE, CASES
from tests.runtime_patch.gpu.latents import Latents
from tests.runtime_patch.gpu.trace import trace

faulthandler.enable()
SHORT, LONG, NEW = [160] * 16 + [5, 37], 9000, 16


def note(*words: Any) -> None:
    print(f"[{time.perf_counter():7.1f}]", *words, flush=True)


def prompts(vocabulary: int) -> tuple[list[list[int]], list[int]]:
    draw = random.Random(4)
    short = [[draw.randrange(16, vocabulary) for _ in range(n)] for n in SHORT]
    return short, [draw.randrange(16, vocabulary) for _ in range(LONG)]


def answers(outputs: Any) -> list[dict[str, Any]]:
    rows = []
    for output in outputs:
        one = output.outputs[0]
        rows.append(
            {
                "tokens": list(one.token_ids),
                "logprobs": [_plain(entry) for entry in one.logprobs or []],
                "prompt": output.prompt_token_ids,
                "prompt_logprobs": [entry and _plain(entry) for entry in output.prompt_logprobs or []],
                "cached": output.num_cached_tokens,
            }
        )
    return rows


def _plain(entry: Any) -> dict[str, float]:
    return {str(token): round(value.logprob, 6) for token, value in entry.items()}


def model_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def slept(llm: Any, level: int) -> None:
    """Asleep and awake again. Level 2 throws the weights away, so they are loaded again."""
    llm.sleep(level=level)
    if level == 1:
        return llm.wake_up()
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    return llm.wake_up(tags=["kv_cache"])


def seams(llm: Any) -> dict[str, list[str]]:
    """What stands at the plugin's hooks: attention with its rows, the indexer, the FP8 kernels."""
    found: dict[str, set[str]] = {}
    for module in model_of(llm).modules():
        if hasattr(module, "impl") and hasattr(module, "attn_backend"):
            rows = getattr(getattr(module.impl, "layout", None), "tag", "stock rows")
            found.setdefault("attention", set()).add(f"{type(module.impl).__name__} {rows}")
        kernel = getattr(getattr(module, "quant_method", None), "fp8_linear", None)
        if kernel is not None:
            found.setdefault("fp8", set()).add(type(kernel).__name__)
        if hasattr(module, "topk_indices_buffer") and hasattr(module, "forward_cuda"):
            found.setdefault("indexer", set()).add(
                f"{type(module).__name__} bounded={getattr(module, 'bounded', False)}"
            )
    return {name: sorted(values) for name, values in found.items()}


def questions(llm: Any, vocabulary: int, drafts: bool) -> dict[str, Any]:
    from vllm import SamplingParams

    greedy = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "detokenize": False, "logprobs": 10}
    scored = SamplingParams(**greedy, prompt_logprobs=None if drafts else 20)
    plain = SamplingParams(**greedy)
    short, long = prompts(vocabulary)
    batches = {
        "short": (short, scored),
        "long": ([long], scored),
        "again": ([long], plain),
        "four": ([long[1000:3500], *short[:2], short[-1]], plain),
        "alone": ([], plain),
    }
    answer: dict[str, Any] = {}
    for name, (batch, how) in batches.items():
        begin = time.perf_counter()
        asked = [{"prompt_token_ids": prompt} for prompt in batch]
        if name == "alone":
            asked = [{"prompt_token_ids": prompt} for prompt in (*short[:2], short[-1])]
            answer[name] = [answers(llm.generate([one], how, use_tqdm=False))[0] for one in asked]
        else:
            answer[name] = answers(llm.generate(asked, how, use_tqdm=False))
        note(name, f"{time.perf_counter() - begin:.2f} s", [row["tokens"][:6] for row in answer[name]][:4])
    return answer


def pictures(llm: Any, folder: Path) -> list[dict[str, Any]]:
    """Four drawn pictures, each within a prompt of words, scored and continued: the vision tower's share."""
    import numpy as np
    from PIL import Image
    from vllm import SamplingParams

    words = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    number = {entry["content"]: entry["id"] for entry in words}
    scored = SamplingParams(
        temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=10, prompt_logprobs=20
    )
    draw, rng = random.Random(6), np.random.default_rng(6)
    asked = []
    for _ in range(4):
        squares = rng.integers(0, 256, (10, 14, 3), dtype=np.uint8).repeat(28, 0).repeat(28, 1)
        before, after = ([draw.randrange(300, 1024) for _ in range(n)] for n in (20, 100))
        middle = [number[f"<|{name}|>"] for name in ("begin_of_image", "image", "end_of_image")]
        picture = {"image": Image.fromarray(squares)}
        asked.append({"prompt_token_ids": [*before, *middle, *after], "multi_modal_data": picture})
    return answers(llm.generate(asked, scored, use_tqdm=False))


def main(name: str, checkpoints: Path, out: Path) -> int:
    case = CASES[name]
    os.environ.update(case.environ)
    os.environ["VLLM_PLUGINS"] = "harness,shardmill" if case.plugin else "harness"
    os.environ[inside.ORDERED] = str(int(case.ordered))
    answer: dict[str, Any] = {"case": name}
    try:
        import torch
        from vllm import LLM

        inside.prepare()
        audit = install(case.audit << 20) if case.audit else None
        folder = checkpoints / case.checkpoint
        engine = BASE | case.engine
        if case.ranks > 1:
            engine |= {"tensor_parallel_size": case.ranks, "disable_custom_all_reduce": True}
        llm = LLM(model=str(folder), **engine)
        note("engine up")
        if case.sleep:
            slept(llm, case.sleep)
        kept = Latents(model_of(llm)) if case.latents else None
        if case.trace:
            answer["trace"] = trace(llm, prompts(1024)[1][:1024])
            note(answer["trace"])
        vocabulary = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
        answer |= {} if case.trace else questions(llm, vocabulary, "speculative_config" in engine)
        if audit:
            answer["audit"] = asdict(audit)
            note(answer["audit"])
        if kept:
            answer["latents"] = kept.save(out.with_suffix(".npz"))
        if case.pictures:
            answer["pictures"] = pictures(llm, folder)
        if case.ranks == 1:
            answer["seams"] = seams(llm)
        answer["peak_mib"] = torch.cuda.max_memory_allocated() >> 20
        answer["plugin"] = "shardmill.runtime_patch.plugin" in sys.modules
        answer["patches"] = (
            sys.modules["shardmill.runtime_patch.plugin"].applied() if answer["plugin"] else {}
        )
    except Exception as error:
        traceback.print_exc()
        answer["error"] = f"{type(error).__name__}: {error}"
    out.write_text(json.dumps(answer))
    print("RESULT", name, answer.get("error", "ok"), answer.get("seams"), flush=True)
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    code = main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(code)  # threads of the engine would keep the process
