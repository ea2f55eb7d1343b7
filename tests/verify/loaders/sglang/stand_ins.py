"""What SGLang asks of a machine with a card, where there is none: its kernels' modules, and a card that it believes in.

Its own code runs as it is; what is put in place is imported or asked while a model is built and never multiplies. A
name of a kernel's module becomes a class that swallows every call, a decorator gives its function back.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CARD = "NVIDIA H200"
MEMORY_BYTES = 140 << 30
KERNELS = (
    *(
        "sgl_kernel",
        "sglang_kernel",
        "flashinfer",
        "deep_gemm",
        "deep_ep",
        "flash_mla",
        "flash_attn",
        "triton",
    ),
    *(
        "cuda",
        "cutlass",
        "tilelang",
        "humming",
        "quack",
        "nvshmem",
        "tvm_ffi",
        "kernels",
        "torch_memory_saver",
    ),
    *("xgrammar", "llguidance", "outlines", "openai_harmony", "anthropic", "datasets", "modelscope", "av"),
    *("decord", "decord2", "soundfile", "torchcodec", "torchaudio", "torchvision", "timm", "mistral_common"),
    *("watchfiles", "uvloop", "smg_grpc_servicer", "IPython", "deepseek_recipe", "partial_json_parser"),
)
ANSWERS = {"get_num_sms": lambda *_: 132, "backend": "cuda", "__version__": "99.0.0"}
NO_MODELS = "no_models"  # SGLang imports every model at once, unless a package of models is named


class Kernel(type):
    """The class of whatever is taken from a module that is not there."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = ANSWERS.get(name) or stand_in(name)
        setattr(cls, name, made)
        return made

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        decorated = len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], type)
        return args[0] if decorated else type.__call__(cls)

    def __iter__(cls) -> Any:
        return iter(())

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


def stand_in(name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self

    def schema(*_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    body = {
        "__init__": lambda self, *args, **kwargs: None,
        "__class_getitem__": classmethod(lambda cls, _: cls),
        "__getattr__": lambda self, leaf: ANSWERS.get(leaf) or stand_in(leaf),
        "__call__": call,
        "__get_pydantic_core_schema__": classmethod(schema),
    }
    return Kernel(name, (), body)


class Missing(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ANSWERS:
            raise AttributeError(name)
        made = ANSWERS.get(name) or stand_in(name)
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        self.roots = {root for root in KERNELS if importlib.util.find_spec(root) is None}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        made = Missing(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: Any) -> None:
        pass


class Nothing:
    """A stream or an event of the card: made with a model, used in a forward alone."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class OnCpu(TorchFunctionMode):
    """Whatever is made on the card, or sent to it, is on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: _here(value) for key, value in (kwargs or {}).items() if key != "pin_memory"}
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(_here, args), **kwargs)


def _here(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def install() -> None:
    """Before the first import of SGLang: libraries that look for others, then the stand-ins, then the card."""
    import openai  # noqa: F401
    import transformers.utils.import_utils as known

    for name in dir(known):
        if name.startswith("is_") and name.endswith("_available"):
            try:
                getattr(known, name)()
            except Exception:
                continue  # of a question that wants an argument
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer  # noqa: F401

    os.environ |= {"SGLANG_EXTERNAL_MODEL_PACKAGE": NO_MODELS, "HF_HUB_OFFLINE": "1"}
    empty = types.ModuleType(NO_MODELS)
    empty.__path__ = []
    sys.modules[NO_MODELS] = empty
    sys.meta_path.insert(0, Finder())
    _card((9, 0))
    OnCpu().__enter__()


def _card(capability: tuple[int, int]) -> None:
    torch.version.cuda = "13.0"
    torch.compile = lambda made=None, **_: made if made is not None else (lambda function: function)
    properties = SimpleNamespace(
        name=CARD,
        major=capability[0],
        minor=capability[1],
        total_memory=MEMORY_BYTES,
        multi_processor_count=132,
        warp_size=32,
        shared_memory_per_block_optin=232448,
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "get_device_capability": capability,
        "get_device_name": CARD,
        "get_device_properties": properties,
        "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
        "empty_cache": None,
        "synchronize": None,
        "current_stream": Nothing(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.Stream = torch.cuda.Event = Nothing
