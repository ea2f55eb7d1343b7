"""`shardmill tune`: measures GEMM parameters on the card at hand. The work is shardmill.kernels.tune's."""

from pathlib import Path
from typing import Any

import click

from shardmill.pipeline.errors import ShardmillError


@click.command()
@click.option("--shape", required=True, metavar="N,K", help="Rows per rank and columns of the weight.")
@click.option(
    "--block", type=click.Choice(["32", "128"]), default="32", show_default=True, help="Scale block."
)
@click.option(
    "--m", "tokens", metavar="1,2,...", help="Numbers of tokens (default: 1 to 4096, powers of two)."
)
@click.option(
    "-o", "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the JSON files."
)
@click.option("--keep-bits", is_flag=True, help="Only tiles whose sums have the bits of vLLM's default.")
def tune(shape: str, block: str, tokens: str | None, out: Path | None, keep_bits: bool) -> None:
    """Search the block-FP8 GEMM's parameters on this card and write them in vLLM's format and file name.

    Numbers of tokens that the file already holds are kept, so a search can be stopped and resumed.

    Example: shardmill tune --shape 12576,4096 --block 32
    """
    try:
        import torch

        from shardmill.kernels import block_gemm
        from shardmill.kernels import tune as search
    except ImportError as missing:
        raise ShardmillError(
            f"tuning needs torch and triton, and {missing.name} is not installed"
        ) from missing
    try:
        N, K = search.parse_shape(shape)
        counts = tuple(int(m) for m in tokens.split(",")) if tokens else search.TOKENS
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from wrong
    if not torch.cuda.is_available():
        raise ShardmillError("no GPU found: a configuration is measured on the card that will use it")
    _search(search, N, K, int(block), counts, out or block_gemm.CONFIGS, keep_bits)


def _search(
    search: Any, N: int, K: int, block: int, tokens: tuple[int, ...], out: Path, keep_bits: bool
) -> None:
    """Runs the search under a progress bar and prints a line for each number of tokens as it is found."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    found = 0
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("copy bandwidth", total=None)

        def say(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        for best in search.tune(N, K, (block, block), tokens, out, say, keep_bits):
            if not found:
                bar.console.print(search.HEADING, highlight=False)
            bar.console.print(search.line(best), highlight=False)
            found += 1
    if not found:
        click.echo(f"nothing to do: the files in {out} hold these numbers of tokens already")
    else:
        click.echo(f"written to {out}")
