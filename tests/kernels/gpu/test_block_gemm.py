"""Names, files and the choice between the GEMM kernels; products themselves are checked on a GPU."""

import json
import re

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the extra `torch`")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from shardmill.kernels import block_gemm, tune  # noqa: E402
from shardmill.kernels.block_gemm import Decode, Gemv, Stock  # noqa: E402

CPU = torch.device("cpu")
SHIPPED = sorted(block_gemm.CONFIGS.glob("*.json"))
STOCK_KEYS = {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"}


def test_a_file_has_the_name_that_vllm_looks_for():
    name = block_gemm.config_name(12576, 4096, (32, 32), "NVIDIA_H200")
    assert name == "N=12576,K=4096,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[32,32].json"


@pytest.mark.parametrize("path", SHIPPED, ids=[path.name for path in SHIPPED])
def test_a_shipped_file_parses_and_keeps_the_scale_block_along_k(path):
    entries = json.loads(path.read_text())
    assert all(int(tokens) > 0 for tokens in entries)
    block_k = int(re.search(r"block_shape=\[\d+,(\d+)\]", path.name).group(1))
    for entry in entries.values():
        if path.name.startswith("decode,"):
            how = block_gemm._decode_entry(entry)
            assert how.to_json() == entry
        else:
            assert set(entry) == STOCK_KEYS
            assert entry["BLOCK_SIZE_K"] == block_k


def test_shipped_files_reach_to_large_prefills_since_vllm_takes_the_nearest_number():
    stock = [path for path in SHIPPED if not path.name.startswith("decode,")]
    assert stock
    assert all(max(map(int, json.loads(path.read_text()))) >= 1024 for path in stock)


def test_the_nearest_number_of_tokens_decides_and_the_default_holds_without_a_file(tmp_path):
    name = block_gemm.config_name(64, 128, (32, 32), "cpu")
    entries = {"1": Stock(16, 32, 32, 1, 4, 3).to_json(), "64": Stock(64, 64, 32, 8, 8, 2).to_json()}
    (tmp_path / name).write_text(json.dumps(entries))
    assert block_gemm.choose(20, 64, 128, (32, 32), CPU, tmp_path) == Stock(16, 32, 32, 1, 4, 3)
    assert block_gemm.choose(50, 64, 128, (32, 32), CPU, tmp_path) == Stock(64, 64, 32, 8, 8, 2)
    assert block_gemm.choose(50, 96, 128, (32, 32), CPU, tmp_path) == Stock.default((32, 32))


def test_the_default_is_what_vllm_runs_without_a_file():
    assert Stock.default((32, 32)).to_json() == {
        "BLOCK_SIZE_M": 64,
        "BLOCK_SIZE_N": 32,
        "BLOCK_SIZE_K": 32,
        "GROUP_SIZE_M": 32,
        "num_warps": 4,
        "num_stages": 2,
    }


def test_decode_kernels_are_chosen_only_for_few_tokens_whole_blocks_and_cards_with_their_instructions(
    monkeypatch,
):
    assert not block_gemm.decodes(1, 4096, (32, 32), CPU)
    monkeypatch.setattr(block_gemm, "has_ptx", lambda device: True)
    assert block_gemm.decodes(8, 4096, (32, 32), CPU)
    assert not block_gemm.decodes(9, 4096, (32, 32), CPU)
    assert not block_gemm.decodes(1, 4096 + 32, (32, 32), CPU)
    assert isinstance(block_gemm.choose(1, 7, 4096, (32, 32), CPU), Gemv)
    assert isinstance(block_gemm.choose(8, 7, 4096, (32, 32), CPU), Decode)
    assert isinstance(block_gemm.choose(9, 7, 4096, (32, 32), CPU), Stock)


def test_operands_that_do_not_fit_are_refused_with_the_expected_shape():
    x, w = torch.zeros((2, 64)).to(torch.float8_e4m3fn), torch.zeros((40, 64)).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"w_scale: expected shape \[2, 2\]"):
        block_gemm.gemm(x, torch.ones((2, 2)), w, torch.ones((1, 2)), (32, 32))
    with pytest.raises(ValueError, match="multiple of the group"):
        block_gemm.quantize(torch.zeros((2, 48)), 32)


@pytest.mark.parametrize("block", [(32, 32), (128, 128)])
@pytest.mark.parametrize("tokens", [1, 8, 17, 4096])
def test_every_candidate_keeps_block_size_k_and_keep_bits_the_rows_of_the_default_s_instruction(
    block, tokens
):
    candidates = tune.stock_candidates(tokens, block)
    assert candidates
    assert all(how.block_k == block[1] for how in candidates)
    assert all(how.block_m >= 64 for how in tune.stock_candidates(tokens, block, keep_bits=True))
    decodes = tune.decode_candidates(tokens, block)
    assert bool(decodes) == (tokens <= 8)
    assert all(16 * how.tiles <= block[0] for how in decodes if isinstance(how, Decode))


def test_a_search_adds_entries_to_a_file_in_order_of_tokens_and_keeps_the_others(tmp_path):
    path = tmp_path / "configs" / "some,block_shape=[32,32].json"
    tune._write(path, 64, {"BLOCK_SIZE_M": 64})
    tune._write(path, 8, {"BLOCK_SIZE_M": 16})
    assert list(json.loads(path.read_text())) == ["8", "64"]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_summary_line_compares_default_tuned_decode_and_limit():
    best = tune.Best(4, 12.3e-6, 180e-6, Stock.default((32, 32)), 36e-6, Gemv(4, 1024, 2), 17e-6)
    assert tune.line(best).split() == ["4", "180.0", "36.0", "17.0", "us", "12.3", "0.72"]


@pytest.mark.parametrize("text", ["12576", "a,b", "0,32", "1,2,3"])
def test_a_shape_that_is_none_is_refused_in_a_sentence(text):
    with pytest.raises(ValueError, match="expected N,K"):
        tune.parse_shape(text)
