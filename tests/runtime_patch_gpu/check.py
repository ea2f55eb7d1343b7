"""On a GPU: rows written, restaged and attended against canonical rows; a decode graph; the indexer's top-k; costs.

    SHARDMILL_ORACLE=.oracle python3 -m tests.runtime_patch_gpu.check

Prints a line a fact and ends with 1 where one does not hold. Needs torch, triton and an NVIDIA card of compute
capability 8.9 or more; vLLM is not needed.
"""

import sys
import time

import torch

from kernels import torch_topk
from kernels.kv_row import CANONICAL_BYTES, RowLayout
from kernels.triton_kv import restage_pages
from runtime_patch import rows, tiling
from tests.runtime_patch_gpu import oracle

FORMATS = [("8888", "stock"), ("8888", "fine"), ("8666", "fine"), ("6666f", "fine"), ("6666", "fine")]
BLOCK, GAP, BLOCKS = 4352, 128, 8  # rows of a block as vLLM sizes it, rows of other layers between, blocks
TOPK, HEADS = 2176, 64
LAYERS, STEP_MS = (
    12,
    6.9,
)  # sparse layers with the draft; a decode step of the published system at 144.5 tokens/s
failed = []


def fact(name, holds, told=""):
    print(f"{'ok  ' if holds else 'FAIL'} {name}{': ' if told else ''}{told}", flush=True)
    if not holds:
        failed.append(name)


def cache_of(row_bytes):
    """A cache with gaps between its blocks, poisoned: blocks u8 [B, 4352, R] and flat pages u8 [P, 64, R]."""
    stride = (BLOCK + GAP) * row_bytes
    flat = torch.full((BLOCKS * stride,), 0xFF, dtype=torch.uint8, device="cuda")
    return flat.as_strided((BLOCKS, BLOCK, row_bytes), (stride, row_bytes, 1)), flat.view(-1, 64, row_bytes)


def data(tokens):
    """Latents with a spread of magnitudes and outliers, their slots, physical row numbers; seeded."""
    generator = torch.Generator("cuda").manual_seed(1)
    spread = torch.randn(tokens, 1, device="cuda", generator=generator).exp()
    latents = (torch.randn(tokens, 512, device="cuda", generator=generator) * spread).to(torch.bfloat16)
    latents[1, ::7] *= 300
    latents[2] = 0
    slots = torch.randperm(BLOCKS * BLOCK, device="cuda", generator=generator)[:tokens]
    slots[7] = -1
    return latents, slots


