"""Dead data: weights of zeros, stretches of zero bytes, experts that never answer. No manifest vouches for them.

A norm of which a part is zero, or which is the only one of its kind that is zero, has lost a page of a download.

What is honest: norms and biases of zeros (zero-centred norms are published so), rows of zeros that begin and
end as rows do and are a small part of the weight (padded vocabularies, reserved tokens, padded widths), and
whole blocks of codes whose scale is the one that a converter gives to a block of zeros.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set

from shardmill.verify.formats.fused import kind_of
from shardmill.verify.formats.linear import FLAT, FLOATS, Linear
from shardmill.verify.formats.look import Sightings, whole, zero_bytes
from shardmill.verify.formats.zeros import Run
from shardmill.verify.reading.checkpoint import Checkpoint
from shardmill.verify.reading.header import DTYPE_BITS, Tensor
from shardmill.verify.rules.findings import Finding

PADDING_SHARE_MAX = 0.05  # whole rows of zeros up to this share are padding
_HONEST = re.compile(  # names of tensors that are published as zeros
    r"norm|\bln_|bias|position|pos_embed|cls_token|mask|query_tokens|latents|lora_|inv_freq|gamma|beta|layer_?scale"
    r"|(^|\.)(ls\d|A_log|D|dt|alpha|temperature)\b"
)
_NORM = re.compile(r"(norm|\bln_\w+|\bln\d?)(\.weight)?$")
NORM_RUN_BYTES_MIN = (
    512  # 128 numbers of F32 and more: a page of a download, or the part of it that lies in a norm
)
SIBLINGS_MIN = 2
_EXPERT = re.compile(r"^(.*\bexperts\.\d{1,6})\.")


def judged_for_zeros(tensor: Tensor, linears: Mapping[str, Linear]) -> bool:
    """Whether a tensor is a weight of two axes or more in which zeros mean nothing good. `linears`: by weight."""
    linear = linears.get(tensor.name)
    if linear is not None and linear.kind in FLAT:
        return True
    if len(tensor.shape) < 2 or min(tensor.shape) < 2:
        return False
    return tensor.name in linears or (tensor.dtype in FLOATS and not _HONEST.search(tensor.name))


def is_norm(tensor: Tensor) -> bool:
    """Whether a tensor is a norm's vector that a lost page can show in."""
    return (
        len(tensor.shape) == 1
        and tensor.bytes >= NORM_RUN_BYTES_MIN
        and tensor.dtype in FLOATS
        and _NORM.search(tensor.name) is not None
    )


def norm_faults(checkpoint: Checkpoint, sightings: Sightings, norms: Set[str]) -> Iterator[Finding]:
    """`norms`: those with a run of zeros."""
    wholly = {name for name in norms if whole(sightings.runs[name], checkpoint.tensors[name])}
    kinds = Counter(kind_of(name) for name, tensor in checkpoint.tensors.items() if is_norm(tensor))
    dead = Counter(map(kind_of, wholly))
    for name in sorted(norms):
        tensor, kind = checkpoint.tensors[name], kind_of(name)
        if name not in wholly:
            begin, end = max(sightings.runs[name], key=lambda run: run[1] - run[0])
            got = f"{end - begin:,} of {tensor.bytes:,} bytes, from byte {begin:,} of the tensor"
            yield Finding("zero-hole", tensor.file, name, "no stretch of zero bytes", got)
        elif dead[kind] == 1 and kinds[kind] > SIBLINGS_MIN:
            expected = f"numbers, as the other {kinds[kind] - 1} of {kind} have"
            yield Finding("zero-weight", tensor.file, name, expected, f"{tensor} of zeros")


def zero_faults(checkpoint: Checkpoint, sightings: Sightings, vouched: Set[str]) -> Iterator[Finding]:
    """Of the tensors whose runs of zeros were looked for: a whole weight, an expert, or a stretch of one is zero.

    `vouched`: weights whose block scales say of every stretch that it was made of zeros.
    """
    dead = {
        name: tensor
        for name, runs in sorted(sightings.runs.items())
        if whole(runs, tensor := checkpoint.tensors[name]) and not is_norm(tensor)
    }
    experts = _dead_experts(checkpoint, dead)
    for expert, tensors in experts.items():
        got = f"{len(tensors)} weights of zeros"
        yield Finding("dead-expert", tensors[0].file, expert, "weights that are not all zero", got)
    in_experts = {tensor.name for tensors in experts.values() for tensor in tensors}
    for name, tensor in dead.items():
        if name not in in_experts:
            yield Finding(
                "zero-weight", tensor.file, name, "a weight that is not all zero", f"{tensor} of zeros"
            )
    for name, runs in sorted(sightings.runs.items()):
        if name not in dead and name not in vouched:
            yield from _stretches(checkpoint.tensors[name], runs)


def as_published(checkpoint: Checkpoint, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Zeros of a tensor for which a manifest has a digest were published so: named, but no fault of a download.

    Where the bytes are others than the manifest's, its digest is a finding of its own.
    """
    shards = checkpoint.manifest.shards.values() if checkpoint.manifest else ()
    digested = {name for shard in shards for name in shard.tensors}
    for finding in findings:
        if finding.tensor in digested:
            yield Finding("zeros-published", finding.file, finding.tensor, finding.expected, finding.got)
        else:
            yield finding


def _dead_experts(checkpoint: Checkpoint, dead: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Experts of which every weight is zero."""
    banks: dict[str, list[Tensor]] = {}
    for name, tensor in dead.items():
        match = _EXPERT.match(name)
        if match:
            banks.setdefault(match[1], []).append(tensor)
    if not banks:
        return {}
    weights: dict[str, int] = {}
    for name, tensor in checkpoint.tensors.items():
        match = _EXPERT.match(name)
        if (
            match
            and match[1] in banks
            and name.endswith(("weight", "weight_packed", "qweight"))
            and len(tensor.shape) > 1
        ):
            weights[match[1]] = weights.get(match[1], 0) + 1
    return {expert: found for expert, found in banks.items() if len(found) >= max(weights.get(expert, 0), 2)}


def _stretches(tensor: Tensor, runs: tuple[Run, ...]) -> Iterator[Finding]:
    slab = tensor.bytes // tensor.shape[0] if len(tensor.shape) > 2 else 0
    slabs = [index for begin, end in runs for index in range(-(-begin // slab), end // slab)] if slab else []
    for index in slabs:
        place = f"{tensor.name}[{index}]"
        yield Finding(
            "dead-expert", tensor.file, place, "weights that are not all zero", "one of its matrices is zero"
        )
    row = max(DTYPE_BITS[tensor.dtype] * tensor.shape[-1] // 8, 1)
    if slabs or (
        row > 1
        and zero_bytes(runs) <= PADDING_SHARE_MAX * tensor.bytes
        and all(_is_rows(run, row) for run in runs)
    ):
        return
    begin, end = max(runs, key=lambda run: run[1] - run[0])
    got = (
        f"{zero_bytes(runs):,} of {tensor.bytes:,} bytes in {len(runs)} stretches; the longest has {end - begin:,} "
        f"from byte {begin:,} of the tensor, row {begin // row:,}"
    )
    yield Finding("zero-hole", tensor.file, tensor.name, "no stretch of zero bytes", got)


def _is_rows(run: Run, row: int) -> bool:
    """Whether a run begins and ends as rows do, up to zero bytes of the elements beside it."""
    return min(run[0] % row, -run[0] % row) <= 8 and min(run[1] % row, -run[1] % row) <= 8
