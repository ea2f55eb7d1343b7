"""Which parameter each tensor of a checkpoint reaches, whatever a loader does between: by following storages."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class Loaded:
    """What one load did: tensor -> the parameters that it reached, parameter -> "whole", "part" or "none"."""

    reached: dict[str, set[str]]
    filled: dict[str, str]
    error: str = ""


class Trace(TorchDispatchMode):
    """Follows every tensor that comes of a named one into the parameters, and marks the bytes that it writes there."""

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.names = {storage(p): name for name, p in parameters if p.numel()}
        self.marks = {
            storage(p): torch.zeros(p.untyped_storage().nbytes(), dtype=torch.int8)
            for _, p in parameters
            if p.numel()
        }
        self.sources: dict[int, set[str]] = {}
        self.kept: list[torch.Tensor] = []  # so that no address is used twice
        self.reached: dict[str, set[str]] = {}
        self.marking = False

    def name(self, name: str, tensor: torch.Tensor) -> None:
        self.sources[storage(tensor)] = {name}
        self.kept.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.marking:
            return out
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func._schema.name.startswith("aten::") and func._schema.name.endswith("_") and given:
            self._follow(given[1:], [given[0]], written=True)
        else:
            self._follow(given, [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)])
        return out

    def _follow(self, given: list[torch.Tensor], made: list[torch.Tensor], *, written: bool = False) -> None:
        found = set[str]().union(*(self.sources.get(storage(tensor), ()) for tensor in given))
        for tensor in made if found else ():
            place = storage(tensor)
            if place not in self.names:
                self.sources.setdefault(place, set()).update(found)
                self.kept.append(tensor)
            elif written:
                self._mark(place, tensor)
                for name in found:
                    self.reached.setdefault(name, set()).add(self.names[place])

    def _mark(self, place: int, tensor: torch.Tensor) -> None:
        self.marking = True
        marks = self.marks[place].view(_WORDS[tensor.element_size()])
        torch.as_strided(marks, tensor.size(), tensor.stride(), tensor.storage_offset()).fill_(-1)
        self.marking = False


class Inline:
    """In place of a pool of threads: a mode of dispatch belongs to one thread."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def submit(self, function: Any, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def load(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> Loaded:
    parameters = list(model.named_parameters())
    trace = Trace(parameters)

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            trace.name(name, tensor)
            yield name, tensor

    pool, concurrent.futures.ThreadPoolExecutor = concurrent.futures.ThreadPoolExecutor, Inline
    try:
        with trace:
            model.load_weights(named())
    except Exception as error:
        return Loaded({}, {}, f"{type(error).__name__}: {error}")
    finally:
        concurrent.futures.ThreadPoolExecutor = pool
    return Loaded(trace.reached, dict(_filled(trace, parameters, dict(model.named_parameters()))))


def _filled(
    trace: Trace, before: list[tuple[str, torch.Tensor]], after: dict[str, torch.Tensor]
) -> Iterator[tuple[str, str]]:
    for name, parameter in before:
        if not parameter.numel():
            continue
        now = after.get(name)
        if now is not None and storage(now) != storage(parameter):
            found = trace.sources.get(storage(now), set())
            for each in found:
                trace.reached.setdefault(each, set()).add(name)
            yield name, "whole" if found else "none"
            continue
        marks = trace.marks[storage(parameter)] != 0
        yield name, "whole" if bool(marks.all()) else "part" if bool(marks.any()) else "none"
