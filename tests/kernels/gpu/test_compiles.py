"""The PTX path compiles for every card that it is meant for, without one: Ada, Hopper and Blackwell workstation."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch`")
triton = pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from shardmill.kernels import triton_gemm, triton_kv, triton_restage, triton_topk, triton_write  # noqa: E402
from shardmill.kernels.kv_row import RowLayout  # noqa: E402

LAYOUT = RowLayout.parse("8666")
ROW = {**triton_kv._parts(LAYOUT), "PAGE_ROWS": 64, "PTX": True, "R": 1}
GEMM = {"K": 256, "BLOCK_N": 32, "BLOCK_K": 32, "HAS_BIAS": True}
KERNELS = {
    "write": (
        triton_write.write_kernel,
        {"x": "*i32", "order": "*i64", "slots": "*i64", "cache": "*i32"},
        ("rows", "x_row_words", "page_words"),
        {**ROW, "FINE": True, "SPREAD": False},
        1,
    ),
    "restage": (
        triton_restage.restage_kernel,
        {"cache": "*i32", "index": "*i32", "out": "*i32"},
        ("rows", "page_words"),
        {**ROW, "INDEX_ROWS": 0},
        1,
    ),
    "decode": (
        triton_gemm.decode_kernel,
        {"x": "*i64", "w": "*i64", "bias": "*bf16", "out": "*bf16", "x_scale": "*fp32", "w_scale": "*fp32"},
        ("M", "N"),
        {**GEMM, "SETS": 2, "TILES": 1, "DEPTH": 1, "WARPS": 4},
        4,
    ),
    "gemv": (
        triton_gemm.gemv_kernel,
        {
            "x": "*fp8e4nv",
            "w": "*fp8e4nv",
            "bias": "*bf16",
            "out": "*bf16",
            "x_scale": "*fp32",
            "w_scale": "*fp32",
        },
        ("N",),
        {**GEMM, "M": 1, "ROWS": 2, "STEP": 256},
        2,
    ),
    "lowest": (
        triton_topk.lowest_kernel,
        {"scores": "*fp32", "lengths": "*i32", "edge": "*fp32", "places": "*i32", "out": "*i32"},
        ("row_stride", "k"),
        {"BLOCK": 1024},
        4,
    ),
}
for _name in ("decode", "gemv"):
    _kernel, _pointers, _numbers, _constants, _warps = KERNELS[_name]
    _bytes = {**_pointers, "x_scale": "*u8", "w_scale": "*u8"}
    KERNELS[f"{_name}, E8M0"] = (_kernel, _bytes, _numbers, _constants, _warps)
    KERNELS[f"{_name}, early"] = (_kernel, _pointers, _numbers, {**_constants, "EARLY": True}, _warps)


# Programmatic dependent launch begins with compute capability 9.0.
PAIRS = [(name, card) for name in KERNELS for card in (89, 90, 120) if card >= 90 or "early" not in name]


@pytest.mark.parametrize(("name", "capability"), PAIRS)
def test_a_kernel_compiles_to_machine_code_for_the_card(name, capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, pointers, numbers, constants, warps = KERNELS[name]
    signature = {**pointers, **dict.fromkeys(numbers, "i32"), **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": warps})
    assert len(compiled.asm["cubin"]) > 1000
    assert f".target sm_{capability}" in compiled.asm["ptx"]
