"""One converted family at a time under stock vLLM: family -> the error of loading it, null where it loads.

A checkpoint of one family is the child's tensors and manifest entries for that family and the parent's for the
rest, so that the family alone decides.
"""

import json
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.runtime_patch.vllm import probe

FAMILIES = {
    "kda": r"\.self_attn\.(q|k|v|b|f_a|g_a)_proj$",
    "mla": r"\.self_attn\.(q_a_proj|kv_a_proj_with_mqa|q_b_proj)$",
    "o_proj": r"\.self_attn\.o_proj$",
    "mlp": r"\.mlp\.(shared_experts\.)?(gate|up|down)_proj$",
    "lm_head": r"^lm_head$",
    "vision": r"^model\.visual\.",
}


def belongs(family, module):
    """Whether a module of the text model or the vision tower is of the family."""
    found = re.search(FAMILIES[family], module) is not None
    return found and (family == "vision") == module.startswith("model.visual.")


def config_of(job, family):
    """The child's config with the manifest's entries of the experts and one family."""
    config = json.loads((Path(job["checkpoint"]) / "config.json").read_text())
    quantization = config["quantization_config"]
    quantization["quantized_layers"] = {
        module: entry
        for module, entry in quantization["quantized_layers"].items()
        if entry["quant_algo"] == "NVFP4" or belongs(family, module)
    }
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(child, parent, family):
    """Name and tensor: the family's from the child, all others from the parent."""
    for name, tensor in child:
        module = name.rpartition(".")[0]
        if belongs(family, module):
            yield name, tensor
        elif not name.endswith(".weight_scale_inv"):
            yield name, parent.read(name)


def look(job):
    from vllm.config import set_current_vllm_config

    report = {}
    with ExitStack() as stack:
        child = probe.Checkpoint(job["checkpoint"], stack)
        parent = probe.Checkpoint(job["parent"], stack)
        for number, family in enumerate(FAMILIES):
            config = probe.engine_config({"checkpoint": str(config_of(job, family))})
            with set_current_vllm_config(config):
                if number == 0:
                    probe.start_world(job)
                model = probe.build(config)
                try:
                    model.load_weights(tensors_of(child, parent, family))
                    report[family] = None
                except Exception as error:
                    report[family] = f"{type(error).__name__}: {error}"
    return report


if __name__ == "__main__":
    probe.main(look)
