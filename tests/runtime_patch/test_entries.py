"""Which manifest entry speaks about which module of vLLM."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.runtime_patch.entries import FUSED, Entries, Entry, canonical
from shardmill.runtime_patch.errors import PatchError

TEXT = "model.language_model.layers.0.self_attn"
FP8_32 = {"quant_algo": "FP8_BLOCK", "group_size": 32}
FP8_128 = {"quant_algo": "FP8_BLOCK", "group_size": 128}
NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}


def kda(**changed):
    members = dict.fromkeys(FUSED["in_proj_qkvbfg_a"], FP8_32) | changed
    return {f"{TEXT}.{name}": entry for name, entry in members.items() if entry}


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("model.language_model.layers.45.mlp.experts", "text.layers.45.mlp.experts"),
        ("language_model.model.layers.45.mlp.experts", "text.layers.45.mlp.experts"),
        ("model.layers.45.mtp_block.mlp.experts", "text.layers.45.mlp.experts"),
        ("model.layers.45.mlp.experts", "text.layers.45.mlp.experts"),
        ("model.visual.merger.proj", "visual.merger.proj"),
        ("visual.merger.proj", "visual.merger.proj"),
        ("language_model.lm_head", "lm_head"),
        ("lm_head", "lm_head"),
        ("something.else", "something.else"),
    ],
)
def test_spellings_meet(spelling, expected):
    """Checkpoint names, vLLM's names and the draft's names of one module have one canonical spelling."""
    assert canonical(spelling) == expected


def test_fused_module_takes_its_members_entry():
    """KDA's fused projection is found through its six members, under vLLM's own prefix."""
    entries = Entries.read(kda())
    assert entries.find("language_model.model.layers.0.self_attn.in_proj_qkvbfg_a") == Entry("FP8_BLOCK", 32)
    assert entries.find("language_model.model.layers.0.self_attn.f_b_proj") is None


@pytest.mark.parametrize("b_proj", [None, FP8_128, NVFP4])
def test_fused_members_must_agree(b_proj):
    """A member that is missing or treated differently is refused with every member's treatment."""
    entries = Entries.read(kda(b_proj=b_proj))
    with pytest.raises(PatchError, match=r"b_proj (unquantized|FP8_BLOCK \[128,128\]|NVFP4 \[16,16\])"):
        entries.find("language_model.model.layers.0.self_attn.in_proj_qkvbfg_a")
    assert len(entries.problems()) == 1


def test_vision_qkv_is_not_fused_on_disk():
    """The tower's qkv, which vLLM calls qkv_proj, is one module of the checkpoint."""
    entries = Entries.read({"model.visual.blocks.0.attn.qkv": FP8_128})
    assert entries.find("visual.blocks.0.attn.qkv_proj") == Entry("FP8_BLOCK", 128)


def test_expert_bank_takes_its_experts_entry():
    """A bank of experts is found without an entry of its own, for the draft's prefix too."""
    entries = Entries.read({"model.language_model.layers.45.mlp.experts.7.up_proj": NVFP4})
    assert entries.find("model.layers.45.mlp.experts") == Entry("NVFP4", 16)
    assert not entries.has_blocks


def test_experts_must_agree():
    """Experts of one bank that are treated differently are refused."""
    bank = "model.language_model.layers.3.mlp.experts"
    entries = Entries.read({f"{bank}.0.up_proj": NVFP4, f"{bank}.1.up_proj": FP8_128})
    with pytest.raises(PatchError, match=r"experts of .* are treated differently"):
        entries.find("language_model.model.layers.3.mlp.experts")


def test_two_spellings_must_agree():
    """The draft's alias keys may repeat an entry but not contradict it."""
    name = "layers.45.self_attn.o_proj"
    Entries.read({f"model.language_model.{name}": FP8_128, f"model.{name}": FP8_128})
    with pytest.raises(PatchError, match="twice with different treatment"):
        Entries.read({f"model.language_model.{name}": FP8_128, f"model.{name}": FP8_32})


@pytest.mark.parametrize("size", [None, 64, "32", True, 32.0001, [32, 32]])
def test_block_must_have_a_kernel(size):
    """A block is an integer that a kernel exists for."""
    with pytest.raises(PatchError, match="group_size"):
        Entries.read({"lm_head": {"quant_algo": "FP8_BLOCK", "group_size": size}})


@given(
    st.lists(
        st.sampled_from(["model", "language_model", "visual", "layers", "0", "mtp_block", "x"]), min_size=1
    )
)
def test_canonical_is_a_fixed_point(parts):
    """The canonical spelling of vLLM's prefix does not depend on which side's prefix it had."""
    name = ".".join(parts)
    assert canonical("model.language_model." + name) == canonical("language_model.model." + name)
