"""Makes docs/verify-rules.md from the table of rules: `python -m shardmill.verify.rules.catalogue`."""

from __future__ import annotations

from pathlib import Path

from shardmill.verify.rules.table import RULES

CATALOGUE = "docs/verify-rules.md"

PARTS = {
    "SM0": "Files, index, config, manifest, parent (`integrity`)",
    "SM1": "Values of scales (`lint`)",
    "SM2": "Names, exclusions, groups (`lint`)",
    "SM3": "Loading (`loads`)",
    "SM4": "Differences (`diff`)",
    "SM5": "Decoded values (`roundtrip`)",
    "SM6": "Recomputed bits (`reproduce`)",
    "SM7": "Signatures (`signature`)",
    "SM8": "Remote places",
}
HEAD = """# Rules of `shardmill verify`
For whoever reads a finding: what each rule means, how severe it is, and what to do.

Made from the tables in `verify/rules/` by `python -m shardmill.verify.rules.catalogue`; edit the tables, not this
page. An error or a warning makes the exit code 1, an info does not. Ids never change their meaning.
"""


def catalogue() -> str:
    lines = [HEAD]
    for front, title in PARTS.items():
        lines += [
            f"## {title}",
            "",
            "| id | rule | severity | what is wrong | what to do |",
            "|---|---|---|---|---|",
        ]
        for rule in sorted(RULES.values(), key=lambda rule: rule.id):
            if rule.id.startswith(front):
                cells = (rule.id, f"`{rule.slug}`", rule.severity, rule.sentence, rule.advice)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(CATALOGUE).write_text(catalogue())
