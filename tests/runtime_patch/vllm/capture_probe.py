"""vLLM's own eager break around our indexer: what a PIECEWISE capture keeps for its replays.

The capture is vLLM's class without a graph: it is told to be capturing, and notes what it would call again.
"""

import types

import torch

from tests.runtime_patch.vllm import probe


def look(job):
    from vllm.compilation import breakable_cudagraph as breaks
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import override_forward_context

    from shardmill.runtime_patch import indexer

    class Capture(breaks.BreakableCUDAGraphCapture):
        def __init__(self):
            self._capturing, self.kept = True, []

        def add_eager(self, call):
            self.kept.append(call)
            return call()

    breaks._weak_ref_capture_arg = lambda value: value  # a CPU tensor has no weak reference of vLLM's kind
    calls = []

    def op_of(cls):
        op = object.__new__(cls)
        torch.nn.Module.__init__(op)
        op.bounded, op.topk_indices_buffer = True, torch.zeros(4, 8, dtype=torch.int32)
        op.k_cache = types.SimpleNamespace(prefix="indexer")
        op.reserve = lambda device: calls.append("reserve")
        op.stock_forward = lambda *args, **pooling: calls.append("index")
        return op

    def context(metadata):
        return types.SimpleNamespace(
            attn_metadata=metadata, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE, additional_kwargs={}
        )

    op, capture, hidden = op_of(indexer.BoundedIndexer), Capture(), torch.zeros(4, 8)
    breaks.BreakableCUDAGraphCapture._tls.active = capture
    with override_forward_context(context(None)):
        op.forward_cuda(hidden, hidden, None, hidden, positions=None)
    breaks.BreakableCUDAGraphCapture._tls.active = None
    captured, calls[:] = list(calls), []
    metadata = {"indexer": types.SimpleNamespace(num_prefills=0, prefill=None)}
    with override_forward_context(context(metadata)):
        for call in capture.kept:
            call()
    return {"breaks": len(capture.kept), "captured": captured, "replayed": calls}


if __name__ == "__main__":
    probe.main(look)
