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
    seconds, wanted = build["against_a_copy"], {"numpy": "<= 1.7 / 1.4", "numba": "<= 1.25 / 1.1"}
    tuned = seconds["tuned copy"]
    rows = [("tuned copy and `sync`", f"{tuned:.2f} s", "1", "")]
    rows += [
        (name, f"{value:.2f} s", f"{value / tuned:.2f}", wanted.get(name, ""))
        for name, value in seconds.items()
        if name != "tuned copy"
    ]
    note = (
        f"{build['small_bytes'] / 1e9:.2f} GB, half of it BF16 that converts, page cache warm, "
        f"{build['rounds']} rounds, load {build['load_before']:.1f} before. The tuned copy reads, writes and syncs "
        f"as a build does, a worker a core, and converts nothing (`python -m bench.copy`). copy: `cp -r` and `sync`.\n"
    )
    columns = ("build", "median", "of the tuned copy", "must / aim")
    return table("A build against a copy of its parent", columns, rows) + note


def facts(build: dict[str, Any]) -> str:
    rows: list[tuple[Any, ...]] = []
    names = {
        "small": "the same parent",
        "tall": "a tensor of 1.27 GB",
        "wide": "a tensor of [128, 4,000,000]",
    }
    for kernel, limit in (("numpy", "<= 260 / 200 MiB"), ("numba", "<= 420 / 300 MiB")):
        for name, mib in build["together_mib"].get(kernel, {}).items():
            what = f"memory of all processes, 2 workers, {kernel}: {names[name]}"
            rows.append((what, f"{mib:.0f} MiB", limit))
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
    return table("Memory, the judge, and doing little", ("", "measured", "must / aim"), rows)


def straightness(points: dict[float, float]) -> str:
    """How far the points between the first and the last lie from the line through these two, at most."""
    (x0, y0), *between, (x1, y1) = points.items()
    line = {x: y0 + (y1 - y0) * (x - x0) / (x1 - x0) for x, _ in between}
    return f"{max(abs(y - line[x]) / line[x] for x, y in between):.0%}"


def growth(build: dict[str, Any]) -> str:
    tensors = {float(count): seconds for count, seconds in build["plan_cpu_seconds_by_tensors"].items()}
    grows = {float(size): row for size, row in build["growth"].items()}
    built = {size: row["build"] for size, row in grows.items()}
    judged = {row["child"]: row["integrity"] for row in grows.values()}
    hashed = {row["child"]: row["read + sha256"] for row in grows.values()}
    plans = [(f"{int(count):,} tensors", f"{seconds:.2f} s") for count, seconds in tensors.items()]
    rows = [
        (f"{size / 1e9:.2f} GB", f"{row['build']:.2f} s", f"{row['child'] / 1e9:.2f} GB", f"{row['integrity']:.2f} s",
         f"{row['read + sha256']:.2f} s")
        for size, row in grows.items()
    ]  # fmt: skip
    columns = ("parent", "build", "output", "verify integrity", "read + sha256 of it")
    share = slope(hashed) / slope(judged)
    note = (
        f"The same 14,002 tensors, ever wider. Each further GB of the parent costs {slope(built):.2f} s to build; "
        f"the points lie within {straightness(built)} of a line. Each further GB of output costs integrity "
        f"{slope(judged):.3f} s, and reading and hashing {slope(hashed):.3f} s: once it has started, it runs at "
        f"{share:.2f} of that rate.\n"
    )
    return (
        table("How a plan grows, in CPU seconds (<= 2.0 s at 150,226)", ("", ""), plans)
        + f"Within {straightness(tensors)} of a line.\n\n"
        + table("How a build and its judge grow", columns, rows)
        + note
    )


def larger_than_memory(large: dict[str, Any]) -> str:
    seconds, copy = large["seconds"], large["seconds"]["copy"]
    names = {"copy": "`cp -r` and `sync`", "build": "build", "no sha256": "build, no sha256"}
    rows = [
        (
            names[name],
            f"{value:.1f} s",
            f"{value / copy:.2f}",
            f"{large['parent_bytes'] / value / 1e9:.2f} GB/s",
        )
        for name, value in seconds.items()
    ]
    ratio = seconds["build"] / seconds["no sha256"]
    return (
        table("A build larger than the memory, cold", ("", "median", "of the copy", "of the parent"), rows)
        + f"{large['parent_bytes'] / 1e9:.1f} GB in, {large['kernel']}. Here the disk is the limit: with sha256 of "
        + f"every output, {ratio:.2f} of without (<= 1.1 / 1.0). `make bench-large`.\n"
    )


def slope(points: dict[float, float]) -> float:
    """Seconds for each further GB."""
    (x0, y0), *_, (x1, y1) = points.items()
    return (y1 - y0) / (x1 - x0) * 1e9


