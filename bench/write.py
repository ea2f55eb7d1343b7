"""Writes BENCHMARKS.md from the JSON that the benches left in a folder.

    python -m bench.write [build/bench]

A bench that was not run says so; nothing is carried over from an earlier page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = """# Benchmarks
Measured on {cpu}, {cores} cores, {memory_gib} GiB, Python {python}. Ratios are of medians within one run in which each
contender has its turn, so that a slow minute is slow for all; absolute seconds belong to this machine. This page is
written by `python -m bench.write` from the JSON of `make bench` and `make bench-peers`.
"""


def read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() and path.stat().st_size else {}


def table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [f"## {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""])


def against_a_copy(build: dict[str, Any]) -> str:
    seconds, wanted = (
        build["against_a_copy"],
        {
            "numpy": "<= 2.1 / 1.6",
            "numba": "<= 1.5 / 1.2",
            "numpy, no sha256": "<= 1.7 / 1.3",
            "numba, no sha256": "<= 1.2 / 0.9",
        },
    )
    copy = seconds["copy"]
    rows = [("`cp -r` and `sync`", f"{copy:.2f} s", "1", "")]
    rows += [
        (f"build, {name}", f"{seconds[name]:.2f} s", f"{seconds[name] / copy:.2f}", goal)
        for name, goal in wanted.items()
        if name in seconds
    ]
    note = (
        f"{build['small_bytes'] / 1e9:.2f} GB, half of it BF16 that converts, page cache warm, "
        f"{build['rounds']} rounds, load {build['load_before']:.1f} before.\n"
    )
    return (
        table("A build against a copy of its parent", ("", "median", "of the copy", "must / aim"), rows)
        + note
    )


def facts(build: dict[str, Any]) -> str:
    rows: list[tuple[Any, ...]] = []
    rss, big = build["peak_rss_mib"], build["big_tensor_peak_rss_mib"]
    for kernel, limit in (("numpy", "<= 200 / 100 MiB"), ("numba", "<= 260 / 180 MiB")):
        if kernel in rss:
            rows.append((f"peak RSS of the build, {kernel}", f"{rss[kernel]:.0f} MiB", limit))
            rows.append((f"the same, one tensor of 1.27 GB, {kernel}", f"{big[kernel]:.0f} MiB", limit))
    if cold := build["cold"]:
        ratio = cold["sha256"] / cold["no sha256"]
        rows.append(("cold cache: with sha256 of every output, of without", f"{ratio:.2f}", "<= 1.1 / 1.0"))
    judged = build["integrity"]
    share = judged["read + sha256"] / judged["integrity"]
    rows.append(
        ("verify integrity, share of this machine's read + sha256 rate", f"{share:.2f}", ">= 0.85 / 0.95")
    )
    rows.append(
        ("nothing to do, 121 files, 150,226 tensors", f"{build['nothing_to_do_seconds']:.2f} s", "<= 3 / 1 s")
    )
    again = build["incremental"]
    rows.append(
        (
            "incremental build after an input-scales change",
            f"{again['seconds']:.2f} s, {again['bytes_read']:,} B read",
            "<= 2 / 1 s",
        )
    )
    rows += [
        (f"plan of {int(count):,} tensors, CPU", f"{seconds} s", "<= 5 s at 150,226")
        for count, seconds in build["plan_cpu_seconds_by_tensors"].items()
    ]
    rows += [
        (f"build of {int(size) / 1e9:.2f} GB", f"{seconds:.2f} s", "a straight line")
        for size, seconds in build.get("build_seconds_by_bytes", {}).items()
    ]
    return table("Memory, the judge, and doing little", ("", "measured", "must / aim"), rows)


def kernel_rates(kernel: dict[str, Any]) -> str:
    rates = kernel["rates"]
    rows = [
        (
            rate["recipe"],
            rate["kernel"],
            "x".join(map(str, rate["block"])),
            rate["source"],
            f"{rate['gb_per_s']:.2f}",
            f"{rate['gb_per_s'] / kernel['copy_gb_per_s']:.0%}",
        )
        for rate in rates
    ]
    note = "amax/1 must reach 0.8 (numpy) and 4.5 (numba), aim 0.95 and 6. CPU time, one pinned core, [8192, 4096].\n"
    return (
        table(
            "Encoding, GB/s of BF16 a core",
            ("recipe", "kernel", "block", "weights", "GB/s", "of memcpy"),
            rows,
        )
        + note
    )


def peer_ratios(peers: dict[str, Any]) -> str:
    seconds = peers["seconds"]
    best = seconds.get("shardmill, numba", seconds["shardmill, numpy"])
    plain = seconds["shardmill, numpy"]
    wanted = {"torch loop": ">= 5 / 7", "llm-compressor": ">= 10 / 13"}
    rows = [
        (name, f"{value:.1f} s", f"{value / plain:.1f}", f"{value / best:.1f}", wanted.get(name, ""))
        for name, value in seconds.items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in peers["peers"].items())
    return (
        table(
            "Peers on the same parent",
            ("", "median", "of our numpy", "of our fast extra", "must / aim"),
            rows,
        )
        + versions
        + "\n"
    )


def losses(recipes: dict[str, Any]) -> str:
    rows = [
        (
            row["weights"],
            "x".join(map(str, row["block"])),
            row["recipe"],
            f"{row['stored']:.4f}",
            f"{row['as_bf16']:.4f}",
            f"{row['served']:.4f}",
            f"{row['exact_blocks']} of {row['blocks']}",
        )
        for row in recipes["rows"]
    ]
    columns = ("weights", "block", "numerics", "stored %", "as BF16 %", "served %", "exact blocks")
    note = "As BF16: rounded as the parent was; 0 is bit for bit. Served: after vLLM re-rounds to powers of two.\n"
    return table("What each recipe loses", columns, rows) + note


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build/bench")
    build = read(folder, "build")
    if not build:
        print(f"{folder}/build.json is not there; run `make bench` first")
        return 1
    parts = [HEAD.format(**build["machine"]), against_a_copy(build), facts(build)]
    for name, write in (("kernel", kernel_rates), ("peers", peer_ratios), ("recipes", losses)):
        measured = read(folder, name)
        parts.append(write(measured) if measured else f"## {name}\n\nnot run\n")
    parts.append(Path(__file__).with_name("forward.md").read_text())
    Path("BENCHMARKS.md").write_text("\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
