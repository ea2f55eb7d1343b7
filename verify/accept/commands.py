"""`shardmill verify accept`: record a server, judge two records, plan how much is enough."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import click

from shardmill.verify.accept.answered import check_rows
from shardmill.verify.accept.client import Client, MetricsError
from shardmill.verify.accept.identity import Identity, IdentityError, ask_identity, checkpoint_digest
from shardmill.verify.accept.items import Item, Kind, list_items
from shardmill.verify.accept.protocol import Protocol, ProtocolError, read_protocol
from shardmill.verify.accept.runs import Run, RunError, read_run, stale_runs, start_run
from shardmill.verify.accept.tokens import Tokens, freeze, read_tokens, write_tokens
from shardmill.verify.reading.atomic import write_whole
from shardmill.verify.rules.findings import printable

_protocol = click.option(
    "--protocol",
    "protocol_name",
    default="default",
    show_default=True,
    help="default, published, or a TOML file.",
)
_tokens = click.option(
    "--tokens", "tokens_file", metavar="FILE", help="Frozen tokens, made by `accept freeze`."
)
_key = click.option(
    "--key", metavar="KEY", envvar="OPENAI_API_KEY", help="API key; taken from OPENAI_API_KEY."
)


class RefusedError(click.ClickException):
    """The question could not be asked: exit code 2, and the reason on one line, safe for a terminal."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, 1000))


_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")


