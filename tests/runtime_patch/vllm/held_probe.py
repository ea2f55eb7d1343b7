"""What the real loader makes of checkpoints of any architecture: folder -> what every weight became, or the error.

{"folder": {"weights": {module: dtype}, "empty": [parameters that no tensor filled]} or {"error": "..."}}
"""

import json
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from tests.runtime_patch.vllm import probe
from tests.runtime_patch.vllm.fake_platform import prepare

POISON = 0xA5  # in every byte before loading; of random bytes one in 256 is the same
POISONED_SHARE = 0.05
WEIGHTS = ("weight", "w13_weight", "w2_weight")


def bytes_of(parameter):
    return parameter.data.reshape(-1).view(torch.uint8)


def tensors_of(folder, stack):
    for file in sorted(Path(folder).glob("*.safetensors")):
        opened = stack.enter_context(safe_open(file, "pt"))
        yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118


def verdict(folder, job, first):
    from vllm.config import set_current_vllm_config

    engine = {"max_model_len": 512, "kv_cache_dtype": "auto", "limit_mm_per_prompt": {"image": 1, "video": 0}}
    try:
        config = probe.engine_config({"checkpoint": folder, "engine": engine})
        with set_current_vllm_config(config), ExitStack() as stack:
            if first:
                probe.start_world(job)
            model = probe.build(config)
            for parameter in model.parameters():
                bytes_of(parameter).fill_(POISON)
            model.load_weights(tensors_of(folder, stack))
    except Exception as error:
        import traceback

        if job.get("loud"):
            traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    empty, weights = [], {}
    for name, parameter in model.named_parameters():
        if (bytes_of(parameter) == POISON).float().mean() > POISONED_SHARE:
            empty.append(name)
        module, _, leaf = name.rpartition(".")
        if leaf in WEIGHTS:
            place = module if leaf == "weight" else f"{module}.{leaf.removesuffix('_weight')}"
            weights[place] = str(parameter.dtype).removeprefix("torch.")
    return {"weights": weights, "empty": empty}


def look(job):
    from vllm.model_executor.models import registry

    prepare()
    registry._run_in_subprocess = lambda inspect: (
        inspect()
    )  # a process for each class costs ten seconds of CPU
    report = {}
    for number, folder in enumerate(job["checkpoints"]):
        report[folder] = verdict(folder, job, first=number == 0)
        Path(job["out"]).write_text(json.dumps(report))  # what is known if a later one dies
    return report


if __name__ == "__main__":
    probe.main(look)
