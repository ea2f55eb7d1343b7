"""The DAG of stages: what runs, in which order, and what flows from one to the next.

The recipe says what each stage `needs`; the table in shardmill.pipeline.stages says what each consumes and produces.
A stage sees only what the stages that it needs have produced, and what the run makes of that (BETWEEN).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from typing import Any, Literal, TypeVar, cast

from shardmill.pipeline.errors import RecipeError

Scope = Literal["checkpoint", "shard"]
Made = TypeVar("Made", bound=Mapping[str, Any])  # shardmill.pipeline.stages.job.Products

# What the run itself makes -> the stage's product that it comes with: a shard's pieces, which the plan takes from the
# assignments; all receipts, from each shard's own; and the plan that these fulfil.
BETWEEN: Mapping[str, str] = {"pieces": "assignments", "receipts": "receipt", "plan": "receipt"}


@dataclass(frozen=True, slots=True)
class Stage:
    """A row of the table of stages.

    `run(context, **products)` gets what the stage `consumes`, and of what it `accepts` that which its needs
    produce; it returns its one product. A stage of scope "shard" runs once for each shard. One that is `by_piece`
    consumes pieces alone and makes a dict, each entry from the pieces of one parent tensor alone: so several workers
    can share its work.
    """

    run: Callable[..., Any]
    produces: str
    scope: Scope
    consumes: tuple[str, ...] = ()
    accepts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # keys that its table in the recipe may hold beside `needs`
    by_piece: bool = False


@dataclass(frozen=True, slots=True)
class Dag:
    """The stages of a recipe in an order in which each comes after all that it needs."""

    order: tuple[str, ...]
    needs: Mapping[str, tuple[str, ...]]
    table: Mapping[str, Stage]

    def run(self, scope: Scope, names: Iterable[str], context: Any, products: Made) -> Made:
        """Runs those of `names` that have `scope`, in order; returns `products` with each one's product added."""
        chosen, made = set(names), dict(products)
        for name in self.order:
            stage = self.table[name]
            if name in chosen and stage.scope == scope:
                made[stage.produces] = stage.run(context, **self._inputs(name, made))
        return cast(Made, made)

    def _inputs(self, name: str, products: Mapping[str, Any]) -> dict[str, Any]:
        stage = self.table[name]
        produced = {self.table[need].produces for need in self.needs[name]}
        wanted = [*stage.consumes, *(product for product in stage.accepts if product in produced)]
        return {product: products[product] for product in wanted}

    def before_shards(self) -> list[str]:
        """Checkpoint-wide stages that no shard stage comes before."""
        return [name for name in self.order if self._side(name) == "before"]

    def of_shards(self) -> list[str]:
        return [name for name in self.order if self.table[name].scope == "shard"]

    def by_piece(self) -> list[str]:
        """Of the shard stages, those whose work several workers can share."""
        return [name for name in self.of_shards() if self.table[name].by_piece]

    def after_shards(self) -> list[str]:
        return [name for name in self.order if self._side(name) == "after"]

    def _side(self, name: str) -> str:
        if self.table[name].scope == "shard":
            return "in"
        return "before" if all(self._side(need) == "before" for need in self.needs[name]) else "after"


def unknown_options(
    options: Mapping[str, Iterable[str]], table: Mapping[str, Stage]
) -> list[tuple[str, str]]:
    """(stage, key) for keys in the recipe that the stage does not know. An unknown stage is arrange's to refuse."""
    return [
        (name, option)
        for name, given in options.items()
        if name in table
        for option in given
        if option not in table[name].options
    ]


def arrange(
    needs: Mapping[str, Iterable[str]], table: Mapping[str, Stage], wanted_products: Iterable[str] = ()
) -> Dag:
    """The Dag that a recipe's `needs` give over the known stages. Raises RecipeError with every problem.

    Some stage must make each of `wanted_products`.
    """
    named = {name: tuple(wanted) for name, wanted in needs.items()}
    problems = [
        f"stage {name!r} is not known; the stages are {', '.join(table)}"
        + (f". Did you mean {close[0]!r}?" if (close := get_close_matches(name, table, n=1)) else "")
        for name in sorted({*named, *(need for wanted in named.values() for need in wanted)})
        if name not in table
    ]
    problems += [
        f"stage {name!r} needs {need!r}, which the recipe does not name; add it to [stages]"
        for name, wanted in named.items()
        for need in wanted
        if need in table and need not in named
    ]
    if problems:
        raise RecipeError(problems)
    try:
        order = tuple(TopologicalSorter(named).static_order())
    except CycleError as error:
        raise RecipeError([f"the stages form a cycle: {' -> '.join(error.args[1])}"]) from None
    problems = [
        f"stage {name!r} consumes {product!r}, but nothing that it needs produces it; "
        f"add {_makers(product, table)} to its `needs`"
        for name in order
        for product in table[name].consumes
        if BETWEEN.get(product, product) not in {table[need].produces for need in named[name]}
    ]
    made = {table[name].produces for name in order}
    problems += [
        f"no stage of the recipe makes {product!r}; add {_makers(product, table)} to [stages]"
        for product in wanted_products
        if product not in made
    ]
    problems += _unordered(named, table)
    dag = Dag(order, named, table)
    late = set(dag.after_shards())
    problems += [
        f"stage {name!r} runs once a shard, but needs {need!r}, which runs after all shards"
        for name in dag.of_shards()
        for need in named[name]
        if need in late
    ]
    if problems:
        raise RecipeError(problems)
    return dag


def _ancestors(named: Mapping[str, tuple[str, ...]]) -> dict[str, set[str]]:
    """Stage -> all that it needs, and what these need in turn."""
    found: dict[str, set[str]] = {}
    for name in TopologicalSorter(named).static_order():
        found[name] = set(named[name]).union(*(found[need] for need in named[name]))
    return found


def _unordered(named: Mapping[str, tuple[str, ...]], table: Mapping[str, Stage]) -> Iterable[str]:
    """Products that two stages make without an order, or that a stage would get in another state than the run uses."""
    above = _ancestors(named)
    makers: dict[str, list[str]] = {}
    for name in named:
        makers.setdefault(table[name].produces, []).append(name)
    for product, names in makers.items():
        if len(names) < 2:
            continue
        for one, other in combinations(names, 2):
            if one not in above[other] and other not in above[one]:
                yield f"stages {one!r} and {other!r} both make {product!r}, in no order"
        for name in named:
            if product not in table[name].consumes or name in names:
                continue
            for maker in names:
                if maker not in above[name]:
                    yield (
                        f"stage {name!r} consumes {product!r}, which {maker!r} makes anew; add {maker!r} to its needs, "
                        f"or remove that stage"
                    )


def _makers(product: str, table: Mapping[str, Stage]) -> str:
    origin = BETWEEN.get(product, product)
    return " or ".join(repr(name) for name, stage in table.items() if stage.produces == origin)
