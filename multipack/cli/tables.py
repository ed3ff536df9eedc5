"""Show an inspection to a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from multipack.cli.inspection import Inspection
from multipack.cli.measure import Measured
from multipack.cli.words import counted


def show(found: Inspection, source: str, console: Console) -> None:
    """Print one table a topic."""
    console.print()
    console.print(f"[bold]{source}[/bold]", highlight=False)
    for table in (_rows(found), _bins(found), _steps(found), _padded(found)):
        # Fixed widths: with minimal ones rich takes what does not fit off the end of the last column.
        table.columns[0].width = min(28, console.width * 3 // 8)
        table.columns[1].width = min(17, console.width // 5)
        console.print(table)
        console.print()
    if found.balance:
        console.print(_balance(found))
        console.print()


def _table(title: str) -> Table:
    """Lines of a label, a number and a note."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column()
    table.add_column(justify="right", overflow="fold")
    table.add_column(style="dim")
    return table


def _rows(found: Inspection) -> Table:
    rows, question = found.rows, found.question
    table = _table("The data")
    table.add_row("rows", f"{rows.rows:,}")
    table.add_row("tokens", f"{rows.tokens:,}")
    table.add_row(
        "tokens a row",
        f"{rows.mean:,.0f}",
        f"median {rows.median:,.0f}, 99 % below {rows.percentile_99:,.0f}, longest {rows.longest:,}",
    )
    if rows.empty:
        table.add_row("empty rows", f"{rows.empty:,}", "left out")
    if rows.overlong:
        table.add_row(
            f"rows above {question.capacity:,} tokens",
            f"[yellow]{rows.overlong:,}[/yellow]",
            _overlong(found),
        )
    return table


def _overlong(found: Inspection) -> str:
    share = f"{found.rows.lost_tokens:,} tokens ({found.rows.lost_tokens / found.rows.tokens:.2%})"
    return {
        "drop": f"dropped here, {share}; --overlong split keeps them",
        "truncate": f"cut here, losing {share}",
        "split": "cut into fragments, nothing lost",
    }[found.question.overlong]


def _bins(found: Inspection) -> Table:
    bins = found.bins
    table = _table("Packed")
    table.add_row(
        f"bins of {found.question.capacity:,} tokens",
        f"{bins.bins:,}",
        f"no packing needs fewer than {bins.at_least:,}",
    )
    table.add_row(
        "slots that hold a token",
        f"[green]{bins.efficiency:.3%}[/green]",
        f"{bins.best_efficiency:.3%} at best",
    )
    table.add_row("sequences a bin", f"{bins.sequences_per_bin:,.1f}")
    table.add_row(
        "time to plan an epoch",
        _seconds(bins.plan_seconds),
        f"{bins.sequences / bins.plan_seconds / 1e6:,.1f} million rows a second",
    )
    return table


def _steps(found: Inspection) -> Table:
    question, steps = found.question, found.steps
    ranks, batches = counted(question.ranks, "rank"), counted(question.accumulate, "batch", "batches")
    table = _table(
        f"An epoch on {ranks}, {question.bins_per_batch} x {question.capacity:,} tokens a batch, {batches} a "
        "step"
    )
    table.add_row("batches a rank", f"{steps.micro_steps:,}", "the same on every rank")
    table.add_row("optimizer steps", f"{steps.optimizer_steps:,}")
    table.add_row("tokens an optimizer step", f"{steps.tokens_per_optimizer_step:,.0f}", "all ranks, mean")
    return table


def _padded(found: Inspection) -> Table:
    padded = found.padded
    rows = counted(padded.rows_per_batch, "row")
    table = _table(f"Against random batches of {rows}, padded to the longest")
    table.add_row(
        "slots that hold padding",
        f"[red]{padded.padding_share:.1%}[/red]",
        f"{padded.sorted_padding_share:.1%} when sorted by length",
    )
    table.add_row(
        "expected speed-up by packing",
        f"[bold green]{padded.speed_up:.2f} x[/bold green]",
        "compute of an epoch, attention included",
    )
    return table


def _balance(found: Inspection) -> Table:
    table = Table(
        title="Time lost waiting for the slowest rank",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("balance")
    table.add_column("DDP, ZeRO-1/2", justify="right")
    table.add_column("FSDP, ZeRO-3", justify="right")
    for balance in found.balance:
        best = {
            name: getattr(balance, name) == min(getattr(b, name) for b in found.balance) for name in _MEETINGS
        }
        table.add_row(balance.mode, *(_share(getattr(balance, name), best[name]) for name in _MEETINGS))
    return table


_MEETINGS = ("once_a_step", "every_micro_step")


def _share(value: float, best: bool) -> str:
    return f"[green]{value:.2%}[/green]" if best else f"{value:.2%}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def show_measured(measured: Sequence[Measured], source: str, description: str, console: Console) -> None:
    """Print a line for each number of threads."""
    console.print()
    console.print(f"[bold]{source}[/bold]: {description}", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    step_ms = measured[0].step_ms
    for heading in (
        "threads",
        "first batch",
        "batches a second",
        "tokens a second",
        "feeds steps from",
        f"waiting at {step_ms:g} ms a step",
    ):
        table.add_column(heading, justify="right")
    for row in measured:
        color = "green" if row.wait_share <= 0.01 else "red"
        table.add_row(
            f"{row.workers}",
            f"{row.first_batch_ms:,.1f} ms",
            f"{row.batches_per_second:,.0f}",
            f"{row.tokens_per_second / 1e6:,.1f} M",
            f"{row.shortest_step_ms:,.2f} ms",
            f"[{color}]{row.wait_share:.2%}[/{color}]",
        )
    console.print(table)
    console.print(
        "[dim]0 threads: each batch is made when it is asked for. Waiting above 1 %: the loader is too "
        "slow.[/dim]"
    )
