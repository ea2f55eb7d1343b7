"""What the real transformers makes of every case, as a record that the default tests hold `verify loads` to.

python -m tests.verify.loaders.record FILE      needs the extra `loaders`
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.verify.loaders.cases import PROFILES, edits, fold, headers_of, models, outcome, with_edit
from tests.verify.loaders.held import held, save

CODES = ("float8_e4m3fn", "float8_e5m2")


def act_as_on_a_card() -> None:
    """Leaves out the check by which FineGrainedFP8 asks for a GPU; all of its loading runs as it is."""
    import transformers
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    FineGrainedFP8HfQuantizer.validate_environment = lambda self, *args, **kwargs: None


def build(parent: Path, out: Path, profile: str) -> None:
    """The child of `parent` by the recipe that init drafts for the profile."""
    from shardmill.pipeline.init.draft import draft
    from shardmill.pipeline.recipe import read as recipes
    from shardmill.pipeline.run import build as run
    from shardmill.pipeline.run.prepare import prepare
    from shardmill.pipeline.stages.job import Checkpoint, Settings, Watch
    from shardmill.pipeline.stages.scan import scan

    made = draft(scan(Checkpoint(recipes.Recipe.model_construct(), parent)), "small", profile)
    recipe = out.with_suffix(".toml")
    recipe.write_text(made.text.replace("# loaders", "loaders"))  # what is refused is the question here
    run.build(prepare(recipes.load(recipe), parent), out, Settings(), Watch())


def real_outcome(folder: Path) -> dict[str, Any]:
    real = held(folder)
    if "error" in real:
        return outcome((), (), (), error=True) | {"said": real["error"][:120]}
    coded = [name for name, dtype in real["held"].items() if dtype in CODES]
    return outcome(coded, real["missing"], real["unexpected"], error=False)


def record(name: str, config: dict[str, Any], home: Path) -> Iterator[dict[str, Any]]:
    """One row for each profile: the child's headers and config, and what each edit of its list became."""
    parent = save(config, home / name, seed=len(name))
    for profile in PROFILES:
        child = home / f"{name}-{profile}"
        build(parent, child, profile)
        built = json.loads((child / "config.json").read_text())
        headers = headers_of(child)
        listed = built["quantization_config"][PROFILES[profile]] or []
        modules = [tensor.removesuffix(".weight") for tensor in headers if tensor.endswith(".weight")]
        rows = []
        for edit in edits(name, listed, modules):
            (child / "config.json").write_text(json.dumps(with_edit(built, edit)))
            rows.append(
                {"edit": {"name": edit.name, "drop": edit.drop, "add": edit.add, "whole": edit.whole}}
                | real_outcome(child)
            )
        tensors = {
            dtype: fold(n for n, d in headers.items() if d == dtype)
            for dtype in sorted(set(headers.values()))
        }
        yield {
            "name": name,
            "profile": profile,
            "config": _short(built),
            "tensors": tensors,
            "outcomes": rows,
        }
        shutil.rmtree(child)
    shutil.rmtree(parent)


def _short(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config.json that the question reads."""
    keys = ("model_type", "tie_word_embeddings", "num_hidden_layers", "quantization_config")
    short = {key: config[key] for key in keys if key in config}
    if "text_config" in config:
        text = config["text_config"]
        short["text_config"] = {key: text[key] for key in keys[:3] if key in text}
    return short


def main() -> None:
    act_as_on_a_card()
    with tempfile.TemporaryDirectory() as home:
        rows = [row for name, config in models() for row in record(name, config, Path(home))]
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n")
    print(f"{len(rows)} children, {sum(len(row['outcomes']) for row in rows)} outcomes")


if __name__ == "__main__":
    main()
