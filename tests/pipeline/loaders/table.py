"""Architectures x profiles x formats in stock transformers: right, refused by plan, or wrong.

python -m tests.pipeline.loaders.table [KIND ...]      needs the extra `loaders`

Each model is random, saved by save_pretrained, drafted by `shardmill init`, planned, built, and loaded by transformers
as a user loads it. Right: nothing is missing or left over, every parameter has the bits of the child decoded by
tests.pipeline.loaders.decode, and so have the logits. Where a format says that activations are quantized as well,
compressed-tensors does so in its forward; that is turned off by its own switch, since the question is the weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.pipeline.loaders.architectures import KINDS, model_config

WAYS = (
    ("fp8", "fp8"),
    ("fp8", "fp8-tensor"),
    ("compressed-tensors", "fp8"),
    ("compressed-tensors", "fp8-channel"),
    ("compressed-tensors", "fp8-tensor"),
    ("compressed-tensors", "mxfp8"),
    ("compressed-tensors", "mxfp4"),
    ("compressed-tensors", "nvfp4"),
    ("compressed-tensors", "int8-channel"),
    ("compressed-tensors", "int4-group"),
)
RIGHT, REFUSED, WRONG = "right", "refused", "WRONG"


@dataclass(frozen=True)
class Row:
    kind: str
    profile: str
    form: str
    verdict: str
    words: str = ""

    def __str__(self) -> str:
        return f"{self.kind:18} {self.profile:18} {self.form:13} {self.verdict:8} {self.words}"


def rows(kind: str, home: Path, ways: tuple[tuple[str, str], ...] = WAYS) -> Iterator[Row]:
    from tests.verify.loaders.held import save

    parent = save(model_config(kind), home / kind, seed=len(kind))
    for profile, form in ways:
        child = home / f"{kind}-{profile}-{form}"
        verdict, words = _verdict(parent, child, profile, form)
        shutil.rmtree(child, ignore_errors=True)
        yield Row(kind, profile, form, verdict, words)
    shutil.rmtree(parent)


def _verdict(parent: Path, child: Path, profile: str, form: str) -> tuple[str, str]:
    return draft_and_build(parent, child, profile, form) or loaded(child)


def draft_and_build(parent: Path, child: Path, profile: str, form: str) -> tuple[str, str] | None:
    """None where init, plan and build all do their work; else what stopped, and whether that is a refusal."""
    from click.testing import CliRunner

    from shardmill.pipeline.commands.main import shardmill

    recipe = str(child.with_suffix(".toml"))
    there = ["--recipe", recipe, "--parent", str(parent), "--out", str(child)]
    commands = (
        ["init", str(parent), "--out", recipe, "--profile", profile, "--to", form, "--force"],
        ["plan", *there],
        ["build", *there, "--workers", "1"],
    )
    for command in commands:
        done = CliRunner().invoke(shardmill, command)
        if done.exit_code:
            said = str(done.exception or done.output).strip().partition("\n")[0]
            return (REFUSED if command[0] != "build" else WRONG), f"by {command[0]}: {said}"
    return None


def loaded(child: Path) -> tuple[str, str]:
    """What transformers makes of a child, beside the child decoded."""
    import torch

    plain = decoded_beside(child)
    try:
        right = _model(plain)[0]
        wanted = _logits(right)
        model, faults = _model(child)
        got = _logits(model)
    except Exception as error:
        shutil.rmtree(plain)
        return (
            WRONG,
            f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150] if str(error) else ''}",
        )
    shutil.rmtree(plain)
    if faults:
        return WRONG, faults
    theirs, ours = right.state_dict(), model.state_dict()
    differ = [name for name, value in theirs.items() if name in ours and not _same(value, ours[name])]
    if differ:
        return WRONG, f"{len(differ)} of {len(theirs)} parameters differ, {differ[0]} first"
    if not torch.equal(wanted, got) or not torch.isfinite(wanted).all():
        return WRONG, f"logits differ by {(wanted - got).abs().max().item():.2g}"
    return RIGHT, f"{len(theirs)} parameters and {wanted.numel()} logits equal"


def decoded_beside(child: Path) -> Path:
    """The child as plain floats, in a folder beside it."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.pipeline.loaders.decode import decoded

    plain = child.with_name(child.name + "-plain")
    plain.mkdir()
    config = json.loads((child / "config.json").read_text())
    config.pop("quantization_config", None)
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    (plain / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Any] = {}
    for file in child.glob("*.safetensors"):
        tensors |= load_file(file)
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in decoded(tensors, dtype).items()},
        plain / "model.safetensors",
        {"format": "pt"},
    )
    return plain


def _model(folder: Path) -> tuple[Any, str]:
    import transformers

    config = json.loads((folder / "config.json").read_text())
    auto = (
        transformers.AutoModelForImageTextToText
        if "vision_config" in config
        else transformers.AutoModelForCausalLM
    )
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
        contextlib.redirect_stdout(nowhere),
    ):
        model, info = auto.from_pretrained(folder, output_loading_info=True)
    faults = [
        f"{len(found)} {key}, {sorted(map(str, found))[0]} first" for key, found in info.items() if found
    ]
    return model.eval(), "; ".join(faults)


def _logits(model: Any) -> Any:
    import torch

    for module in model.modules():
        module.quantization_enabled = False  # compressed-tensors' switch of activations
    tokens = torch.arange(7, 31).reshape(1, 24)
    with torch.no_grad(), Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        return model(input_ids=tokens, use_cache=False).logits


def _same(one: Any, other: Any) -> bool:
    import torch

    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def main(kinds: list[str]) -> int:
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as home:
        for kind in kinds or KINDS:
            for row in rows(kind, Path(home)):
                found[row.verdict] += 1
                print(row, flush=True)
    print(
        f"{len(kinds or KINDS)} architectures: "
        + ", ".join(f"{count} {verdict}" for verdict, count in found.items())
    )
    return int(bool(found[WRONG]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
