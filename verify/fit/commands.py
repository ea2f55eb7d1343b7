"""`shardmill verify fit`: does a checkpoint serve under a preset on a card, and with which pin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from shardmill.verify.commands.options import source_at
from shardmill.verify.fit import show
from shardmill.verify.fit.answer import Answer, Rung, judge, ladder
from shardmill.verify.fit.bootlog import LogError, compare, read_log
from shardmill.verify.fit.cards import CARDS, Card, custom_card
from shardmill.verify.fit.headers import Facts, read_facts
from shardmill.verify.fit.layers import check_planned
from shardmill.verify.fit.preset import (
    KDA_BACKENDS,
    ROW_BYTES,
    Preset,
    PresetError,
    find_preset,
    override,
    read_preset,
)
from shardmill.verify.fit.published.attempts import mlp_alone, tell
from shardmill.verify.fit.published.boots import BOOTS, GLM_5_3_FLASH_SERVED
from shardmill.verify.fit.published.fork import plan_fork
from shardmill.verify.fit.shape import ConfigError, read_shape
from shardmill.verify.fit.waterfall import draw
from shardmill.verify.fit.weights import WeightsError
from shardmill.verify.rules.findings import UnreadableError, printable


class UnaskedError(click.ClickException):
    """The question could not be asked."""

    exit_code = 2


PICTURES = (".svg", ".png")


@click.command("fit")
@click.argument("place", metavar="[DIR]", required=False)
@click.option(
    "--preset",
    "--lane",
    "preset_name",
    metavar="PRESET",
    help="A preset of runtime_patch/presets, or a preset's TOML file.",
)
@click.option(
    "--rung", type=click.Choice(list(ROW_BYTES)), help="Row format of the KV cache instead of the preset's."
)
@click.option(
    "--max-model-len", type=click.IntRange(min=1), metavar="N", help="Context instead of the preset's."
)
@click.option("--no-mtp", is_flag=True, help="Without the draft layer.")
@click.option("--no-prefix-caching", is_flag=True, help="Without prefix caching, which keeps more states.")
@click.option("--kda-prefill-backend", type=click.Choice(KDA_BACKENDS), help="FlashKDA keeps one more state.")
@click.option(
    "--pin", type=click.IntRange(min=1), metavar="BYTES", help="--kv-cache-memory-bytes of the preset."
)
@click.option(
    "--card", "card_name", default="rtx-pro-6000", show_default=True, help=f"{', '.join(CARDS)}, or GiB."
)
@click.option("--ladder", "with_ladder", is_flag=True, help="Also every rung with the pin that it needs.")
@click.option("--log", "log", metavar="FILE", help="Compare with a vLLM boot log, term by term.")
@click.option("--waterfall", metavar="FILE", help="Draw a rank's memory (.svg or .png; extra `report`).")
@click.option(
    "--published", is_flag=True, help="Print this model's residuals on published figures; needs no DIR."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def fit(
    place: str | None,
    preset_name: str | None,
    rung: str | None,
    max_model_len: int | None,
    no_mtp: bool,
    no_prefix_caching: bool,
    kda_prefill_backend: str | None,
    pin: int | None,
    card_name: str,
    with_ladder: bool,
    log: str | None,
    waterfall: str | None,
    published: bool,
    as_json: bool,
) -> None:
    """Does the checkpoint in DIR serve under PRESETS, and with which pin? From headers alone, before anything boots.

    \b
    Example: shardmill verify fit build/checkpoint --preset everything-512k --ladder

    Exit code 0: fits; 1: does not fit, or too close to call; 2: the question could not be asked.
    """
    if published:
        _published()
        return
    if place is None or preset_name is None:
        raise click.UsageError("give a checkpoint's folder and --preset PRESETS (or --published alone)")
    if waterfall is not None and Path(waterfall).suffix not in PICTURES:
        raise click.UsageError(f"--waterfall {waterfall}: give a name that ends in .svg or .png")
    card = _card(card_name)
    preset = override(
        _preset(preset_name),
        rung=rung,
        max_model_len=max_model_len,
        pin=pin,
        kda_backend=kda_prefill_backend,
        draft_tokens=0 if no_mtp else None,
        prefix_caching=False if no_prefix_caching else None,
        sm=card.sm,
    )
    try:
        facts = read_facts(source_at(place))
        check_planned(facts.shape, preset)
        _check_length(facts, preset)
        answer = _judge(facts, preset, card)
        lines = _lines(facts, answer, with_ladder, log, as_json)
        if waterfall is not None:
            _draw(answer, Path(waterfall))
    except (ConfigError, WeightsError, LogError, UnreadableError) as error:
        raise UnaskedError(printable(str(error), 1000)) from None
    click.echo("\n".join(lines))
    sys.exit(0 if answer.verdict == "fits" else 1)


def _check_length(facts: Facts, preset: Preset) -> None:
    """vLLM refuses to start with a longer context than the model has."""
    if preset.max_model_len > facts.shape.max_position:
        raise ConfigError(
            f"{preset.name}: {preset.max_model_len:,} tokens, and config.json allows {facts.shape.max_position:,} "
            "(max_position_embeddings with its RoPE scaling): vLLM does not start; lower --max-model-len"
        )


def _judge(facts: Facts, preset: Preset, card: Card) -> Answer:
    weights = facts.weights(preset.tensor_parallel, draft=preset.draft_tokens > 0, vision=preset.images > 0)
    return judge(facts.shape, preset, weights, card, block_fp8=facts.block_fp8)


def _lines(facts: Facts, answer: Answer, with_ladder: bool, log: str | None, as_json: bool) -> list[str]:
    sparse = facts.shape.sparse is not None
    fork = plan_fork(facts.shape, answer.preset) if sparse and facts.shape.is_hybrid else None
    rungs: tuple[Rung, ...] = ()
    if facts.shape.has_rungs and (with_ladder or as_json):
        rungs = tuple(
            ladder(facts.shape, answer.preset, answer.weights, answer.card, block_fp8=facts.block_fp8)
        )
    compared = compare(answer, read_log(Path(log))) if log else []
    if as_json:
        value = show.as_json(answer, rungs, fork)
        value["log"] = [
            {"term": r.term, "low": r.low, "high": r.high, "logged": r.logged, "residual": r.residual}
            for r in compared
        ]
        return [json.dumps(value, indent=2)]
    lines = list(show.as_text(answer, rungs, fork))
    return [*lines, "", f"Predicted against {log}:", *show.log_text(compared)] if log else lines


def _published() -> None:
    """The published card's ladder by the fork's arithmetic, and other models' boots by the planner's."""
    shape = read_shape(GLM_5_3_FLASH_SERVED)
    click.echo("The published ladder, by the published fork's arithmetic:")
    click.echo("\n".join(show.attempts_text(tell(shape))))
    mlp = mlp_alone(shape)
    click.echo(
        f"  FP8 for the MLP alone: saves {mlp.saved_bytes / (1 << 30):.2f} GiB a rank, costs "
        f"{mlp.cost_bytes / (1 << 30):.2f}: pool {mlp.pool_change:+.1%} (published -2.8 %)"
    )
    click.echo("\nBoot figures that others published, by vLLM 0.33.0's planner:")
    click.echo("\n".join(show.boots_text(BOOTS)))


def _preset(name: str) -> Preset:
    try:
        return read_preset(find_preset(name))
    except PresetError as error:
        raise click.UsageError(str(error)) from None


def _card(name: str) -> Card:
    if name in CARDS:
        return CARDS[name]
    try:
        return custom_card(float(name))
    except ValueError:
        raise click.UsageError(f"--card {name}: give one of {', '.join(CARDS)}, or a size in GiB") from None


def _draw(answer: Answer, path: Path) -> None:
    try:
        draw(answer, path)
    except ImportError:
        raise click.ClickException("--waterfall needs matplotlib: pip install matplotlib") from None
    except OSError as error:
        raise click.ClickException(f"{path}: cannot be written: {error.strerror}") from None
