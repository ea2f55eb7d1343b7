"""The parts that need torch but no vLLM: lm_head's loader, the two-level top-k, the tiling of the indexer."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.extra import numpy as arrays  # noqa: E402

from shardmill.kernels import torch_topk  # noqa: E402
from shardmill.runtime_patch import tiling  # noqa: E402
from shardmill.runtime_patch.block_scales import UNFILLED, check_filled, lm_head_loader  # noqa: E402
from shardmill.runtime_patch.errors import PatchError  # noqa: E402


class Shards:
    def __init__(self, begin, end):
        self.org_vocab_start_index, self.org_vocab_end_index = begin, end


class Head:
    def __init__(self, begin, end):
        self.shard_indices = Shards(begin, end)


def test_lm_head_scales_load_by_block_rows():
    """Rank 1 of 2 takes the block rows of its words; rows of padding scale by one."""
    param = torch.nn.Parameter(torch.zeros(3, 2), requires_grad=False)
    scales = torch.arange(8.0).view(4, 2)
    lm_head_loader(Head(256, 512), 128, lambda *_: pytest.fail("codes' loader"))(param, scales)
    assert param.data.tolist() == [[4.0, 5.0], [6.0, 7.0], [1.0, 1.0]]


def test_lm_head_codes_go_to_vllms_loader():
    """The codes have a row a word, which vLLM's own loader deals out."""
    taken = []
    param = torch.nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn), requires_grad=False)
    lm_head_loader(Head(0, 2), 128, lambda *args: taken.append(args))(param, "rows")
    assert taken == [(param, "rows")]


def test_lm_head_share_must_be_whole_blocks():
    """A rank whose words begin inside a block cannot have scales of its own."""
    param = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    with pytest.raises(PatchError, match="begin at 64"):
        lm_head_loader(Head(64, 128), 128, print)(param, torch.zeros(4, 2))


@pytest.mark.parametrize("broken", [UNFILLED, float("nan"), float("inf")])
def test_a_scale_that_was_not_loaded_is_an_error(broken):
    """A layer with one block scale that was never filled, or is no number, is refused by name."""
    layer = Head(0, 1)
    layer.prefix, layer.weight_scale_inv = "layers.0.in_proj", torch.full((3, 2), 0.5)
    check_filled(layer)
    layer.weight_scale_inv[2, 1] = broken
    with pytest.raises(PatchError, match=r"layers\.0\.in_proj: 1 of 6 block scales"):
        check_filled(layer)


SCORES = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 40)),
    elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -3e38, 3e38, 1e-40]),
    fill=st.nothing(),  # every element is drawn: rows of one value would hide everything but ties
)


@settings(max_examples=60, deadline=None)
@given(SCORES, st.integers(1, 12), st.integers(1, 9), st.integers(1, 3), st.data())
def test_two_levels_give_the_order_of_one(scores, k, width, beside, data):
    """Whatever the tiles: highest score first, of equal scores the lower index, -1 where there are fewer."""
    rows, columns = scores.shape
    lengths = np.array(data.draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows)))
    tensor = torch.from_numpy(scores)
    running = torch_topk.Running(rows, k, beside, "cpu")
    for begin in range(0, columns, width):
        part = torch.from_numpy((lengths - begin).clip(0, width))
        running.add(begin, tensor[:, begin : begin + width].contiguous(), part)
    assert running.best().tolist() == torch_topk.reference(scores, lengths, k).tolist()


def test_keys_order_as_scores():
    """Keys rise with the scores, negative, subnormal and infinite ones too; of equal scores the first is higher."""
    scores = [float("-inf"), -3e38, -1.0, -1e-40, 0.0, 1e-40, 1.0, 3e38, float("inf")]
    assert (torch_topk.keys(torch.tensor([scores]))[0].diff() > 0).all()
    assert (torch_topk.keys(torch.tensor([[-0.0, 0.0, -0.0]]))[0].diff() < 0).all()


def test_garbage_beyond_a_rows_end_is_never_chosen():
    """Columns past a row's length may hold anything, NaN too: the logits kernel leaves them unwritten."""
    scores = torch.tensor([[1.0, 5.0, float("nan"), float("inf")]])
    chosen = torch_topk.select(scores, torch.tensor([2]), 3)
    assert chosen.tolist() == [[1, 0, -1]]


def plan(rows=1024, requests=1, longest=131_072, page=64, budget=64 << 20):
    gathered = tiling.gathered_most(requests, page, budget)
    return tiling.plan(
        rows=rows,
        requests=requests,
        longest=longest,
        selected=512,
        page=page,
        gathered=gathered,
        budget_bytes=budget,
    )


def test_scratch_does_not_grow_with_the_context():
    """1,024 rows of one request: 64 MiB hold every tile, at 524,288 tokens as at twice as many."""
    at_524288, beyond = plan(), plan(longest=262_144)
    assert at_524288 == beyond
    assert at_524288.scratch_bytes <= 64 << 20
    assert (at_524288.pools, at_524288.rows) == (8640, 1024)
    # What stock takes for the same step: gathered keys for twice the context eight times over, and 512 MiB of logits.
    stock = 524_288 * 8 * 2 // 4 * tiling.POOL_BYTES + (512 << 20)
    assert stock == 813_694_976
    assert at_524288.scratch_bytes * 12 < stock


def test_a_larger_budget_and_fewer_rows_make_fewer_tiles():
    """Memory that is there is used for wider tiles; a short context takes no more than it needs."""
    assert plan(budget=256 << 20).pools == 56_256
    assert plan(rows=128).pools == 98_304
    assert plan(longest=600).pools == 640


@given(
    st.integers(1, 5000),
    st.integers(1, 64),
    st.integers(1, 300_000),
    st.sampled_from([64, 1088]),
    st.integers(8, 512),
)
def test_plans_keep_their_budget(rows, requests, longest, page, mebibytes):
    """A plan's scratch fits the budget, its tiles begin at pages, and it makes progress; else it is refused."""
    try:
        found = plan(rows, requests, longest, page, mebibytes << 20)
    except PatchError:
        assert requests * page * tiling.POOL_BYTES + tiling.row_bytes(page, 512) > mebibytes << 20
        return
    assert found.scratch_bytes <= mebibytes << 20
    assert found.gathered <= tiling.gathered_most(requests, page, mebibytes << 20)
    assert found.pools % page == 0
    assert 1 <= found.rows <= rows


def test_a_budget_for_nothing_is_refused():
    """A budget that holds no row says how much one needs."""
    with pytest.raises(PatchError, match="at least 38400 needed"):
        plan(budget=1 << 15)
