"""The row hooks of both backends, on stand-ins for vLLM and with the rows of the numpy reference."""

import importlib
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from shardmill.kernels import kv_row  # noqa: E402
from shardmill.runtime_patch import rows  # noqa: E402
from shardmill.runtime_patch.errors import PatchError  # noqa: E402
from tests.runtime_patch import fake_vllm as fake  # noqa: E402

RUNGS = ["8888", "8666", "6666", "6666f"]
BLOCKS, GAP = 3, 64  # blocks of 128 rows, and rows of other layers between two blocks


@dataclass(frozen=True)
class Kernel:
    scheduler_metadata: str = "given"


@pytest.fixture
def vllm(monkeypatch):
    state = fake.install(monkeypatch)
    fake.install_kernels(monkeypatch)
    monkeypatch.setenv("VLLM_KVQ_STAGE_MIB", "1")
    return state


def latents(count):
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(-3000, 3000, (count, 512), generator=generator).float() / 512
    x[0] = 0
    x[1, ::7] *= 300
    return x.to(torch.bfloat16)


def filled(impl, row_bytes, count=128):
    """A cache with gaps between its blocks, written through the hook; its flat pages; the rows' physical numbers."""
    flat = torch.full(((BLOCKS * (128 + GAP)) * row_bytes,), 0x7F, dtype=torch.uint8)
    cache = flat.as_strided((BLOCKS, 128, row_bytes), ((128 + GAP) * row_bytes, row_bytes, 1))
    slots = torch.randperm(BLOCKS * 128, generator=torch.Generator().manual_seed(3))[:count]
    slots[5] = -1
    impl.do_kv_cache_update(latents(count), torch.zeros(count, 0), cache, slots, "fp8_ds_mla", torch.ones(1))
    physical = torch.where(slots < 0, -1, slots // 128 * (128 + GAP) + slots % 128)
    return flat.view(-1, fake.PAGE, row_bytes), physical.to(torch.int32)


def question(physical, tokens):
    """Queries and their top-k rows, with -1 in places, the first among them."""
    generator = torch.Generator().manual_seed(11)
    q = torch.randn(tokens, fake.HEADS, 576, generator=generator)
    known = physical[physical >= 0]
    wanted = known[torch.randint(len(known), (tokens, fake.TOPK), generator=generator)].to(torch.int32)
    wanted[0, 0] = -1
    wanted[-1, 3:] = -1
    return q, wanted


def canonical(rung, pages):
    """All rows of a cache as canonical rows; what was never written stays as it lies."""
    flat = pages.reshape(-1, pages.shape[-1])
    out = torch.full((len(flat), 656), 0x7F, dtype=torch.uint8)
    for place, row in enumerate(flat.numpy()):
        if (row != 0x7F).any():
            out[place] = torch.from_numpy(kv_row.restage(rung, row[None])[0])
    return out.view(-1, fake.PAGE, 656)


@pytest.mark.parametrize("rung", RUNGS)
def test_the_page_is_the_rung(vllm, monkeypatch, rung):
    """The KV spec has the rung's row, and blocks lie a whole number of 64-row pages apart, on both cards."""
    monkeypatch.setenv("VLLM_KVQ_TILES", rung)
    from shardmill.runtime_patch.rows_sm90 import CompactSm90Backend
    from shardmill.runtime_patch.rows_sm120 import CompactSm120Backend

    row_bytes = kv_row.RowLayout.parse(rung).row_bytes
    for backend in (CompactSm90Backend, CompactSm120Backend):
        assert backend.customize_spec(fake.Spec()) == fake.Spec(row_bytes, 64 * row_bytes)


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("rung", RUNGS)
def test_sm120_attends_as_on_canonical_rows(vllm, monkeypatch, rung, tokens):
    """Whatever the rung and the number of tokens, the output is the kernel's on canonical rows, bit for bit."""
    monkeypatch.setenv("VLLM_KVQ_TILES", rung)
    from shardmill.runtime_patch.rows_sm120 import CompactSm120Impl

    impl = CompactSm120Impl()
    pages, physical = filled(impl, impl.layout.row_bytes)
    q, wanted = question(physical, tokens)
    before = wanted.clone()
    got = impl._run_mqa_kernel(q, pages, wanted)
    assert torch.equal(got, fake.attend(q, canonical(rung, pages), wanted))
    assert torch.equal(wanted, before)  # layers share the index tensor
    if rung == "8888":
        assert vllm.calls == [(tokens, tuple(pages.shape))]  # handed over as it lies
    else:
        assert [call[0] for call in vllm.calls] == {1: [1], 2: [2], 9: [8, 1]}[tokens]


@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("rung", RUNGS)
def test_sm90_attends_as_on_canonical_rows(vllm, monkeypatch, rung, tokens):
    """FlashMLA sees canonical rows alone; several chunks each get scheduler metadata of their own."""
    monkeypatch.setenv("VLLM_KVQ_TILES", rung)
    from shardmill.runtime_patch.rows_sm90 import CompactSm90Impl

    impl = CompactSm90Impl()
    pages, physical = filled(impl, impl.layout.row_bytes)
    q, wanted = question(physical, tokens)
    out, lse = impl._fp8_flash_mla_kernel(q[None], pages, wanted[None], Kernel())
    assert torch.equal(out[0], fake.attend(q, canonical(rung, pages), wanted))
    assert lse.shape == (1, fake.HEADS, tokens)
    assert [call[2] for call in vllm.calls] == (["given"] if tokens == 2 else ["fresh", "fresh"])


def test_stock_8888_is_the_first_528_bytes(vllm, monkeypatch):
    """Rung 8888 writes the bytes that vLLM's own row begins with."""
    monkeypatch.setenv("VLLM_KVQ_TILES", "8888")
    from shardmill.runtime_patch.rows_sm120 import CompactSm120Impl

    impl = CompactSm120Impl()
    pages, physical = filled(impl, 528)
    written = pages.reshape(-1, 528)[physical[physical >= 0].long()].numpy()
    stock = kv_row.encode("656", fake.to_numpy(latents(128)))[(physical >= 0).numpy()]
    assert (written == stock[:, :528]).all()
    assert (stock[:, 528:] == 0).all()


def test_scratch_follows_its_setting(vllm, monkeypatch):
    """The scratch holds the largest power of two of tokens that fits, and at least one."""
    assert rows.tokens_per_chunk(64 << 20, 2176) == 32
    assert rows.tokens_per_chunk(1, 2176) == 1
    stage = rows.RowStage(kv_row.RowLayout.parse("6666"), 2176, 1024, 64 << 20)
    assert [s.stop - s.start for s in stage.chunks(70)] == [32, 32, 6]
    assert sum(torch.empty(shape, dtype=dtype).nbytes for shape, dtype in stage.specs) < 64 << 20
    with pytest.raises(PatchError, match="multiple of 64"):
        rows.RowStage(kv_row.RowLayout.parse("6666"), 2051, 8, 64 << 20)


@pytest.mark.parametrize("card", ["sm90", "sm120"])
@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("rope", 64, "rotary"),
        ("decode_ranks", 2, "decode context"),
        ("kv_cache_dtype", "auto", "dtype is auto; compact rows need --kv-cache-dtype fp8_ds_mla"),
        ("kv_cache_dtype", "bfloat16", "dtype is bfloat16"),
        ("ubatching", True, "dual batch overlap"),
        (
            "connector",
            "LMCacheConnectorV1",
            "LMCacheConnectorV1 may hand blocks to a server with another KV layout",
        ),
        ("connector", "MooncakeStoreConnector", "ones that cannot: NixlConnector"),
    ],
)
def test_what_cannot_be_served_is_refused(vllm, monkeypatch, card, field, value, told):
    """A model with a rotary part, or a mode that reads or moves rows elsewhere, is an error when the layer is built."""
    monkeypatch.setenv("VLLM_KVQ_TILES", "6666")
    setattr(vllm, field, value)
    module = importlib.import_module(f"shardmill.runtime_patch.rows_{card}")
    with pytest.raises(PatchError, match=told):
        getattr(module, f"Compact{card.capitalize()}Impl")()


