"""Whether a file beside the model holds the model's own weights under other names.

Mistral publishes `consolidated.safetensors` beside transformers' shards. The rows of q and k are in another order
there, but the first and the last row keep their places: these are looked for in the model, of a spread of tensors. A
copy of a file that only looks like one, or of another model, is still a stray.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import LENGTH_BYTES, Tensor, header_length, parse_header
from shardmill.verify.reading.source import read
from shardmill.verify.rules.findings import UnreadableError

PROBE_BYTES = 4_096
TENSORS_MAX = 48  # of the copy that are looked at, those with the fewest namesakes by shape first
PROBES_MAX = 3_000  # of the model
REMOTE_PROBES_MAX = 24
HEADER_BYTES_MAX = 16 << 20
Form = tuple[str, tuple[int, ...]]


def same_weights(checkpoint: Checkpoint, file: str) -> bool:
    """False also where the copy can't be read, or has nothing that the model has in its shape."""
    try:
        tensors = _tensors(checkpoint, file)
        model: dict[Form, list[Tensor]] = {}
        for tensor in checkpoint.tensors.values():
            if checkpoint.readable(tensor):
                model.setdefault((tensor.dtype, tensor.shape), []).append(tensor)
        rows = sorted((len(model.get(_form(tensor), ())), tensor.name, tensor) for tensor in tensors)
        return bool(rows) and bool(rows[0][0]) and _all_found(checkpoint, rows, model)
    except UnreadableError:
        return False


def _all_found(
    checkpoint: Checkpoint, rows: list[tuple[int, str, Tensor]], model: dict[Form, list[Tensor]]
) -> bool:
    left = REMOTE_PROBES_MAX if checkpoint.source.remote else PROBES_MAX
    probed: dict[Form, set[tuple[bytes, bytes]]] = {}
    for count, _, tensor in rows[:TENSORS_MAX]:
        form = _form(tensor)
        if form not in probed:
            left -= count
            if left < 0:
                break
            probed[form] = set(_probes(checkpoint, model[form]))
        if not probed[form].issuperset(_probes(checkpoint, [tensor])):
            return False
    return bool(probed)


def _form(tensor: Tensor) -> Form:
    return tensor.dtype, tensor.shape


def _probes(checkpoint: Checkpoint, tensors: Iterable[Tensor]) -> Iterable[tuple[bytes, bytes]]:
    """The beginnings of the first row and the ends of the last."""
    for tensor in tensors:
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        width = min(tensor.bytes // max(rows, 1), PROBE_BYTES)
        begin, end = tensor.begin, tensor.begin + tensor.bytes
        first = read(checkpoint.source, tensor.file, begin, begin + width)
        yield bytes(first), bytes(read(checkpoint.source, tensor.file, end - width, end))


def _tensors(checkpoint: Checkpoint, file: str) -> list[Tensor]:
    size = checkpoint.files[file]
    length = header_length(file, read(checkpoint.source, file, 0, min(LENGTH_BYTES, size)), size)
    if length > HEADER_BYTES_MAX:
        return []
    header = parse_header(file, read(checkpoint.source, file, LENGTH_BYTES, LENGTH_BYTES + length), size)
    return [tensor for tensor in header.tensors if tensor.bytes] if header.sound else []
