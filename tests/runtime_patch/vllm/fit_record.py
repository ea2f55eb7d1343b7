"""The real planner's answers to the cases of `fit_cases`, kept for the default tests, and the table that docs show.

python -m tests.runtime_patch.vllm.fit_record REPORT...   writes tests/verify/fit/planned.json and the table of docs
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from shardmill.verify.fit.layers import block_tokens, check_planned, plan_layers
from shardmill.verify.fit.planner import plan_blocks
from shardmill.verify.fit.preset import Preset
from shardmill.verify.fit.shape import ConfigError, read_shape
from tests.runtime_patch.vllm.fit_cases import CARDS, cases

REPOSITORY = Path(__file__).parents[3]
RECORD = REPOSITORY / "tests/verify/fit/planned.json"
DOCS = REPOSITORY / "docs/verify-fit.md"
BEGIN, END = "<!-- planned: begin -->\n", "<!-- planned: end -->\n"
COMPARED = ("block_tokens", "block_bytes", "need_bytes", "max_context", "groups")


def key_of(case: dict[str, Any]) -> str:
    """A digest of a case: a record of another one must not pass for it."""
    return hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:12]


def ours(case: dict[str, Any]) -> dict[str, int] | str:
    """What `fit` plans, or the sentence by which it refuses."""
    preset = Preset(**{**case["preset"], "captures": (1,)})
    try:
        shape = read_shape(case["config"])
        check_planned(shape, preset)
        plan = plan_blocks(plan_layers(shape, preset))
    except ConfigError as error:
        return str(error)
    return {
        "block_tokens": block_tokens(shape, preset),
        "block_bytes": plan.block_bytes,
        "need_bytes": plan.need_bytes(preset.max_model_len),
        "max_context": plan.max_context(case["pin"], preset.max_model_len),
        "groups": len(plan.groups),
    }


def read_record() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    return found


def write_record(reports: list[Path]) -> None:
    planned: dict[str, Any] = {}
    for path in reports:
        planned |= json.loads(path.read_text())
    rows = {}
    for case in cases():
        found = planned.get(str(case["index"]))
        if found is not None:
            kept = {name: found[name] for name in (*COMPARED, "backend", "error") if name in found}
            rows[str(case["index"])] = {"family": case["family"], "case": key_of(case), **kept}
    lines = ",\n".join(f'"{index}": {json.dumps(row)}' for index, row in rows.items())
    RECORD.write_text(f"{{\n{lines}\n}}\n")


def table() -> str:
    """Family, cards, attention backends, and in how many cases every figure is equal, as Markdown."""
    record, by_family = read_record(), {}
    for case in cases():
        found = record.get(str(case["index"]))
        if found is None or "error" in found:
            continue
        row = by_family.setdefault(
            case["family"],
            {"equal": 0, "refused": 0, "all": 0, "sm": set(), "ranks": set(), "backend": set()},
        )
        mine = ours(case)
        row["all"] += 1
        row["sm"].add(case["preset"]["sm"])
        row["ranks"].add(case["preset"]["tensor_parallel"])
        row["backend"] |= {
            name for name in found["backend"] if "INDEXER" not in name and name != "KPOOL_TAIL"
        }
        row["equal"] += mine == {name: found[name] for name in COMPARED}
        row["refused"] += isinstance(mine, str)
    lines = [
        "| model_type | equal | refused | SM | ranks | backends that vLLM chose |",
        "|---|---|---|---|---|---|",
    ]
    for family, row in sorted(by_family.items()):
        cards = ", ".join(str(sm) for sm in CARDS if sm in row["sm"])
        ranks = ", ".join(map(str, sorted(row["ranks"])))
        lines.append(
            f"| {family} | {row['equal']} of {row['all'] - row['refused']} | {row['refused']} | {cards} | {ranks} "
            f"| {', '.join(sorted(row['backend']))} |"
        )
    planned = sum(row["all"] - row["refused"] for row in by_family.values())
    equal = sum(row["equal"] for row in by_family.values())
    lines += ["", f"{equal} of {planned} plans equal, {len(by_family)} families, both cache dtypes."]
    return "\n".join(lines) + "\n"


def in_docs() -> str:
    """The table as docs hold it now."""
    return DOCS.read_text().partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    write_record([Path(word) for word in sys.argv[1:]])
    text = DOCS.read_text()
    before, _, rest = text.partition(BEGIN)
    DOCS.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
    print(table())


if __name__ == "__main__":
    main()