class _WholeSentences(click.Group):
    """A group whose list of commands has their first sentences in full; click truncates them to a line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, (command.help or "").split("\n\n")[0]) for name, command in sorted(self.commands.items())
        ]
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(line.split())) for name, line in rows])


@click.group("accept", cls=_WholeSentences)
def accept() -> None:
    """Is a served checkpoint as good as the one it was made from? Asked over the OpenAI-compatible API.

    \b
    Example: shardmill verify accept record http://127.0.0.1:8000 -o runs/child --tokens tokens.json
    """


@accept.command("freeze")
@click.argument("url")
@_protocol
@_key
@click.option("-o", "--out", "out", metavar="FILE", required=True, help="Where the tokens go.")
def freeze_command(url: str, protocol_name: str, key: str | None, out: str) -> None:
    """Turn the protocol's texts into token ids by the server's own tokenizer, once, for both sides.

    \b
    Example: shardmill verify accept freeze http://127.0.0.1:8000 -o tokens.json
    """
    protocol, client = _read(protocol_name), _client(url, key, 60)
    tokens = _sentences(lambda: freeze(client, ask_identity(client).model, protocol))
    _sentences(lambda: write_tokens(Path(out), tokens))
    click.echo(f"{out}: {len(tokens.ids)} texts, {sum(map(len, tokens.ids.values())):,} tokens")


@accept.command("record")
@click.argument("url")
@click.option(
    "-o", "--out", "out", metavar="RUN", required=True, help="The run's folder; an unfinished one goes on."
)
@_protocol
@_tokens
@_key
@click.option("--checkpoint", metavar="DIR", help="The served checkpoint: the run is bound to its manifest.")
@click.option("--rung", default="", metavar="RUNG", help="Row format of the server's KV cache.")
@click.option("--image", default="", metavar="DIGEST", help="Digest of the serving image.")
@click.option(
    "--flag", "flags", multiple=True, metavar="NAME=VALUE", help="A flag of the server; repeatable."
)
@click.option(
    "--only", multiple=True, type=click.Choice(get_args(Kind)), help="Only these kinds; repeatable."
)
@click.option(
    "--equal-to", metavar="RUN", help="A run with speculation off; its first scores must come out equal."
)
@click.option(
    "--timeout", type=float, default=900.0, show_default=True, help="Seconds that one request may take."
)
def record_command(
    url: str,
    out: str,
    protocol_name: str,
    tokens_file: str | None,
    key: str | None,
    checkpoint: str | None,
    rung: str,
    image: str,
    flags: tuple[str, ...],
    only: tuple[str, ...],
    equal_to: str | None,
    timeout: float,
) -> None:
    """Ask the server at URL everything that the protocol holds, and keep the raw answers in RUN.

    \b
    Example: shardmill verify accept record http://127.0.0.1:8000 -o runs/child --tokens tokens.json \\
                 --checkpoint build/checkpoint --rung 8666
    """
    protocol = _read(protocol_name)
    tokens = _sentences(lambda: read_tokens(Path(tokens_file) if tokens_file else None, protocol))
    client = _client(url, key, timeout)
    identity = _sentences(lambda: _identity(client, checkpoint, rung, image, flags))
    items = [i for i in list_items(protocol, tokens, identity.max_model_len) if not only or i.kind in only]
    run = _sentences(lambda: _record(client, identity, Path(out), protocol, tokens, items, equal_to))
    failed = sum(not row.ok and row.failure != "skipped" for row in run.rows.values())
    skipped = sum(row.failure == "skipped" for row in run.rows.values())
    click.echo(f"{out}: {len(run.rows)} answers, {failed} failed, {skipped} too long for this server")
    sys.exit(1 if failed else 0)


def _record(
    client: Client,
    identity: Identity,
    folder: Path,
    protocol: Protocol,
    tokens: Tokens,
    items: list[Item],
    equal_to: str | None,
) -> Run:
    from shardmill.verify.accept.record import Recorder, record_all
    from shardmill.verify.accept.speculation import check_speculation

    check_speculation(client, identity, items, read_run(Path(equal_to)) if equal_to else None)
    start_run(folder, identity, protocol.digest, tokens.digest)
    return record_all(Recorder(client, identity, folder, _progress), items)


@accept.command("compare")
@click.argument("base_run", metavar="BASE")
@click.argument("test_run", metavar="TEST")
@_protocol
@_tokens
@click.option("--noise", metavar="RUN", help="The baseline recorded once more: the noise floor.")
@click.option(
    "--variant", metavar="RUN", help="Another test of the same baseline, paired with TEST by McNemar."
)
@click.option("--checkpoint", metavar="DIR", help="Refuse a TEST that was recorded with another checkpoint.")
@click.option("--card", metavar="FILE", help="Also write the model card's table (Markdown).")
@_json
def compare_command(
    base_run: str,
    test_run: str,
    protocol_name: str,
    tokens_file: str | None,
    noise: str | None,
    variant: str | None,
    checkpoint: str | None,
    card: str | None,
    as_json: bool,
) -> None:
    """Judge the run TEST against the run BASE by the protocol's gates.

    \b
    Example: shardmill verify accept compare runs/parent runs/child --noise runs/parent-again --tokens tokens.json

    Exit code 0: every gate passes; 1: one fails or is undecided; 2: the question could not be asked.
    """
    if find_spec("scipy") is None:
        raise RefusedError("compare needs scipy: pip install scipy")
    from shardmill.verify.accept import report
    from shardmill.verify.accept.compare import compare

    protocol = _read(protocol_name)
    tokens = _sentences(lambda: read_tokens(Path(tokens_file) if tokens_file else None, protocol))
    base, test = _run(base_run), _run(test_run)
    floor, other = (_run(name) if name else None for name in (noise, variant))
    if checkpoint and stale_runs([Path(test_run)], _sentences(lambda: checkpoint_digest(Path(checkpoint)))):
        raise RefusedError(f"{test_run} is stale: it was recorded with another checkpoint than {checkpoint}")
    runs = [base, test, *(run for run in (floor, other) if run)]
    _sentences(lambda: _check(runs, protocol, tokens))
    limit = min(base.identity.max_model_len, test.identity.max_model_len)
    items = list_items(protocol, tokens, limit)
    comparison = _sentences(lambda: compare(base, test, protocol, items, noise=floor, variant=other))
    if card:
        _sentences(lambda: write_whole(Path(card), (report.markdown(comparison) + "\n").encode()))
    if as_json:
        click.echo(json.dumps(report.as_json(comparison), indent=2, allow_nan=False))
    else:
        click.echo("\n".join(report.lines(comparison)))
    sys.exit(0 if comparison.verdict == "PASS" else 1)


@accept.command("plan")
@_protocol
@click.option("--floor", default=0.95, show_default=True, help="The gate's limit.")
@click.option(
    "--truth", default=0.965, show_default=True, help="The rate that the server is thought to have."
)
@click.option("--power", default=0.9, show_default=True, help="How often such a server shall pass.")
@click.option(
    "--effect", default=1.0, show_default=True, help="Design effect of the documents (compare prints it)."
)
def plan_command(protocol_name: str, floor: float, truth: float, power: float, effect: float) -> None:
    """Say how many scored positions decide, and what the published figures are worth.

    \b
    Example: shardmill verify accept plan --protocol published --floor 0.95 --truth 0.9557
    """
    from shardmill.verify.accept import report
    from shardmill.verify.accept.stats import positions_to_pass

    protocol = _read(protocol_name)
    if not (0 < floor < 1 and 0 < truth < 1 and 0 < power < 1 and effect >= 1):
        raise click.UsageError("--floor, --truth and --power lie between 0 and 1, --effect is at least 1")
    try:
        n = positions_to_pass(truth, floor, power, effect=effect)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    click.echo(
        f"A server that agrees at {truth:g} passes a floor of {floor:g} in {power:.0%} of runs with {n:,} positions "
        "of many documents; few documents need more."
    )
    if protocol.published:
        click.echo(f"Published figures of the protocol {protocol.name}, each with its 95 % interval:")
        click.echo("\n".join(report.published_lines(protocol.published)))


@accept.command("stale")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--checkpoint", required=True, metavar="DIR", help="The checkpoint as it is now.")
def stale_command(runs: tuple[str, ...], checkpoint: str) -> None:
    """Name the runs that no longer stand for the checkpoint in DIR, since its bytes have changed.

    \b
    Example: shardmill verify accept stale runs/* --checkpoint build/checkpoint
    """
    digest = _sentences(lambda: checkpoint_digest(Path(checkpoint)))
    stale = _sentences(lambda: stale_runs([Path(run) for run in runs], digest))
    for folder in stale:
        click.echo(f"{folder}: stale: recorded with another checkpoint; record it again")
    sys.exit(1 if stale else 0)


def _check(runs: list[Run], protocol: Protocol, tokens: Tokens) -> None:
    """Every row against what the run's own server was asked."""
    for run in runs:
        if run.protocol != protocol.digest:
            raise RunError(
                f"{run.folder}: recorded with another protocol than {protocol.name}; record it again"
            )
        if run.tokens != tokens.digest:
            raise RunError(
                f"{run.folder}: was asked other tokens than these; give the --tokens that it was recorded with"
            )
        check_rows(run, list_items(protocol, tokens, run.identity.max_model_len), protocol)


def _identity(
    client: Client, checkpoint: str | None, rung: str, image: str, flags: tuple[str, ...]
) -> Identity:
    bad = [flag for flag in flags if "=" not in flag]
    if bad:
        raise click.UsageError(f"--flag {bad[0]}: give NAME=VALUE")
    digest = checkpoint_digest(Path(checkpoint)) if checkpoint else ""
    given = dict(flag.split("=", 1) for flag in flags)
    return ask_identity(client, checkpoint=digest, rung=rung, image=image, flags=given)


def _run(name: str) -> Run:
    run: Run = _sentences(lambda: read_run(Path(name)))
    return run


def _read(name: str) -> Protocol:
    try:
        return read_protocol(name)
    except ProtocolError as error:
        raise RefusedError(str(error)) from None


def _client(url: str, key: str | None, timeout: float) -> Client:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known or parts.username or parts.query or parts.fragment or not url.isprintable() or " " in url:
        raise click.UsageError(printable(f"{url}: give the server's address, such as http://127.0.0.1:8000"))
    if not 0 < timeout < 1e6:
        raise click.UsageError(f"--timeout {timeout:g}: give seconds above 0")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise click.UsageError("--key: an API key is printable ASCII on one line")
    return Client(url.rstrip("/").removesuffix("/v1"), timeout=timeout, key=key)


def _progress(item: Item, done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{done}/{total} {printable(item.id):<60.60}", nl=False, err=True)


def _sentences(work: Callable[[], Any]) -> Any:
    """Run what may fail for reasons outside this program; the user gets the sentence, never a traceback."""
    try:
        return work()
    except (RunError, IdentityError, ProtocolError, MetricsError, OSError) as error:
        raise RefusedError(str(error)) from None
