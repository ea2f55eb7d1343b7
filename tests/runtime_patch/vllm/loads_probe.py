"""The real loader with the plugin on a list of checkpoints: folder -> why it refuses, null where it loads."""

from contextlib import ExitStack

import torch

from tests.runtime_patch.vllm import probe

POISON = 0xA5  # in every byte before loading; the checkpoints hold zeros alone


def bytes_of(parameter):
    return parameter.data.reshape(-1).view(torch.uint8)


def verdict(folder, job, first):
    """The error of building or loading, or the parameters that were not filled whole."""
    from vllm.config import set_current_vllm_config

    config = probe.engine_config({"checkpoint": folder})
    with set_current_vllm_config(config), ExitStack() as stack:
        if first:
            probe.start_world(job)
        try:
            model = probe.build(config)
            for parameter in model.parameters():
                bytes_of(parameter).fill_(POISON)
            model.load_weights(iter(probe.Checkpoint(folder, stack)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        empty = [name for name, p in model.named_parameters() if (bytes_of(p) == POISON).any()]
        return f"not filled: {', '.join(empty)}" if empty else None


def look(job):
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return {
        folder: verdict(folder, job, first=number == 0) for number, folder in enumerate(job["checkpoints"])
    }


if __name__ == "__main__":
    probe.main(look)
