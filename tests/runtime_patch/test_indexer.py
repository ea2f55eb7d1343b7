"""The bounded indexer on stand-ins for vLLM's operators: which pools each row selects, and what is left to stock."""

import importlib
import sys
import types
from dataclasses import dataclass, field

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from shardmill.kernels import torch_topk  # noqa: E402
from shardmill.runtime_patch import tiling  # noqa: E402
from tests.runtime_patch.fake_vllm import Namespace, State  # noqa: E402

PAGE, DIM, HEADS, KPOOL, TOPK = 4, 8, 2, 4, 24  # pools a page, code bytes a pool, ..., tokens selected
K = TOPK // KPOOL
TILE = 4 * PAGE  # pools of a tile: the tests' budget holds about so many


@dataclass
class Prefill:
    chunks: list
    max_prefill_seq_len: int
    row_shard_sizes: object = None


@dataclass
class Metadata:
    num_prefills: int
    num_decode_tokens: int
    prefill: object


@dataclass
class Seen:
    stock: list = field(default_factory=list)
    gathered: list = field(default_factory=list)
    logits: list = field(default_factory=list)
    forward: dict = field(default_factory=dict)
    workspace: int | None = None
    exchange: list = field(default_factory=list)
    capture: "Capture | None" = None


class Capture:
    """vLLM's breakable capture: a decorated function ends the graph's segment, and replays call it again."""

    def __init__(self):
        self.segments = []

    def add_eager(self, call):
        self.segments.append(call)
        return call()

    def replay(self):
        for call in self.segments:
            call()


class Stock:
    """vLLM's class: here it notes what it was asked and fills its rows with a marker."""

    def __init__(self, k_cache, buffer, seen):
        self.k_cache, self.topk_indices_buffer, self.seen = k_cache, buffer, seen
        self.topk_tokens, self.head_dim, self.use_fp4_cache = TOPK, DIM, False
        self.max_pool_len = 1000

    def forward_cuda(self, hidden_states, q, k, weights, **pooling):
        metadata = self.seen.forward["attn_metadata"]["indexer"]
        self.seen.stock.append((list(metadata.prefill.chunks), metadata.prefill.row_shard_sizes))
        self.seen.workspace = getattr(self, "max_total_seq_len", None)
        self.topk_indices_buffer[: hidden_states.shape[0]] = -1
        return self.topk_indices_buffer


class Shard:
    """Rows shared out over ranks: this rank has rows 0 .. 2 of each chunk."""

    exchanged: list = []  # noqa: RUF012  shared on purpose

    @classmethod
    def from_metadata(cls, prefill, num_decode_tokens):
        return None if prefill.row_shard_sizes is None else cls()

    def narrow(self, chunk):
        return chunk.token_start, chunk.token_start + 3, chunk.cu_seqlen_ks[:3], chunk.cu_seqlen_ke[:3]

    def exchange_topk(self, buffer, width):
        Shard.exchanged.append(width)


