"""Hostile bytes for header, index, config and manifest: `python -m tests.verify.fuzz --inputs 200000`.

hypothesis cuts, repeats, overwrites and splices true files, of every published form. For every input: no exception, at
most 5 s of CPU time, and peak memory within 300 MiB at the end. Headers go to the safetensors library too: whatever it
refuses, we refuse. `--seed` begins another range of inputs, so that several can run beside each other.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from zlib import crc32

import safetensors
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from shardmill.verify.questions.diff import diff
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import lint
from shardmill.verify.questions.loads import loads
from shardmill.verify.questions.reproduce import reproduce
from shardmill.verify.questions.roundtrip import Limits, roundtrip
from shardmill.verify.reading.header import LENGTH_BYTES, header_length, parse_header
from shardmill.verify.rules.findings import Report, UnreadableError
from tests.verify.memory import Memory
from tests.verify.zoo.clean import LM, encoded
from tests.verify.zoo.headers import HEADERS
from tests.verify.zoo.model import Model, bf16, block_scales, f32, packed, scales
from tests.verify.zoo.published import PUBLISHED, parent

Files = dict[str, bytes]

SECONDS_MAX = 5.0
PEAK_BYTES_MAX = 300 << 20
ROUND = 4_000  # hypothesis remembers what it tried; a new round forgets

TOKENS = (
    *(
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"-",
        b"0",
        b"1e9",
        b"1.5",
        b"NaN",
        b"null",
        b"true",
        b"\\u0000",
    ),
    *(
        b"\\ud800",
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf",
        b"18446744073709551615",
        b"18446744073709551616",
        b"9" * 60,
    ),
    *(
        b"../",
        b"/etc/passwd",
        b"__metadata__",
        b'"dtype"',
        b'"shape"',
        b'"data_offsets"',
        b'"F8_E4M3"',
        b'"U8"',
    ),
    *(
        b"[" * 2000,
        b'{"a":' * 2000,
        b"[0,0]",
        b"[]",
        b"{}",
        b'""',
        b"weight_scale_inv",
        b"input_scale",
        b"re:(a+)+$",
    ),
    *(
        b"*" * 40,
        b"[!a]*?",
        b'"quant_algo"',
        b'"group_size":0',
        b'"NVFP4"',
        b"layers.99999.",
        b"experts.999999.",
    ),
)

Edit = tuple[int, int, int, bytes]


def edits_of(draw: int) -> list[Edit]:
    """One to four edits from one drawn number: a single draw is what makes 200,000 inputs cheap."""
    random = Random(draw)
    return [
        (
            random.randrange(5),
            random.randrange(1 << 16),
            random.randrange(65),
            random.choice(TOKENS) if random.random() < 0.7 else random.randbytes(random.randrange(7)),
        )
        for _ in range(random.randrange(1, 5))
    ]


EDITS = st.integers(0, (1 << 48) - 1).map(edits_of)


def edited(data: bytes, edits: list[Edit]) -> bytes:
    for kind, place, size, token in edits:
        at = place % (len(data) + 1)
        cut = data[at : at + size]
        tail = data[at + size :]
        data = data[:at] + (token + data[at:], tail, token + tail, cut + cut + tail, tail[::-1])[kind]
    return data


def tiny() -> Model:
    """Few tensors of each kind: one expert, one Linear in block FP8, one left alone."""
    expert = f"{LM}layers.0.mlp.experts.0."
    tensors = {"lm_head.weight": bf16("h", 8, 16), f"{LM}layers.0.mlp.gate.weight": bf16("g", 1, 16)}
    for name in ("gate", "up", "down"):
        module = f"{expert}{name}_proj"
        tensors[f"{module}.weight"] = packed(module, 16, 8)
        tensors[f"{module}.weight_scale"] = block_scales(module, 16, 1)
        tensors[f"{module}.weight_scale_2"] = scales("w13" if name != "down" else "d", base=2e-5)
        tensors[f"{module}.input_scale"] = f32(0.004)
    q = f"{LM}layers.0.self_attn.q_proj.weight"
    tensors[q], tensors[f"{q}_scale_inv"] = encoded(bf16("q", 32, 32), 32)
    entries = {name.removesuffix(".weight"): {"quant_algo": "NVFP4", "group_size": 16}
               for name, blob in tensors.items() if blob.dtype == "U8"}  # fmt: skip
    entries[q.removesuffix(".weight")] = {"quant_algo": "FP8_BLOCK", "group_size": 32}
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": entries,
        "ignore": ["lm_head", "*.mlp.gate"],
    }
    config = {
        "model_type": "glm5_next",
        "text_config": {"num_hidden_layers": 1},
        "quantization_config": quantization,
    }
    conversion = {"family": "q", "numerics": "amax/1", "block": [32, 32]}
    return Model(
        {"model-00001-of-00001.safetensors": tensors}, config, manifest={"conversions": {q: conversion}}
    )


KEPT = re.compile(r"layers\.0\.(mlp\.(experts\.(0\.)?)?down_proj|self_attn\.k_proj)|norm|kv_scale|buffer")


def kept_small(model: Model) -> Model:
    """The same with one or two weights, which is enough to meet the code of its form."""
    model.shards = {
        file: {name: blob for name, blob in shard.items() if KEPT.search(name)}
        for file, shard in model.shards.items()
    }
    return model


def written(model: Model) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


class Corpus:
    """The true files that edits begin from: checkpoints, each with the floats that it may have been made from."""

    def __init__(self) -> None:
        self.checkpoints = [written(tiny()), *(written(kept_small(form.model())) for form in PUBLISHED)]
        floats = {moe: written(kept_small(parent(moe))) for moe in (False, True)}
        self.parents = [floats[False], *(floats[form.moe] for form in PUBLISHED)]
        self.files = self.checkpoints[0]
        shard = self.files["model-00001-of-00001.safetensors"]
        length = header_length("", shard[:LENGTH_BYTES], len(shard))
        small = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
        self.headers = [shard[LENGTH_BYTES : LENGTH_BYTES + length], small]
        self.headers += [_header(files) for files in self.checkpoints[1:]]
        self.headers += [data[LENGTH_BYTES:] for _, data in HEADERS.values() if 8 < len(data) < 2_000]


def _header(files: Files) -> bytes:
    shard = files["model.safetensors"]
    return shard[LENGTH_BYTES : LENGTH_BYTES + header_length("", shard[:LENGTH_BYTES], len(shard))]


def check_header(header: bytes, data_bytes: int) -> None:
    file = len(header).to_bytes(LENGTH_BYTES, "little") + header + bytes(data_bytes)
    try:
        length = header_length("f", file[:LENGTH_BYTES], len(file))
        accepted = parse_header("f", file[LENGTH_BYTES : LENGTH_BYTES + length], len(file)).sound
    except UnreadableError:
        accepted = False
    if accepted:
        safetensors.deserialize(file)  # raises what we should have refused


Question = Callable[[Memory, Memory], Report]
QUESTIONS: tuple[Question, ...] = (
    lambda source, parent: integrity(source),
    lambda source, parent: lint(source),
    lambda source, parent: loads(source),
    integrity,
    lambda source, parent: roundtrip(source, parent, Limits()),
    lambda source, parent: reproduce(source, parent, blocks=20, seed=1),
    diff,
)


def check_file(
    files: Files,
    name: str,
    data: bytes,
    questions: Sequence[Question] = QUESTIONS,
    floats: Files | None = None,
) -> None:
    source = Memory({**files, name: data})
    for question in questions:
        json.loads(question(source, Memory(floats or files)).as_json())


def run(inputs: int, first_seed: int = 0, say: Callable[[str], None] = lambda line: None) -> float:
    """Tries `inputs` inputs, half of them headers; the seconds of the slowest."""
    corpus, slowest = Corpus(), [0.0]

    def timed(check: Callable[[], None]) -> None:
        begin = time.process_time()  # a busy machine must not count against us
        check()
        slowest[0] = max(slowest[0], time.process_time() - begin)

    for number, begin in enumerate(range(0, inputs, ROUND)):
        count = min(ROUND, inputs - begin)
        usual = settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )

        @usual
        @seed(first_seed + number)
        @given(st.integers(0, 1 << 16), EDITS, st.integers(0, 64))
        def headers(which: int, edits: list[Edit], data_bytes: int) -> None:
            header = edited(corpus.headers[which % len(corpus.headers)], edits)
            timed(lambda: check_header(header, data_bytes))

        @usual
        @seed(first_seed + number)
        @given(st.integers(0, 1 << 16), EDITS)
        def files(which: int, edits: list[Edit]) -> None:
            number = which % len(corpus.checkpoints)
            files, floats = corpus.checkpoints[number], corpus.parents[number]
            name = sorted(files)[which // len(corpus.checkpoints) % len(files)]
            data = edited(files[name], edits)
            question = QUESTIONS[crc32(data) % len(QUESTIONS)]
            timed(lambda: check_file(files, name, data, [question], floats))

        (headers, files)[number % 2]()
        say(f"{begin + count:>9,} inputs, slowest {slowest[0]:.3f} s, peak {peak_bytes() >> 20} MiB")
    return slowest[0]


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--inputs", type=int, default=200_000)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    slowest = run(asked.inputs, asked.seed, print)
    fine = slowest <= SECONDS_MAX and peak_bytes() <= PEAK_BYTES_MAX
    print(
        f"{asked.inputs:,} inputs without a traceback; slowest {slowest:.3f} s, peak {peak_bytes() >> 20} MiB"
    )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
