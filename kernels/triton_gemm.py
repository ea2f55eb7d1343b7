"""The device code of the block-FP8 GEMM: activation quantisation, the stock-style kernel, the decode kernel.

All three compute out[m, n] = sum over groups of (sum over k in the group of x[m, k] * w[n, k]) * x_scale[m, group]
* w_scale[n / block_n, group], with x and w in E4M3 and sums in f32.
"""

import triton
import triton.language as tl

from kernels.triton_convert import e4m3_byte


@triton.jit
def quantise_kernel(
    x, codes, scales, groups, x_row, K: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr, G: tl.constexpr
):
    """G groups of GROUP neighbours of a row of x [M, K] -> E4M3 codes [M, K] and f32 scales [M, K / GROUP].

    scale = max(amax, 1e-10) / 448 by IEEE division, code = E4M3(x * (1 / scale)): vLLM 0.33.0's definition. The
    product with the reciprocal, not the quotient, is what its kernel computes; the two differ in 0.05 % of codes.
    """
    group = tl.program_id(0) * G + tl.arange(0, G)
    k = tl.arange(0, GROUP)
    PER_ROW: tl.constexpr = K // GROUP
    row = (group // PER_ROW).to(tl.int64)
    column = (group % PER_ROW) * GROUP
    live = (group < groups)[:, None]
    value = tl.load(x + (row * x_row + column)[:, None] + k[None, :], mask=live, other=0.0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(value), 1), 1e-10)
    scale = tl.math.div_rn(amax, tl.full([G], 448.0, tl.float32))
    y = value * tl.math.div_rn(tl.full([G], 1.0, tl.float32), scale)[:, None]
    y = tl.minimum(tl.maximum(y, -448.0), 448.0)
    if PTX:
        code = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = e4m3_byte(y).to(tl.uint8)
    tl.store(codes + (row * K + column)[:, None] + k[None, :], code, mask=live)
    tl.store(scales + group, scale, mask=group < groups)


