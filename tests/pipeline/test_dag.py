"""The DAG is real: `needs` decides what runs when, and what flows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import pytest

from shardmill.pipeline.errors import RecipeError
from shardmill.pipeline.stages import STAGES
from shardmill.pipeline.stages.dag import Stage, arrange, unknown_options
from shardmill.pipeline.stages.job import Checkpoint, Products, ShardJob
from tests.pipeline.parents import MANIFEST, STAGED, build, prepare, published


def stage(produces: str, consumes: tuple[str, ...] = (), scope: Any = "checkpoint", **more: Any) -> Stage:
    return Stage(lambda context, **inputs: (produces, sorted(inputs)), produces, scope, consumes, **more)


TABLE = {
    "a": stage("x"),
    "b": stage("y", ("x",)),
    "c": stage("z", ("x", "y"), "shard"),
    "d": stage("w", ("z",)),
    "e": stage("v", accepts=("x", "y")),
}
NEEDS = {"d": ["c"], "c": ["b", "a"], "b": ["a"], "a": [], "e": ["a"]}


def test_stages_run_after_all_that_they_need_wherever_they_stand() -> None:
    dag = arrange(NEEDS, TABLE)
    for name, needs in NEEDS.items():
        assert all(dag.order.index(need) < dag.order.index(name) for need in needs)


def test_a_stage_sees_what_it_consumes_and_of_what_it_accepts_only_what_its_needs_make() -> None:
    dag = arrange(NEEDS, TABLE)
    products = dag.run("checkpoint", dag.before_shards(), None, {})
    assert products == {"x": ("x", []), "y": ("y", ["x"]), "v": ("v", ["x"])}


def test_checkpoint_stages_stand_before_or_after_the_shards() -> None:
    dag = arrange(NEEDS, TABLE)
    assert (sorted(dag.before_shards()), dag.of_shards(), dag.after_shards()) == (
        ["a", "b", "e"],
        ["c"],
        ["d"],
    )


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ({"a": [], "f": ["a"]}, "stage 'f' is not known; the stages are a, b, c, d, e"),
        ({"a": [], "b": ["a", "x"]}, "stage 'x' is not known"),
        ({"b": ["a"]}, "stage 'b' needs 'a', which the recipe does not name"),
        ({"a": ["b"], "b": ["a"]}, "form a cycle"),
        ({"a": ["a"]}, "form a cycle: a -> a"),
        (
            {"a": [], "b": []},
            "stage 'b' consumes 'x', but nothing that it needs produces it; add 'a' to its `needs`",
        ),
        ({"a": [], "b": ["a"], "c": ["b"]}, "stage 'c' consumes 'x'"),
    ],
)
def test_needs_that_cannot_be_met_are_refused(needs: dict[str, list[str]], words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        arrange(needs, TABLE)
    assert words in str(refused.value)


def test_a_misspelt_stage_is_answered_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match="Did you mean 'classify'"):
        arrange({"scan": [], "clasify": ["scan"]}, STAGES)


def test_a_product_that_is_wanted_and_that_no_stage_makes_is_refused() -> None:
    with pytest.raises(RecipeError, match="no stage of the recipe makes 'y'; add 'b' to"):
        arrange({"a": []}, TABLE, wanted_products=("x", "y"))


def test_a_stages_options_are_those_that_its_row_names() -> None:
    table = {"a": stage("x", options=("depth",))}
    assert unknown_options({"a": ["depth"]}, table) == []
    assert unknown_options({"a": ["depht"]}, table) == [("a", "depht")]


@pytest.mark.parametrize("name", ["scan", "classify", "quantize", "scales", "rewrite", "index"])
def test_a_recipe_without_one_of_the_stages_is_refused(parent: Path, name: str) -> None:
    """With the stage goes what others need of it; nothing fails later for want of it."""
    text = "".join(line for line in STAGED.splitlines(True) if not line.startswith(f"{name} ="))
    with pytest.raises(RecipeError, match=name):
        prepare(parent, text)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'needs = ["classify", "quantize", "scales"]',
            'needs = ["classify", "scales"]',
            "'rewrite' consumes 'codes'",
        ),
        (
            'needs = ["classify", "quantize", "scales"]',
            'needs = ["quantize", "scales"]',
            "'rewrite' consumes 'pieces",
        ),
        ('needs = ["scan", "rewrite"]', 'needs = ["rewrite"]', "'index' consumes 'parent'"),
        ('classify = { needs = ["scan"] }', "classify = { needs = [] }", "'classify' consumes 'parent'"),
        ("scan = { needs = [] }", 'scan = { needs = ["index"] }', "form a cycle"),
        (
            "scan = { needs = [] }",
            "scan = { needs = [], deep = true }",
            r"pipeline\.toml:12: stages\.scan\.deep: the key 'deep' is not known",
        ),
        (
            "rewrite = {",
            'reconcile = { needs = ["classify", "index"] }\nrewrite = {',
            "'reconcile' runs once a shard, but needs 'index', which runs after all shards",
        ),
    ],
)
def test_dropping_a_need_that_is_consumed_is_refused(parent: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        prepare(parent, STAGED.replace(old, new))


def test_an_added_stage_runs_in_its_place(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes]
) -> None:
    """A function, a row of the table, a TOML entry: it sees what it consumes, once a shard, between its neighbours."""
    seen: list[tuple[str, list[str], list[str]]] = []

    def audit(job: Any, codes: dict[str, Any], scales: dict[str, bytes]) -> dict[str, Any]:
        seen.append((job.plan.file, sorted(codes), sorted(scales)))
        return dict(scales)

    row = Stage(audit, "scales", "shard", consumes=("codes", "scales"))
    monkeypatch.setitem(cast(dict[str, Stage], STAGES), "audit", row)
    text = STAGED.replace(
        'rewrite = { needs = ["classify", "quantize", "scales"] }',
        'audit = { needs = ["quantize", "scales"] }\nrewrite = { needs = ["classify", "quantize", "audit"] }',
    )
    build(parent, tmp_path / "out", text, workers=1)
    files = [file for file, _, _ in seen]
    assert sorted(files) == sorted(name for name in reference if name.endswith(".safetensors"))
    [(_, codes, scales)] = [each for each in seen if each[0] == "model-00001-of-00003.safetensors"]
    assert codes == ["model.layers.0.attn.k.weight", "model.layers.0.attn.q.weight"]
    assert scales == [f"{name}_scale_inv" for name in codes]
    made = published(tmp_path / "out")
    assert {name for name in made if made[name] != reference[name]} == {MANIFEST, "README.md"}, (
        "they hold the recipe's text, and the plan key, which the order of the stages is in"
    )


def test_a_checkpoint_stage_that_is_added_runs_after_the_shards_that_it_needs(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    count = Stage(lambda whole, receipts: seen.append(len(receipts)), "count", "checkpoint", ("receipts",))
    monkeypatch.setitem(cast(dict[str, Stage], STAGES), "count", count)
    build(parent, tmp_path / "out", STAGED.replace("index = {", 'count = { needs = ["rewrite"] }\nindex = {'))
    assert seen == [4]


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_takes_and_returns_what_the_table_of_products_says(name: str) -> None:
    """The parameters of a stage are products by name and type, and so is what it returns."""
    products, row = get_type_hints(Products), STAGES[name]
    hints = get_type_hints(row.run)
    assert hints.pop("return") == products[row.produces]
    context = next(iter(hints.values()))
    assert context is (ShardJob if row.scope == "shard" else Checkpoint)
    elsewhere = hints.pop("made_elsewhere", None)  # `rewrite` takes by one name all that it accepts
    taken = [*row.consumes, *(() if elsewhere else row.accepts)]
    assert list(hints)[1:] == taken
    assert all(same_or_wider(elsewhere, products[product]) for product in row.accepts if elsewhere)
    for product in taken:
        assert same_or_wider(hints[product], products[product]), product


def same_or_wider(taken: Any, made: Any) -> bool:
    """A stage may take a Mapping where a dict is made."""
    return taken == made or (
        get_args(taken) == get_args(made) and issubclass(get_origin(made), get_origin(taken))
    )
