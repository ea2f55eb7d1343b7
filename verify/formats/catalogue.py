"""Makes docs/verify-forms.md from the table of forms and formulas: `python -m shardmill.verify.formats.catalogue`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardmill.verify.formats.by_elements import BY_ELEMENTS
from shardmill.verify.formats.by_inputs import BY_INPUTS
from shardmill.verify.formats.formulas import FORMULAS, PROOFS
from shardmill.verify.formats.linear import GROUP, SCALE_DTYPES, Form
from shardmill.verify.formats.look import BLOCKED
from shardmill.verify.formats.table import FORMS
from shardmill.verify.formats.values import CODE_LAWS

CATALOGUE = "docs/verify-forms.md"

HEAD = """# Which forms are judged, and how deeply
For whoever judges a quantized checkpoint: what is checked of each way to store numbers.

Made from the tables in `verify/formats/` by `python -m shardmill.verify.formats.catalogue`; edit the tables,
not this page.

`parts`: the tensors of a weight belong together by name, dtype and shape. `scales`: each is finite and above
zero. `codes`: none is NaN. `blocks`: no zero scale over live codes, no live scale over codes of zero.
`decoded`: codes and scales become numbers, held to siblings, to what a network can have, and with a parent to
its floats. `origin`: formulas of known tools are computed again from the parent, bit for bit. `-` means that
there is nothing to judge: every byte is a code, a scale has no blocks.
"""
TAIL = """
Of every form, and of floats: NaN and infinity in tensors that are no codes, whole weights of zeros, stretches
of 4 KiB of zeros and more, experts of zeros, byte copies of siblings. Scales of an FP8 KV cache (`k_scale`,
`v_scale`): finite, above zero, there in each layer, declared.

Not judged, and said so in every verdict: bitsandbytes' INT8, MLX, HQQ, GGUF, and whatever else is not in
this table.
"""


def catalogue() -> str:
    lines = [
        HEAD,
        "| form | published by | tensors | parts | scales | codes | blocks | decoded | origin | not judged |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for form in FORMS.values():
        cells = (form.title, form.makers, form.parts, *depth(form), "; ".join(form.lacks))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, TAIL, *_formulas()]) + "\n"


def depth(form: Form) -> tuple[str, ...]:
    """parts, scales, codes, blocks, decoded, origin of one form."""
    e4m3 = "F8_E4M3" in form.parts and "F8_E4M3" in CODE_LAWS
    known = any(form.kind in formula.kinds for formula in FORMULAS)
    return (
        "yes",
        "yes"
        if set(form.scale_dtypes) & {dtype for dtypes in SCALE_DTYPES.values() for dtype in dtypes}
        else "no",
        "yes" if e4m3 else "-",
        "yes" if form.kind in BLOCKED else "no" if form.kind in GROUP else "-",
        "yes" if form.unpack is not None or form.kind in (*BY_INPUTS, *BY_ELEMENTS) else "no",
        "yes" if known else "no",
    )


def _formulas() -> Iterator[str]:
    yield "## The formulas that `verify origin` knows\n"
    yield "| formula | tools |"
    yield "|---|---|"
    for formula in (*FORMULAS, *PROOFS):
        yield f"| {formula.name} | {formula.tools} |"


if __name__ == "__main__":
    Path(CATALOGUE).write_text(catalogue())