def changes(revisions: dict[str, Any]) -> str:
    rows = [
        (row["revision"], row["subject"], *(f"{seconds:.2f} s" for seconds in row["seconds"]))
        for row in revisions["rows"]
    ]
    columns = ("revision", "last change", *(f"`{each}`" for each in revisions["settings"]))
    return (
        table("What each change gave", columns, rows)
        + "Builds of the parent above, each revision in its turn (`make bench-revisions`).\n"
    )


def where_time_goes(profile: dict[str, Any]) -> str:
    kernels = list(profile["shares"])
    places = dict.fromkeys(place for kernel in kernels for place in profile["shares"][kernel])
    shares = [(place, *(f"{profile['shares'][k].get(place, 0)} %" for k in kernels)) for place in places]
    names = dict.fromkeys(call for kernel in kernels for call in profile["calls"][kernel])
    calls = [(f"`{name}`", *(f"{profile['calls'][k].get(name, 0):,}" for k in kernels)) for name in names]
    return (
        table("Where the processor's time of a build goes", ("", *kernels), shares)
        + "\n"
        + table("And its system calls", ("", *kernels), calls)
        + "Shares of `perf`'s samples and counts of `strace -c` (`make bench-profile`).\n"
    )


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
    seconds, wanted = peers["seconds"], {"torch loop": ">= 5 / 7", "llm-compressor": ">= 10 / 13"}
    best = min(
        value for name, value in seconds.items() if name.startswith(("numpy", "numba")) and "no" not in name
    )
    rows = []
    for name, value in seconds.items():
        takes = peers.get("takes", {}).get(name)
        rows.append(
            (
                name,
                f"{value:.2f} s",
                f"{value / best:.1f}",
                wanted.get(name, ""),
                _seconds(peers.get("cold", {}).get(name)),
                _seconds(peers.get("start", {}).get(name)),
                f"{takes['mib']:.0f} MiB" if takes else "",
                f"{takes['disk_gb']:.1f} GB" if takes else "",
            )
        )
    versions = ", ".join(f"{name} {version}" for name, version in peers["peers"].items())
    columns = (
        "",
        "warm",
        "of our best",
        "must / aim",
        "cold, once",
        "start-up",
        "memory, all processes",
        "disk",
    )
    note = (
        f"{peers['parent_bytes'] / 1e9:.1f} GB, {peers['jobs']} workers or jobs each. The peers hash nothing and sync "
        f"nothing of themselves; all get a sync in their time. Start-up is the imports alone, and part of each time.\n"
    )
    return table("Peers on the same parent", columns, rows) + f"{versions}. {note}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def every_core(cores: dict[str, Any]) -> str:
    """Builds by number of workers, on the machine that the figures name."""
    builds, most = cores["builds"], cores["workers"]
    counts = list(next(iter(builds.values())))
    rows: list[tuple[Any, ...]] = [
        (
            f"build, {kernel}",
            *(f"{each[count]['wall']:.1f} s ({each[count]['cpu']:.0f})" for count in counts),
            {"numba": "<= 3.5 / 2.8 s", "numpy": "<= 4.3 / 3.5 s"}[kernel],
        )
        for kernel, each in builds.items()
    ]
    blank = [""] * (len(counts) - 1)
    rows.append(("verify integrity", *blank, f"{cores['integrity']:.1f} s", "<= 1.8 / 1.3 s"))
    rows.append(("read + sha256 of the output", *blank, f"{cores['read + sha256']:.1f} s", ""))
    rows += [(name, *blank, f"{seconds:.1f} s", "") for name, seconds in cores.get("limits", {}).items()]
    rows += [(name, *blank, f"{seconds:.1f} s", "") for name, seconds in cores.get("start", {}).items()]
    rows += [
        (f"memory of all processes together, {kernel}", *blank, f"{mib} MiB", "")
        for kernel, mib in cores.get("together_mib", {}).items()
    ]
    columns = ("", *(f"{count} workers" for count in counts), f"must / aim at {most}")
    machine = cores["machine"]
    note = (
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}; "
        f"{cores['parent_bytes'] / 1e9:.1f} GB in {cores['files']} files, {cores['output_bytes'] / 1e9:.1f} GB out, "
        f"both in memory (tmpfs), with sha256. Wall seconds, median, and in parentheses processor seconds. "
        f"Every build writes the same manifest. `make bench-cores`.\n"
    )
    return table("Every core", columns, rows) + note


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
    parts = [HEAD.format(**build["machine"]), against_a_copy(build), facts(build), growth(build)]
    others = {
        "cores": every_core,
        "large": larger_than_memory,
        "peers": peer_ratios,
        "peers-14": peer_ratios,
        "profile": where_time_goes,
        "revisions": changes,
        "kernel": kernel_rates,
        "recipes": losses,
    }
    for name, write in others.items():
        measured = read(folder, name)
        parts.append(write(measured) if measured else f"## {name}\n\nnot run\n")
    parts += [
        Path(__file__).with_name(name).read_text() for name in ("hub.md", "forward.md", "gpu_forward.md")
    ]
    Path("BENCHMARKS.md").write_text("\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
