"""Bytes of the parameters that the real model holds on a rank, by parameter, in a process of its own."""

from tests.runtime_patch.vllm import probe

SHARED = ("embed_tokens", "lm_head", "shared_head.head")  # the draft's are the main model's


def sizes(model, leave_out=()):
    return {
        name: parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if not any(part in name for part in leave_out)
    }


def look(job):
    from vllm.config import set_current_vllm_config
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = probe.engine_config(job)
    with set_current_vllm_config(config):
        probe.start_world(job)
        report = {"main": sizes(probe.build(config))}
    draft_config, draft_model = probe.draft_of(config)
    with set_current_vllm_config(draft_config):
        report["draft"] = sizes(probe.build(draft_config, draft_model), leave_out=SHARED)
    return report


if __name__ == "__main__":
    probe.main(look)
