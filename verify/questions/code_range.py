"""Integer codes of fewer bits than their bytes: whether they keep to the range that the config declares.

compressed-tensors' W4AFP8 stores INT4 codes a byte each. A weight of INT8 under that declaration is read as something
else by every loader. A few rows of each weight are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from shardmill.verify.formats.declared import CONFIG, Declaration
from shardmill.verify.formats.linear import Linear
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.source import read
from shardmill.verify.rules.findings import Finding, UnreadableError

BYTES_MAX = 1 << 16  # of a weight, from its middle on


def range_faults(
    checkpoint: Checkpoint, linears: Mapping[str, Linear], declared: Declaration | None
) -> Iterator[Finding]:
    bits = declared.bits if declared is not None else None
    if bits is None or not 1 < bits < 8:
        return
    least, most = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    for linear in linears.values():
        weight = linear.weight
        if linear.kind != "int8" or weight is None or not checkpoint.readable(weight):
            continue
        begin = weight.begin + max(weight.bytes - BYTES_MAX, 0) // 2
        try:
            data = read(checkpoint.source, weight.file, begin, min(begin + BYTES_MAX, weight.end))
        except UnreadableError as error:
            yield error.finding
            continue
        codes = np.frombuffer(data, np.int8)
        if codes.size and (codes.min() < least or codes.max() > most):
            said = f"codes of {bits} bits, {least} to {most}"
            yield Finding("entry-kind", CONFIG, linear.module, said, f"{codes.min()} to {codes.max()}")