@pytest.mark.parametrize("connector", rows.SAFE_CONNECTORS)
def test_connectors_that_cannot_mix_layouts_are_let_through(vllm, monkeypatch, connector):
    """NIXL compares block lengths, and CPU offload stays in one process."""
    monkeypatch.setenv("VLLM_KVQ_TILES", "6666")
    vllm.connector = connector
    from shardmill.runtime_patch.rows_sm120 import CompactSm120Impl

    assert CompactSm120Impl().stage


@pytest.mark.parametrize("rung", RUNGS)
def test_no_tensor_outlives_a_forward(vllm, monkeypatch, rung):
    """Sleep level 2 discards what was allocated while loading: the impl keeps none but vLLM's own index buffer."""
    monkeypatch.setenv("VLLM_KVQ_TILES", rung)
    from shardmill.runtime_patch.rows_sm90 import CompactSm90Impl
    from shardmill.runtime_patch.rows_sm120 import CompactSm120Impl

    for impl in (CompactSm90Impl(), CompactSm120Impl()):
        kept = {name for name, value in vars(impl).items() if isinstance(value, torch.Tensor)}
        assert kept == {"topk_indices_buffer"}
        assert impl.stage is None or not any(
            isinstance(getattr(impl.stage, name), torch.Tensor) for name in vars(impl.stage)
        )


def test_the_unused_prefill_workspace_is_not_reserved(vllm, monkeypatch):
    """On SM90 nothing is reserved that grows with the context, and vLLM's own factor stays as it was."""
    monkeypatch.setenv("VLLM_KVQ_TILES", "6666")
    from shardmill.runtime_patch.rows_sm90 import CompactSm90Impl

    impl = CompactSm90Impl()
    assert all(
        fake.CONTEXT not in shape and 2 * fake.CONTEXT not in shape
        for specs in vllm.reserved
        for shape, _ in specs
    )
    assert impl.workspace_specs == [((4, fake.HEADS, 576), torch.bfloat16), *impl.stage.specs]
    assert vllm.attention.sparse_mla_prefill_workspace_factor == 2


def test_mixed_batch_path_is_taken(vllm, monkeypatch):
    """On SM90 prefill goes through the decode kernel, so that one hook sees every read."""
    from shardmill.runtime_patch.rows_sm90 import CompactSm90Backend

    assert CompactSm90Backend.get_builder_cls()().fp8_use_mixed_batch is True


def test_a_backend_without_rows_is_refused(vllm, monkeypatch):
    """A rung and a backend that would ignore it do not go together; without a rung any backend will do."""
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

    layer = fake.Namespace({"attn_backend": FlashMLASparseBackend})
    rows.require_compact(layer)
    monkeypatch.setenv("VLLM_KVQ_TILES", "6666")
    with pytest.raises(PatchError, match="backend STOCK stores vLLM's own rows"):
        rows.require_compact(layer)