def wanted_of(slots, tokens):
    """int32 [tokens, 2176] physical rows; -1 first, in between, and as the padded end that vLLM's buffer has."""
    generator = torch.Generator("cuda").manual_seed(2)
    known = slots[slots >= 0]
    chosen = known[torch.randint(len(known), (tokens, TOPK), device="cuda", generator=generator)]
    physical = (chosen // BLOCK * (BLOCK + GAP) + chosen % BLOCK).to(torch.int32)
    physical[0, 0] = -1
    physical[:, 100:103] = -1
    physical[:, 2051:] = -1
    return physical.contiguous()


def queries(tokens):
    generator = torch.Generator("cuda").manual_seed(3)
    q = torch.zeros(tokens, HEADS, 576, dtype=torch.bfloat16, device="cuda")
    q[..., :512] = torch.randn(tokens, HEADS, 512, device="cuda", generator=generator) * 0.2
    return q


def stage_of(layout, tokens_max):
    stage = rows.RowStage(layout, TOPK, tokens_max, torch.device("cuda"), 64 << 20)
    scratch, places = (torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in stage.specs)
    scratch.fill_(0xFF)  # codes and scales that are NaN: whatever is read without having been staged shows
    places.fill_(-1)
    return stage, scratch, places


def attend_staged(stage, scratch, places, attend, q, pages, wanted):
    parts = []
    for part in stage.chunks(q.shape[0]):
        staged, found = stage.restage(pages, wanted[part], scratch, places)
        parts.append(attend(q[part].contiguous(), staged, found).clone())
    return torch.cat(parts)


def check_rows(attend, real):
    """Each format: attention through the hook's restaging is bit for bit that on canonical rows."""
    latents, slots = data(20_000)
    lookup = torch.zeros(BLOCKS * (BLOCK + GAP), 512, device="cuda")
    valid = slots >= 0
    lookup[slots[valid] // BLOCK * (BLOCK + GAP) + slots[valid] % BLOCK] = latents[valid].float()
    for tokens in (2, 40):
        q, wanted = queries(tokens), wanted_of(slots, tokens)
        exact = torch.cat(
            [
                oracle.attend_latents(
                    q[t : t + 1], lookup[wanted[t : t + 1].clamp_min(0).long()], wanted[t : t + 1]
                )
                for t in range(tokens)
            ]
        )
        stock = None
        if real:
            cache, pages = cache_of(656)
            oracle.write_stock(latents, cache, slots)
            stock = attend(q, pages, wanted)
            error = ((stock.float() - exact).norm() / exact.norm()).item()
            print(f"     stock 656 rows, {tokens} tokens: output error against bf16 latents {error:.4f}")
        for rung, scales in FORMATS:
            layout = RowLayout.parse(rung, scales)
            cache, pages = cache_of(layout.row_bytes)
            rows.write_rows(latents, cache, slots, layout)
            canonical = torch.empty(pages.shape[0] * 64, CANONICAL_BYTES, dtype=torch.uint8, device="cuda")
            restage_pages(
                pages, torch.arange(pages.shape[0], dtype=torch.int32, device="cuda"), canonical, layout
            )
            stage, scratch, places = stage_of(layout, 1024)
            got = attend_staged(stage, scratch, places, attend, q, pages, wanted)
            want = torch.cat(
                [
                    attend(q[p].contiguous(), canonical.view(-1, 64, 656), wanted[p].contiguous())
                    for p in stage.chunks(tokens)
                ]
            )
            error = ((got.float() - exact).norm() / exact.norm()).item()
            name = f"{layout.tag}, {tokens} tokens"
            fact(
                f"{name}: staged equals canonical",
                torch.equal(got, want) and bool(got.isfinite().all()),
                f"output error against bf16 latents {error:.4f}",
            )
            if stock is not None and layout.tag == "8888-stock" and tokens <= stage.tokens:
                fact(f"{name}: equals stock vLLM bit for bit", torch.equal(got, stock))


def check_graph(attend):
    """A decode step in a CUDA graph follows its inputs: same bits as eager after they change."""
    for rung, scales in FORMATS:
        layout = RowLayout.parse(rung, scales)
        latents, slots = data(20_000)
        cache, pages = cache_of(layout.row_bytes)
        rows.write_rows(latents, cache, slots, layout)
        stage, scratch, places = stage_of(layout, 1024)
        q, wanted = queries(2), wanted_of(slots, 2)
        fresh, place = latents[100:102].clone(), slots[100:102].clone()

        def step(
            q=q,
            wanted=wanted,
            fresh=fresh,
            place=place,
            cache=cache,
            pages=pages,
            layout=layout,
            stage=stage,
            scratch=scratch,
            places=places,
        ):
            rows.write_rows(fresh, cache, place, layout)
            return attend(q, *stage.restage(pages, wanted, scratch, places))

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        fresh.copy_(latents[200:202] * 2)
        wanted.copy_(wanted_of(slots, 2).flip(1).contiguous())
        q.copy_(queries(2).flip(0))
        scratch.fill_(0xFF)
        graph.replay()
        replayed = out.clone()
        scratch.fill_(0xFF)
        fact(f"{layout.tag}: a replayed decode step equals eager", torch.equal(replayed, step()))


def milliseconds(run, repeats=20):
    """Median of graph replays."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def check_cost():
    """What restaging adds to a decode step: all sparse layers, a captured step of 2 and of 8 tokens."""
    for rung, scales in FORMATS[2:]:
        layout = RowLayout.parse(rung, scales)
        latents, slots = data(20_000)
        caches = []
        for _ in range(LAYERS):
            cache, pages = cache_of(layout.row_bytes)
            rows.write_rows(latents, cache, slots, layout)
            caches.append(pages)
        stage, scratch, places = stage_of(layout, 1024)
        for tokens in (2, 8):
            wanted = wanted_of(slots, tokens)

            def step(caches=caches, wanted=wanted, stage=stage, scratch=scratch, places=places):
                for pages in caches:
                    stage.restage(pages, wanted, scratch, places)

            took = milliseconds(step)
            told = f"{took * 1000:.1f} us a step of {tokens} tokens for {LAYERS} layers"
            share = f", {took / STEP_MS:.2%} of {STEP_MS} ms" if tokens == 2 else ""
            print(f"     {layout.tag}: restaging {told}{share}", flush=True)


def check_topk(real):
    """Two levels over tiles of 8,192 pools select the scores that one pass over 131,072 selects."""
    generator = torch.Generator("cuda").manual_seed(4)
    count, k, width = 512, 512, tiling.GATHERED_POOLS
    scores = torch.randn(count, 131_072, device="cuda", generator=generator)
    scores = (scores * 64).round() / 64  # equal scores occur
    lengths = torch.randint(1, 131_073, (count,), device="cuda", generator=generator).to(torch.int32)
    lengths[:3] = torch.tensor([100, 8192, 131_072])

    def tile_kernel(logits, part):
        chosen = torch.empty(count, k, dtype=torch.int32, device="cuda")
        torch.ops._C.top_k_per_row_prefill(
            logits, torch.zeros_like(part), part, chosen, count, logits.stride(0), logits.stride(1), k
        )
        return chosen

    def two_level(select):
        best = torch_topk.empty(count, k, "cuda")
        for begin in range(0, scores.shape[1], width):
            tile = scores[:, begin : begin + width].contiguous()
            part = (lengths - begin).clamp(0, width)
            best = torch_topk.fold(best, begin, tile, select(tile, part))
        return torch_topk.unpack(best)

    def chosen_scores(pools):
        found = scores.gather(1, pools.clamp_min(0).long()).masked_fill(pools < 0, float("-inf"))
        return found.sort(1, descending=True).values

    plain = two_level(lambda tile, part: torch_topk.select(tile, part, k))
    few = slice(0, 8)
    reference = torch_topk.reference(scores[few].cpu().numpy(), lengths[few].cpu().numpy(), k)
    fact(
        "two-level top-k equals the reference, order and ties",
        plain[few].cpu().tolist() == reference.tolist(),
    )
    if not real:
        return
    whole = tile_kernel(scores, lengths)
    fact(
        "top_k_per_row_prefill selects the same scores",
        torch.equal(chosen_scores(whole), chosen_scores(plain)),
    )
    serving = two_level(tile_kernel)
    fact(
        "two levels with vLLM's kernel select the same scores",
        torch.equal(chosen_scores(serving), chosen_scores(plain)),
    )
    for name, run in (
        ("one pass", lambda: tile_kernel(scores, lengths)),
        ("two levels", lambda: two_level(tile_kernel)),
    ):
        run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            run()
        torch.cuda.synchronize()
        print(
            f"     top-k of {count} rows x 131,072 pools, {name}: {(time.perf_counter() - begin) * 200:.2f} ms"
        )


def main():
    real = oracle.load()
    attend = oracle.attend_flashmla if real else oracle.attend_torch
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; attention: "
        f"{'FlashMLA of vLLM 0.33.0' if real else 'a torch reference (no oracle found)'}"
    )
    check_rows(attend, real)
    if real:  # the torch reference is not made for capture
        check_graph(attend)
    check_cost()
    check_topk(real)
    print("all facts hold" if not failed else f"{len(failed)} facts do not hold: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
