"""A CUDA platform for vLLM without a card: it claims a capability and builds models on the CPU.

vLLM finds it through the entry point that the Makefile's target writes. FAKE_CC chooses the card: "12,0" is an
RTX PRO 6000 (SM120), "10,0" a B200 (SM100), "9,0" an H200 (SM90). FAKE_DEVICE is "cpu" to load weights, "meta" to
plan memory.
"""

import os
from types import SimpleNamespace

import torch
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability

CAPABILITY = DeviceCapability(*map(int, os.environ.get("FAKE_CC", "12,0").split(",")))
NAMES = {12: "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 10: "NVIDIA B200", 9: "NVIDIA H200"}
MEMORY_BYTES = 96 << 30
COMPUTE_UNITS = 132


def entry() -> str:
    """What vLLM's entry point calls: the dotted name of the platform class."""
    return "tests.runtime_patch.vllm.fake_platform.FakePlatform"


def prepare() -> None:
    """What vLLM's general entry point calls, in each of its processes: lets modules of Triton kernels be imported."""
    from vllm import triton_utils

    triton_utils.triton.Config = TritonConfig
    properties = SimpleNamespace(
        multi_processor_count=COMPUTE_UNITS, total_memory=MEMORY_BYTES, name=NAMES[CAPABILITY.major]
    )
    torch.cuda.get_device_properties = lambda *_: properties  # FlashInfer's backends ask while they are built
    torch.cuda.Stream = torch.cuda.Event = NoStream


class NoStream:
    """A stream or an event of the card: made with a model, used in a forward alone."""

    def __init__(self, *_, **__):
        pass


class TritonConfig:
    """What a kernel's choices of tuning are where Triton has no driver: vLLM sorts them out while it imports."""

    def __init__(self, kwargs=None, num_warps=4, num_stages=2, **more):
        self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages


class FakePlatform(NonNvmlCudaPlatform):
    device_type = os.environ.get("FAKE_DEVICE", "cpu")

    @classmethod
    def get_device_capability(cls, device_id=0):
        return CAPABILITY

    @classmethod
    def has_device_capability(cls, capability, device_id=0):
        wanted = capability if isinstance(capability, int) else capability[0] * 10 + capability[1]
        return CAPABILITY.to_int() >= wanted

    @classmethod
    def get_device_name(cls, device_id=0):
        return NAMES[CAPABILITY.major]

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return MEMORY_BYTES

    @classmethod
    def device_count(cls):
        return 8

    @classmethod
    def current_device(cls):
        return torch.device(cls.device_type)

    @classmethod
    def num_compute_units(cls, device_id=0):
        return COMPUTE_UNITS

    @classmethod
    def is_fully_connected(cls, physical_device_ids):
        return True

    @classmethod
    def set_device(cls, device):
        return None

    @classmethod
    def get_device_communicator_cls(cls):
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

    @classmethod
    def get_vit_attn_backend(cls, *args, **kwargs):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return AttentionBackendEnum.TORCH_SDPA
