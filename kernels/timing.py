"""Kernel times that mean something: CUDA-graph replays over rotated buffers, and the card's own copy as yardstick."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

REPLAYS = 7
WARM_UP_SECONDS = 0.01


def graph_seconds(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Median seconds of one call. All calls form one CUDA graph, replayed `replays` times on a warm card.

    Give each call buffers of its own, together more than four times the L2 cache, or the cache is what is timed.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    _warm_up(graph)
    times: list[float] = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times) / len(calls)


def _warm_up(graph: torch.cuda.CUDAGraph) -> None:
    """Replays until the clocks have had time to rise: an idle card runs its first kernels a tenth slower."""
    until = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()


def rotations(bytes_of_a_call: int, device: torch.device) -> int:
    """How many sets of buffers it takes to exceed four times the L2 cache."""
    l2: int = torch.cuda.get_device_properties(device).L2_cache_size
    return 4 * l2 // max(bytes_of_a_call, 1) + 1


@triton.jit
def copy_kernel(source, target, words, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


def copy_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """C: bytes per second, read plus written, of a Triton copy of `size` bytes of random data.

    Not `copy_`: in a graph it becomes a slow memcpy node from 512 MiB on.
    """
    source = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    best = min(
        graph_seconds([lambda block=block, warps=warps: _copy(source, target, block, warps)])  # type: ignore[misc]
        for block, warps in ((1024, 4), (2048, 4), (4096, 8))
    )
    bandwidth: float = 2 * size / best
    return bandwidth


def _copy(source: torch.Tensor, target: torch.Tensor, block: int, warps: int) -> None:
    programs = triton.cdiv(source.numel(), block)
    copy_kernel[(programs,)](source, target, source.numel(), BLOCK=block, num_warps=warps)