@pytest.fixture
def world(monkeypatch):
    """shardmill.runtime_patch.indexer among stand-ins; tiles of two pages so that small contexts have several."""
    seen, state = Seen(), State()

    def gather(cache, values, scales, pages, offsets):
        seen.gathered.append(int(offsets[-1]))
        for request in range(len(offsets) - 1):
            for n in range(int(offsets[request + 1] - offsets[request])):
                row = cache[int(pages[request, n // PAGE]), n % PAGE]
                values.view(torch.uint8)[int(offsets[request]) + n] = row[:DIM]
                scales[int(offsets[request]) + n] = row[DIM:]

    def logits(q, kv, weights, begins, ends, width):
        seen.logits.append((q[0].shape[0], width))
        out = torch.full((q[0].shape[0], width), float("nan"))
        for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            keys = kv[0][begin:end].float() * kv[1][begin:end, None]
            out[row, : end - begin] = (torch.relu(q[0][row].float() @ keys.T) * weights[row][:, None]).sum(0)
        return out

    def breaks(function):
        def call(*args, **kwargs):
            if seen.capture is None:
                return function(*args, **kwargs)
            return seen.capture.add_eager(lambda: function(*args, **kwargs))

        return call

    def expand(pools, lengths, kpool):
        return torch.where(pools < 0, -1, pools).repeat_interleave(kpool, 1).to(torch.int32)

    parallel = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "use_ubatching": False,
    }
    config = Namespace(
        {
            "quant_config": "ours",
            "parallel_config": Namespace(parallel),
            "scheduler_config": Namespace({"max_num_seqs": 2, "max_num_batched_tokens": 64}),
            "speculative_config": None,
        }
    )
    modules = {
        "vllm": {},
        "vllm._custom_ops": {"cp_gather_indexer_k_quant_cache": gather},
        "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": breaks},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.forward_context": {"get_forward_context": lambda: types.SimpleNamespace(**seen.forward)},
        "vllm.model_executor.custom_op": {"CustomOp": object, "op_registry_oot": {}},
        "vllm.model_executor.layers.sparse_attn_indexer": {
            "PrefillRowShard": Shard,
            "as_fp32_logits": lambda x, _: x,
            "_reserve_row_shard_exchange_transient": lambda buffer, device: seen.exchange.append(
                buffer.shape
            ),
        },
        "vllm.models.glm5next.common.sparse_indexer": {"RADIX_TOPK_WORKSPACE_SIZE": 1024},
        "vllm.models.glm5next.nvidia.ops": {
            "kpool_compress": types.SimpleNamespace(expand_pools_and_append_tail=expand)
        },
        "vllm.models.glm5next.nvidia.sparse_indexer": {"SparseAttnIndexerKpool": Stock},
        "vllm.utils.deep_gemm": {"fp8_fp4_mqa_logits": logits, "mqa_logits_use_mx_scales": lambda: False},
        "vllm.v1.worker.workspace": {"current_workspace_manager": lambda: state},
        "shardmill.runtime_patch.quant_config": {"serves_blocks": lambda config: config == "ours"},
    }
    for name, attributes in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm"]._custom_ops = sys.modules["vllm._custom_ops"]
    monkeypatch.delitem(sys.modules, "shardmill.runtime_patch.indexer", raising=False)
    indexer = importlib.import_module("shardmill.runtime_patch.indexer")
    monkeypatch.setattr(indexer, "_best_of", torch_topk.select)
    yield types.SimpleNamespace(indexer=indexer, seen=seen, config=config)
    sys.modules.pop("shardmill.runtime_patch.indexer", None)


def make(world, lengths, queries):
    """An op over a cache of `lengths` tokens a request, and one chunk of the last `queries` tokens of each."""
    generator = torch.Generator().manual_seed(5)
    pools = [n // KPOOL for n in lengths]
    pages_each = [-(-n // PAGE) + 1 for n in pools]
    order = torch.randperm(sum(pages_each), generator=generator)
    table = torch.zeros(len(lengths), max(pages_each), dtype=torch.int32)
    begin = 0
    for request, count in enumerate(pages_each):
        table[request, :count] = order[begin : begin + count].to(torch.int32)
        begin += count
    cache = torch.empty(sum(pages_each), PAGE, DIM + 4, dtype=torch.uint8)
    # Few distinct codes, so that equal scores occur.
    cache[..., :DIM] = (
        (torch.randint(-2, 3, (*cache.shape[:2], DIM), generator=generator).float())
        .to(torch.float8_e4m3fn)
        .view(torch.uint8)
    )
    cache[..., DIM:] = torch.ones(*cache.shape[:2], 1).view(torch.uint8)
    offsets = torch.tensor([0, *np.cumsum(pools)], dtype=torch.int32)
    starts, ends, positions = [], [], []
    for request, (total, count) in enumerate(zip(lengths, queries, strict=True)):
        for token in range(total - count, total):
            starts.append(int(offsets[request]))
            ends.append(int(offsets[request]) + (token + 1) // KPOOL)
            positions.append(token)
    rows = len(positions)
    chunk = Namespace(
        {
            "block_table": table,
            "cu_seqlen_ks": torch.tensor(starts, dtype=torch.int32),
            "cu_seqlen_ke": torch.tensor(ends, dtype=torch.int32),
            "local_cu_seq_lens": offsets,
            "max_seqlen_k": max(e - s for s, e in zip(starts, ends, strict=True)),
            "token_start": 0,
            "token_end": rows,
            "num_reqs": len(lengths),
        }
    )
    k_cache = Namespace(
        {"prefix": "indexer", "kv_cache": cache, "cache_config": Namespace({"block_size": PAGE})}
    )
    op = world.indexer.BoundedIndexer(k_cache, torch.full((rows, TOPK), -7, dtype=torch.int32), world.seen)
    op.budget_bytes = 4 * TILE * tiling.POOL_BYTES + rows * tiling.row_bytes(TILE, K)
    q = torch.randint(-2, 3, (rows, HEADS, DIM), generator=generator).float()
    weights = torch.randint(1, 3, (rows, HEADS), generator=generator).float()
    return op, chunk, q, weights, torch.tensor(positions)


def run(world, op, chunk, q, weights, positions, max_len=10**6, shards=None):
    prefill = Prefill([chunk], max_len, shards)
    world.seen.forward["attn_metadata"] = {"indexer": Metadata(1, 0, prefill)}
    hidden = torch.zeros(len(positions), 4)
    pooling = {"gate_score": None, "compress_ape": None, "index_kpool": KPOOL, "positions": positions}
    out = op.forward_cuda(hidden, q, None, weights, **pooling)
    assert world.seen.forward["attn_metadata"]["indexer"].prefill is prefill  # put back
    return out


def best(op, chunk, q, weights):
    """The pools of each row by scoring the whole context at once."""
    cache = op.k_cache.kv_cache
    found = []
    for row, (start, end) in enumerate(
        zip(chunk.cu_seqlen_ks.tolist(), chunk.cu_seqlen_ke.tolist(), strict=True)
    ):
        request = int(torch.nonzero(chunk.local_cu_seq_lens == start)[-1])
        request = min(request, chunk.num_reqs - 1)
        pages = cache[chunk.block_table[request].long()].reshape(-1, DIM + 4)[: end - start]
        keys = pages[:, :DIM].contiguous().view(torch.float8_e4m3fn).float()
        scores = (torch.relu(q[row] @ keys.T) * weights[row][:, None]).sum(0)[None].numpy()
        found.append(torch_topk.reference(scores.astype(np.float32), np.array([end - start]), K)[0])
    return np.array(found)


@pytest.mark.parametrize(
    ("lengths", "queries"),
    [([200], [9]), ([130, 77], [5, 4]), ([3, 150], [2, 6]), ([40], [40]), ([64], [1])],
)
def test_selects_what_the_whole_context_gives(world, lengths, queries):
    """Tile by tile each row selects the pools that scoring its whole context would, in the same order."""
    op, chunk, q, weights, positions = make(world, lengths, queries)
    out = run(world, op, chunk, q, weights, positions)
    assert out[:, ::KPOOL].tolist() == best(op, chunk, q, weights).tolist()
    assert world.seen.stock == [([], None)]  # stock wrote its caches and scored nothing
    assert world.seen.workspace == op.pools_max  # nor did it take room for the keys of the whole context


def test_nothing_grows_with_the_context(world):
    """Ten times the context gathers and scores no more at a time."""
    most = []
    for length in (400, 4000):
        world.seen.gathered.clear()
        world.seen.logits.clear()
        op, *asked = make(world, [length], [4])
        run(world, op, *asked)
        most.append((max(world.seen.gathered), {width for _, width in world.seen.logits}))
        assert max(world.seen.gathered) <= op.pools_max
        assert len(world.seen.gathered) > 1
    assert most[0] == most[1]


def test_rows_are_cut_to_the_budget(world):
    """A budget for three rows of a page scores three rows at a time, with the same result."""
    op, chunk, q, weights, positions = make(world, [200], [9])
    op.budget_bytes = PAGE * tiling.POOL_BYTES + 3 * tiling.row_bytes(PAGE, K)
    out = run(world, op, chunk, q, weights, positions)
    assert {rows for rows, _ in world.seen.logits} == {3}
    assert out[:, ::KPOOL].tolist() == best(op, chunk, q, weights).tolist()


def test_short_prefills_are_stocks(world):
    """Where every token is selected anyway, stock fills the rows and nothing is scored."""
    run(world, *make(world, [20], [20]), max_len=20)
    assert world.seen.logits == []


def test_rows_shared_out_over_ranks_are_exchanged(world):
    """With rows shared out, this rank scores its own and exchanges them itself, stock's exchange being off."""
    Shard.exchanged.clear()
    op, chunk, q, weights, positions = make(world, [200], [9])
    out = run(world, op, chunk, q, weights, positions, shards=[3, 6])
    assert out[:3, ::KPOOL].tolist() == best(op, chunk, q, weights)[:3].tolist()
    assert (out[3:] == -1).all()
    assert Shard.exchanged == [TOPK + KPOOL - 1]
    assert world.seen.stock == [([], None)]


def test_without_positions_stock_does_all(world):
    """Where vLLM gives no positions the incomplete pool cannot be told, so stock does the whole."""
    op, chunk, q, weights, _ = make(world, [200], [9])
    prefill = Prefill([chunk], 200)
    world.seen.forward["attn_metadata"] = {"indexer": Metadata(1, 0, prefill)}
    op.forward_cuda(torch.zeros(9, 4), q, None, weights, index_kpool=KPOOL, positions=None)
    assert world.seen.stock == [([chunk], None)]


def test_profiling_reserves_the_bound(world, monkeypatch):
    """Without metadata the op takes its workspace and its bound, and leaves stock's 776 MiB alone."""
    op, *_ = make(world, [64], [1])
    op.budget_bytes = 1 << 16
    taken = allocations(monkeypatch)
    world.seen.forward["attn_metadata"] = None
    assert op.forward_cuda(torch.zeros(1, 4), None, None, None) is op.topk_indices_buffer
    assert world.seen.stock == []
    assert taken == [1 << 16]
    assert world.seen.exchange == [op.topk_indices_buffer.shape]  # and what shared-out rows exchange


def test_profiling_reserves_the_decode_logits(world, monkeypatch):
    """A decode step scores every pool for each of its tokens, drafts included: vLLM's own buffer, counted too."""
    world.config.values["speculative_config"] = types.SimpleNamespace(num_speculative_tokens=3)
    op, *_ = make(world, [64], [1])
    op.budget_bytes = 1 << 10
    taken = allocations(monkeypatch)
    world.seen.forward["attn_metadata"] = None
    op.forward_cuda(torch.zeros(1, 4), None, None, None)
    assert taken == [2 * (1 + 3) * op.max_pool_len * 4]


def allocations(monkeypatch):
    """The sizes of the buffers that are allocated to be seen by the profiler alone."""
    taken, empty = [], torch.empty

    def note(*shape, **options):
        if options.get("dtype") is torch.uint8 and isinstance(shape[0], int):
            taken.append(shape[0])
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", note)
    return taken


def test_a_graph_captured_without_metadata_still_indexes(world):
    """A PIECEWISE capture has no metadata; its replays have, and each of them selects."""
    op, chunk, q, weights, positions = make(world, [200], [9])
    world.seen.capture = Capture()
    world.seen.forward["attn_metadata"] = None
    pooling = {"gate_score": None, "compress_ape": None, "index_kpool": KPOOL, "positions": positions}
    op.forward_cuda(torch.zeros(9, 4), q, None, weights, **pooling)
    assert len(world.seen.capture.segments) == 1
    capture, world.seen.capture = world.seen.capture, None
    world.seen.forward["attn_metadata"] = {"indexer": Metadata(1, 0, Prefill([chunk], 10**6))}
    op.topk_indices_buffer.fill_(-7)
    capture.replay()
    assert op.topk_indices_buffer[:, ::KPOOL].tolist() == best(op, chunk, q, weights).tolist()


def test_half_batches_keep_the_stock_indexer(world):
    """Under dual batch overlap vLLM's indexer stays: ours was never tried there."""
    world.config.values["parallel_config"].values["use_ubatching"] = True
    op, *_ = make(world, [64], [1])
    assert not op.bounded


def test_other_models_keep_the_stock_indexer(world):
    """Without our checkpoint and without a rung the class does what vLLM's does."""
    world.config.values["quant_config"] = "nvfp4"
    op, chunk, q, weights, positions = make(world, [200], [9])
    run(world, op, chunk, q, weights, positions)
    assert world.seen.stock == [([chunk], None)]
    assert world.seen.logits == []