@triton.jit
def stock_kernel(
    x,
    w,
    bias,
    out,
    x_scale,
    w_scale,
    M,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """The algorithm of vLLM's Triton kernel: one scale of either side for each step of BLOCK_SIZE_K.

    So BLOCK_SIZE_K must divide BLOCK_K, and it alone of the tuned parameters decides the order of the sums.
    """
    pid = tl.program_id(0)
    rows_m = tl.cdiv(M, BLOCK_SIZE_M)
    rows_n = tl.cdiv(N, BLOCK_SIZE_N)
    band = GROUP_SIZE_M * rows_n
    first_m = pid // band * GROUP_SIZE_M
    band_m = min(rows_m - first_m, GROUP_SIZE_M)
    pid_m = first_m + (pid % band) % band_m
    pid_n = (pid % band) // band_m

    m = (pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    n = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    k = tl.arange(0, BLOCK_SIZE_K)
    groups = tl.cdiv(K, BLOCK_K)
    x_at = x + m.to(tl.int64)[:, None] * K + k[None, :]
    w_at = w + n.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_SIZE_K)):
        inside = k < K - step * BLOCK_SIZE_K
        a = tl.load(x_at, mask=inside[None, :], other=0.0)
        b = tl.load(w_at, mask=inside[:, None], other=0.0)
        group = step * BLOCK_SIZE_K // BLOCK_K
        a_scale = tl.load(x_scale + m * groups + group)
        b_scale = tl.load(w_scale + n // BLOCK_N * groups + group)
        total += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
        x_at += BLOCK_SIZE_K
        w_at += BLOCK_SIZE_K

    m = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    n = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mma(a0, a1, b, c0, c1, c2, c3):
    """c [16 rows, 8 tokens] += 32 products of each: rows g and g + 8 of the lane in a0 and a1, its token in b.

    A lane passes 8 bytes of a row. The instruction wants them as two words that lie 16 elements apart; since both
    operands are dealt the same way, the order of the 32 products changes and the sum does not.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 p0, p1, q0, q1, r0, r1;
        mov.b64 {p0, p1}, $4;
        mov.b64 {q0, q1}, $5;
        mov.b64 {r0, r1}, $6;
        mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32
            {$0, $1, $2, $3}, {p0, q0, p1, q1}, {r0, r1}, {$7, $8, $9, $10}; }""",
        "=f,=f,=f,=f,l,l,l,f,f,f,f",
        [a0, a1, b, c0, c1, c2, c3],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def decode_kernel(
    x,
    w,
    bias,
    out,
    x_scale,
    w_scale,
    M,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,
    STEP: tl.constexpr,
    WARPS: tl.constexpr,
):
    """At most 8 tokens: a program takes 16 * TILES output rows over the whole of K, its warps a part of K each.

    Weights go from memory to the tensor cores' registers without a stop: lane l loads 8 bytes of row l // 4, so
    that each load of a warp takes whole 32-byte sectors, and STEP scale groups are under way at once. The sum of
    a group leaves the tensor core, is scaled in f32 and joins the total, so no block of K is bound to a tile size.
    x and w come as 8-byte words. A thread is an element of the 1-D tensors: lane = thread % 32.
    """
    thread = tl.arange(0, 32 * WARPS)
    lane = thread % 32
    warp = thread // 32
    g = lane // 4
    t = lane % 4
    n0 = tl.program_id(0) * (16 * TILES)
    GROUPS: tl.constexpr = K // BLOCK_K
    PARTS: tl.constexpr = BLOCK_K // 32  # instructions of a group
    SHARE: tl.constexpr = (GROUPS + WARPS - 1) // WARPS  # groups of a warp
    x_at = x + g * (K // 8) + t
    w_scale_at = w_scale + n0 // BLOCK_N * GROUPS
    low_live = 2 * t < M
    high_live = 2 * t + 1 < M
    zero = tl.zeros([32 * WARPS], tl.float32)
    totals = ()
    for _ in tl.static_range(4 * TILES):
        totals += (zero,)
    rows = ()
    for i in tl.static_range(2 * TILES):
        rows += (w + tl.minimum(n0 + 8 * i + g, N - 1).to(tl.int64) * (K // 8) + t,)

    for begin in tl.static_range(0, SHARE, STEP):
        loads = ()
        for s in tl.static_range(STEP):
            share = begin + s
            group = tl.minimum(warp * SHARE + share, GROUPS - 1)
            live = (warp * SHARE + share < GROUPS) & (share < SHARE)
            weights = ()
            tokens = ()
            for p in tl.static_range(PARTS):
                at = group * (BLOCK_K // 8) + p * 4
                tokens += (tl.load(x_at + at, mask=g < M, other=0),)
                for i in tl.static_range(2 * TILES):
                    weights += (tl.load(rows[i] + at, eviction_policy="evict_first"),)
            b_scale = tl.load(w_scale_at + group)
            low = tl.load(x_scale + 2 * t * GROUPS + group, mask=low_live & live, other=0.0) * b_scale
            high = tl.load(x_scale + (2 * t + 1) * GROUPS + group, mask=high_live & live, other=0.0) * b_scale
            loads += ((weights, tokens, low, high),)
        for s in tl.static_range(STEP):
            weights, tokens, low, high = loads[s]
            fresh = ()
            for i in tl.static_range(TILES):
                c0, c1, c2, c3 = zero, zero, zero, zero
                for p in tl.static_range(PARTS):
                    a0 = weights[p * 2 * TILES + 2 * i]
                    a1 = weights[p * 2 * TILES + 2 * i + 1]
                    c0, c1, c2, c3 = _mma(a0, a1, tokens[p], c0, c1, c2, c3)
                fresh += (tl.fma(c0, low, totals[4 * i]), tl.fma(c1, high, totals[4 * i + 1]))
                fresh += (tl.fma(c2, low, totals[4 * i + 2]), tl.fma(c3, high, totals[4 * i + 3]))
            totals = fresh

    for i in tl.static_range(TILES):
        quad = tl.join(
            tl.join(totals[4 * i], totals[4 * i + 2]), tl.join(totals[4 * i + 1], totals[4 * i + 3])
        )
        sums = tl.sum(tl.reshape(quad, [WARPS, 32, 2, 2]), 0)  # [lane, row g or g + 8, token 2t or 2t + 1]
        l3 = tl.arange(0, 32)[:, None, None]
        n = n0 + 16 * i + l3 // 4 + 8 * tl.arange(0, 2)[None, :, None]
        m = 2 * (l3 % 4) + tl.arange(0, 2)[None, None, :]
        if HAS_BIAS:
            sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out + m.to(tl.int64) * N + n, sums.to(out.dtype.element_ty), mask=(n < N) & (m < M))
