"""On a GPU: rows written, restaged and attended against canonical rows; a decode graph; the indexer's top-k; costs.

    SHARDMILL_ORACLE=.oracle python3 -m tests.runtime_patch.gpu.check

Prints a line a fact and ends with 1 where one does not hold. Needs torch, triton and an NVIDIA card of compute
capability 8.9 or more; vLLM is not needed.
"""

import sys
import time

import torch

from shardmill.kernels import torch_topk, triton_topk
from shardmill.kernels.kv_row import CANONICAL_BYTES, RowLayout
from shardmill.kernels.triton_kv import restage_pages
from shardmill.runtime_patch import rows, tiling
from tests.runtime_patch.gpu import oracle

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
    latents[:, :8] *= 8  # a few channels louder than the rest, as latents have them
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
    stage = rows.RowStage(layout, TOPK, tokens_max, 64 << 20)
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


def error_of(out, exact):
    """Median over tokens of the relative error of the output."""
    return ((out.float() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).median().item()


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
            error = error_of(stock, exact)
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
            error = error_of(got, exact)
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
    """Two levels over the tiles of a 64 MiB budget select the scores that one pass over 131,072 selects."""
    generator = torch.Generator("cuda").manual_seed(4)
    count, k, budget = 1024, 512, 64 << 20
    gathered = tiling.gathered_most(1, 64, budget)
    width = tiling.plan(
        rows=count, requests=1, longest=131_072, selected=k, page=64, gathered=gathered, budget_bytes=budget
    ).pools
    scores = torch.randn(count, 131_072, device="cuda", generator=generator)
    scores = (scores * 64).round() / 64  # equal scores occur
    lengths = torch.randint(1, 131_073, (count,), device="cuda", generator=generator).to(torch.int32)
    lengths[:3] = torch.tensor([100, 8192, 131_072])

    def vllm_kernel(logits, part, k):
        rows_in = logits.shape[0]
        chosen = torch.empty(rows_in, k, dtype=torch.int32, device="cuda")
        torch.ops._C.top_k_per_row_prefill(
            logits, torch.zeros_like(part), part, chosen, rows_in, logits.stride(0), logits.stride(1), k
        )
        return chosen

    tiles = [
        (begin, scores[:, begin : begin + width].contiguous()) for begin in range(0, scores.shape[1], width)
    ]
    parts = [(lengths - begin).clamp(0, width) for begin, _ in tiles]

    def two_level(best_of):
        running = torch_topk.Running(count, k, tiling.WINNERS, "cuda", best_of)
        for (begin, tile), part in zip(tiles, parts, strict=True):
            running.add(begin, tile, part)
        return running.best()

    def chosen_scores(pools):
        found = scores.gather(1, pools.clamp_min(0).long()).masked_fill(pools < 0, float("-inf"))
        return found.sort(1, descending=True).values

    plain = two_level(torch_topk.select)
    few = slice(0, 8)
    reference = torch_topk.reference(scores[few].cpu().numpy(), lengths[few].cpu().numpy(), k)
    fact(
        "two-level top-k equals the reference, order and ties",
        plain[few].cpu().tolist() == reference.tolist(),
    )
    if not real:
        return
    whole = vllm_kernel(scores, lengths, k)
    fact(
        "top_k_per_row_prefill selects the same scores",
        torch.equal(chosen_scores(whole), chosen_scores(plain)),
    )

    def serving(logits, part, k):
        return triton_topk.lowest_of_equals(logits, part, vllm_kernel(logits, part, k))

    last = torch.iinfo(torch.int32).max
    rising = torch.where(plain < 0, last, plain).sort(1).values
    for name, found in (("one tile", serving(scores, lengths, k)), ("two levels", two_level(serving))):
        fact(
            f"of equal scores the lower pools, in rising order: {name}",
            torch.equal(torch.where(found < 0, last, found), rising),
        )
    ways = {
        "one pass": lambda: vllm_kernel(scores, lengths, k),
        "two levels, as they come": lambda: two_level(vllm_kernel),
        "two levels": lambda: two_level(serving),
    }
    for name, run in ways.items():
        run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            run()
        torch.cuda.synchronize()
        took = (time.perf_counter() - begin) * 100
        print(f"     top-k of {count} rows x 131,072 pools, {name}: {took:.2f} ms", flush=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    two_level(serving)
    took = torch.cuda.max_memory_allocated() - before
    room = count * k * tiling.SELECTION_BYTES
    fact("two levels keep to the scratch that the plan reckons with", took <= room, f"{took:,} of {room:,} B")


def check_gather():
    """Keys gathered tile by tile, from the page where a tile begins, are those gathered at once: two requests."""
    page, tile, lengths = 64, 256, [1000, 515]
    generator = torch.Generator("cuda").manual_seed(6)
    order = torch.randperm(64, device="cuda", generator=generator).to(torch.int32)
    table = order.view(2, 32).contiguous()
    cache = torch.zeros(64, page, 132, dtype=torch.uint8, device="cuda")
    for request, length in enumerate(lengths):
        at = torch.arange(length, device="cuda")
        slots = table[request, at // page].long() * page + at % page
        keys = torch.randn(length, 128, device="cuda", generator=generator).to(torch.bfloat16)
        torch.ops._C_cache_ops.indexer_k_quant_and_cache(keys, cache, slots, 128, "ue8m0")

    def gather(pages, counts):
        offsets = torch.tensor([0, counts[0], counts[0] + counts[1]], dtype=torch.int32, device="cuda")
        values = torch.zeros(sum(lengths), 128, dtype=torch.float8_e4m3fn, device="cuda")
        scales = torch.zeros(sum(lengths), 4, dtype=torch.uint8, device="cuda")
        torch.ops._C_cache_ops.cp_gather_indexer_k_quant_cache(
            cache, values, scales, pages.contiguous(), offsets
        )
        both = torch.cat([values.view(torch.uint8), scales], 1)
        return [both[: counts[0]], both[counts[0] : counts[0] + counts[1]]]

    whole = gather(table, lengths)
    tiled = [[], []]
    for first in range(0, max(lengths), tile):
        counts = [min(max(length - first, 0), tile) for length in lengths]
        for request, part in enumerate(gather(table[:, first // page :], counts)):
            tiled[request].append(part)
    same = all(torch.equal(torch.cat(parts), keys) for parts, keys in zip(tiled, whole, strict=True))
    fact("keys gathered by tiles are those gathered at once", same and bool(whole[0].any()))


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
    if real:
        check_gather()
    print("all facts hold" if not failed else f"{len(failed)} facts do not hold: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
