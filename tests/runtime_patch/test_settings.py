"""The environment that the plugin reads."""

import pytest

from shardmill.runtime_patch import settings
from shardmill.runtime_patch.errors import PatchError


def test_unset_leaves_vllm_alone():
    """Without variables rows are vLLM's own, and scratch is bounded by 64 MiB each."""
    chosen = settings.read({})
    assert chosen == settings.Settings(None, None, 64 << 20, 64 << 20, True, False)
    assert chosen.layout is None


@pytest.mark.parametrize(
    ("rung", "scales", "row_bytes", "policy"),
    [
        ("8888", "", 528, "stock"),
        ("8666", "", 444, "fine"),
        ("6666", "", 416, "fine"),
        ("6666f", "", 432, "fine"),
        ("8888", "fine", 528, "fine"),
        ("6666", "stock", 416, "stock"),
    ],
)
def test_rung_and_policy(rung, scales, row_bytes, policy):
    """8888 is stock unless told otherwise, the others fine."""
    layout = settings.read({"VLLM_KVQ_TILES": rung, "VLLM_KVQ_SCALES": scales}).layout
    assert (layout.row_bytes, layout.scales) == (row_bytes, policy)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_KVQ_TILES", "7777"),
        ("VLLM_KVQ_TILES", "656"),
        ("VLLM_KVQ_TILES", "8666p"),
        ("VLLM_KVQ_SCALES", "coarse"),
        ("VLLM_KVQ_SCALES", "fine"),
        ("VLLM_KVQ_STAGE_MIB", "0"),
        ("VLLM_KVQ_STAGE_MIB", "1.5"),
        ("VLLM_KVQ_INDEXER_MIB", "-1"),
        ("VLLM_KVQ_DECODE_GEMM", "yes"),
    ],
)
def test_anything_else_is_refused(name, value):
    """A value that means nothing is an error that names the variable."""
    with pytest.raises(PatchError, match=name):
        settings.read({name: value})
