"""The device code of the block-FP8 GEMM: activation quantization, the stock-style kernel, the decode kernel.

All three compute out[m, n] = sum over groups of (sum over k in the group of x[m, k] * w[n, k]) * x_scale[m, group]
* w_scale[n / block_n, group], with x and w in E4M3 and sums in f32. Either side's scales are f32, or E8M0 bytes (u8),
which become the f32 of the same value when they are loaded: on powers of two both forms give the same bits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shardmill.kernels.triton_convert import e4m3_byte


@triton.jit
def f32_scale(scale):
    """A loaded scale as f32: f32 as it is; an E8M0 byte b as 2**(b - 127), 255 as NaN (OCP MX v1.0, section 5.4.1)."""
    if scale.dtype == tl.uint8:
        byte = scale.to(tl.int32)
        bits = tl.where(byte == 0, 0x00400000, byte << 23)  # 2**-127 is subnormal in f32
        bits = tl.where(byte == 255, 0x7FC00000, bits)
        result = bits.to(tl.float32, bitcast=True)
    else:
        result = scale
    return result


@triton.jit
def quantize_kernel(
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
        a_scale = f32_scale(tl.load(x_scale + m * groups + group))
        b_scale = f32_scale(tl.load(w_scale + n // BLOCK_N * groups + group))
        total += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
        x_at += BLOCK_SIZE_K
        w_at += BLOCK_SIZE_K

    m = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    n = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=inside)


def _chunk_product() -> str:
    """PTX of c[16 rows, 8 columns] = 64 products each: E4M3 to f16 in registers, then four k16 tensor-core steps.

    A lane brings 16 bytes of row g ($4, $5), of row g + 8 ($6, $7) and of its column ($8, $9). A step wants four
    of each, and which four is free as long as both sides deal alike: here the step's own word, in memory order.
    f16 holds E4M3 exactly, so the sums are of exact products, in f32.
    """
    lines = [
        ".reg .b16 low, high; .reg .b32 x<2>, y<2>, z<2>, a<4>, b<2>; .reg .f32 zero;",
        "mov.f32 zero, 0f00000000;",
    ]
    for piece in range(2):
        for name, operand in (("x", 4 + piece), ("y", 6 + piece), ("z", 8 + piece)):
            lines.append(f"mov.b64 {{{name}0, {name}1}}, ${operand};")
        for word in range(2):
            for name, first, second in (("x", "a0", "a2"), ("y", "a1", "a3"), ("z", "b0", "b1")):
                lines.append(f"mov.b32 {{low, high}}, {name}{word};")
                lines.append(f"cvt.rn.f16x2.e4m3x2 {first}, low; cvt.rn.f16x2.e4m3x2 {second}, high;")
            c = "zero, zero, zero, zero" if piece + word == 0 else "$0, $1, $2, $3"
            lines.append("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
            lines.append(f"{{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, {{b0, b1}}, {{{c}}};")
    return "{ " + "\n".join(lines) + " }"


CHUNK_PRODUCT = tl.constexpr(_chunk_product())
CHUNK = tl.constexpr(64)  # bytes of a row that a warp takes at once: 16 of each of four lanes


@triton.jit
def _product(a, b, token):
    """Sums over a chunk: a and b are a tile's rows g and g + 8, token the columns, each a pair of 8-byte words."""
    return tl.inline_asm_elementwise(
        CHUNK_PRODUCT,
        "=f,=f,=f,=f,l,l,l,l,l,l",
        [a[0], a[1], b[0], b[1], token[0], token[1]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def gemv_kernel(
    x,
    w,
    bias,
    out,
    x_scale,
    w_scale,
    M: tl.constexpr,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """A few tokens, by multiply and add: a program takes ROWS output rows over the whole of K.

    A thread sums the 16 products of its 16-byte load, scales the sum in f32 and adds it to its total; threads meet
    once, at the end. Plain Triton: it runs on any card.

    EARLY (compute capability 9.0 and up): the launch does not wait for the kernel before it, which the weights do not
    depend on. A program asks for its first weights, then waits until that kernel is done, then reads the tokens.
    """
    if EARLY:
        gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + tl.arange(0, STEP)[None, :]
    PARTS: tl.constexpr = STEP // 16
    GROUPS: tl.constexpr = K // BLOCK_K
    group = tl.arange(0, PARTS) * 16 // BLOCK_K
    w_scale += tl.program_id(0) * ROWS // BLOCK_N * GROUPS
    totals = ()
    for _ in tl.static_range(M):
        totals += (tl.zeros([ROWS, PARTS], tl.float32),)
    for k in tl.static_range(0, K, STEP):
        inside = group * BLOCK_K + k < K  # the last step may reach beyond K
        whole = k + STEP <= K
        if whole:
            codes = tl.load(at + k, eviction_policy="evict_first")
        else:
            codes = tl.load(at + k, mask=(tl.arange(0, STEP) + k < K)[None, :], other=0.0)
        if EARLY and k == 0:
            gdc_wait()
        weights = tl.reshape(codes.to(tl.float32), [ROWS, PARTS, 16])
        scale = f32_scale(tl.load(w_scale + k // BLOCK_K + group, mask=inside, other=0))
        fresh = ()
        for m in tl.static_range(M):
            token = tl.load(x + m * K + k + tl.arange(0, STEP), mask=tl.arange(0, STEP) + k < K, other=0.0)
            sums = tl.sum(weights * tl.reshape(token.to(tl.float32), [1, PARTS, 16]), 2)
            token_scale = tl.load(x_scale + m * GROUPS + k // BLOCK_K + group, mask=inside, other=0)
            both = scale * f32_scale(token_scale)
            fresh += (totals[m] + sums * both[None, :],)
        totals = fresh
    for m in tl.static_range(M):
        value = tl.sum(totals[m], 1)
        if HAS_BIAS:
            value += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out + m * N + n, value.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _load_pair(at, mask):
    """Two neighbouring 8-byte words of each thread by one 16-byte load."""
    two = tl.arange(0, 2)[None, :]
    return tl.split(tl.load(at[:, None] + two, mask=mask[:, None], other=0, eviction_policy="evict_first"))


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
    SETS: tl.constexpr,
    TILES: tl.constexpr,
    DEPTH: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """At most 8 tokens: a program takes 16 * TILES output rows over the whole of K, its warps interleaved along K.

    Weights go from memory to the tensor cores' registers without a stop, DEPTH chunks of 64 bytes ahead of their
    use. Each chunk's sums leave the tensor core, are scaled in f32 and join the totals, so no tile is bound to a
    scale block. A chunk spans two groups where BLOCK_K is 32: lanes t < 2 hold the first, t >= 2 the second. Then
    columns 0-3 are four tokens with zeros for the second group and columns 4-7 the same tokens with zeros for the
    first, and tokens beyond four form a second set.

    x and w come as 8-byte words. A thread is an element of the 1-D tensors: lane = thread % 32 = 4 * g + t.
    EARLY as in gemv_kernel.
    """
    if EARLY:
        gdc_launch_dependents()
    CHUNKS: tl.constexpr = K // CHUNK
    ROUNDS: tl.constexpr = (CHUNKS + WARPS * DEPTH - 1) // (WARPS * DEPTH)
    thread = tl.arange(0, 32 * WARPS)
    g = thread % 32 // 4
    t = thread % 4
    n0 = tl.program_id(0) * (16 * TILES)
    w_scale += n0 // BLOCK_N * (K // BLOCK_K)
    rows = ()
    for i in tl.static_range(2 * TILES):
        rows += (w + tl.minimum(n0 + 8 * i + g, N - 1).to(tl.int64) * (K // 8) + 2 * t,)
    zero = tl.zeros([32 * WARPS], tl.float32)
    totals = ()
    for _ in tl.static_range(TILES * SETS):
        totals += ((zero, zero, zero, zero),)
    nothing = (N >> 30).to(tl.int64)  # 0, N being below 2**30
    for begin in range(ROUNDS):
        words = ()
        for step in tl.static_range(DEPTH):
            chunk = tl.minimum((begin * DEPTH + step) * WARPS + thread // 32, CHUNKS - 1)
            for i in tl.static_range(2 * TILES):
                words += (_load_pair(rows[i] + chunk * (CHUNK // 8), thread >= 0),)
        if EARLY:
            gdc_wait()  # at once, but in the first round
        words = _arrived(words, nothing)
        for step in tl.static_range(DEPTH):
            chunk = (begin * DEPTH + step) * WARPS + thread // 32
            tokens, scales = _load_tokens(x, x_scale, w_scale, chunk, g, t, M, K, BLOCK_K, SETS)
            fresh = ()
            for i in tl.static_range(TILES):
                first = words[(step * TILES + i) * 2]
                second = words[(step * TILES + i) * 2 + 1]
                for j in tl.static_range(SETS):
                    low, high = scales[j]
                    c0, c1, c2, c3 = _product(first, second, tokens[j])
                    t0, t1, t2, t3 = totals[i * SETS + j]
                    fresh += (
                        (
                            tl.fma(c0, low, t0),
                            tl.fma(c1, high, t1),
                            tl.fma(c2, low, t2),
                            tl.fma(c3, high, t3),
                        ),
                    )
            totals = fresh

    for i in tl.static_range(TILES):
        for j in tl.static_range(SETS):
            _store_tile(
                out, bias, totals[i * SETS + j], n0 + 16 * i, 4 * j, M, N, HAS_BIAS, BLOCK_K == 32, WARPS
            )


@triton.jit
def _arrived(words, zero):
    """The same words, none of which can be used before all have been asked for.

    The assembler moves loads down to their use, which leaves one or two in flight. So the first word is made to
    depend on all: xor with (their or) & zero, where zero is one that no compiler can see.
    """
    any_bit = words[0][0]
    for i in tl.static_range(1, len(words)):
        any_bit |= words[i][0]
    first = words[0][0] ^ (any_bit & zero)
    return ((first, words[0][1]),) + words[1:]  # noqa: RUF005  (the device language has no starred tuples)


@triton.jit
def _load_tokens(
    x, x_scale, w_scale, chunk, g, t, M, K: tl.constexpr, BLOCK_K: tl.constexpr, SETS: tl.constexpr
):
    """Columns and scale products of each warp's chunk; a chunk beyond K has scale 0."""
    SPLIT: tl.constexpr = BLOCK_K == 32
    GROUPS: tl.constexpr = K // BLOCK_K
    live = chunk < K // CHUNK
    chunk = tl.minimum(chunk, K // CHUNK - 1)
    group = chunk * CHUNK // BLOCK_K
    column = g
    here = live
    first = 2 * t
    if SPLIT:
        group += t // 2
        column = g % 4
        here = here & (g // 4 == t // 2)
        first = 2 * (t % 2)
    b_scale = f32_scale(tl.load(w_scale + group))
    tokens = ()
    scales = ()
    for j in tl.static_range(SETS):
        m = column + 4 * j
        tokens += (_load_pair(x + m * (K // 8) + 2 * t + chunk * (CHUNK // 8), here & (m < M)),)
        m = first + 4 * j
        low = f32_scale(tl.load(x_scale + m * GROUPS + group, mask=live & (m < M), other=0))
        high = f32_scale(tl.load(x_scale + (m + 1) * GROUPS + group, mask=live & (m + 1 < M), other=0))
        scales += ((low * b_scale, high * b_scale),)
    return tokens, scales


@triton.jit
def _store_tile(
    out, bias, quad, n0, m0, M, N, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr
):
    """The sum over warps (and over the two groups' columns) of a tile's totals -> out [m0 .., n0 ..]."""
    HALVES: tl.constexpr = 2 if SPLIT else 1
    joined = tl.join(tl.join(quad[0], quad[2]), tl.join(quad[1], quad[3]))  # [thread, row g or g + 8, column]
    sums = tl.sum(tl.reshape(joined, [WARPS, 32, 4]), 0)
    sums = tl.sum(tl.reshape(sums, [8, HALVES, 4 // HALVES, 2, 2]), 1)
    sums = tl.reshape(sums, [8 * (4 // HALVES), 2, 2])
    lane = tl.arange(0, 32 // HALVES)[:, None, None]
    n = n0 + lane // (4 // HALVES) + 8 * tl.arange(0, 2)[None, :, None]
    m = m0 + 2 * (lane % (4 // HALVES)) + tl.arange(0, 2)[None, None, :]
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * N + n, sums.to(out.dtype.element_ty), mask=(n < N) & (m < M))
