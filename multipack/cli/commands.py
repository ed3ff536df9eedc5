"""Commands and their arguments."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from multipack import __version__
from multipack.cli.inspection import Inspection, Question, inspect
from multipack.cli.measure import Measured, measure, open_tokens
from multipack.cli.scan import Progress, Reading, Scanned, scan, tokenizer_of
from multipack.data.text.formats import TYPES
from multipack.order.packing import MethodName


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if all went well, 2 after an error that the user can mend."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        print(f"multipack: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _inspect(options: argparse.Namespace) -> None:
    _need("matplotlib", "--plot", asked=options.plot is not None)
    _need("rich", "the tables", asked=not options.json, otherwise=" or ask for --json")
    found = inspect(
        _scan(options).lengths,
        Question(
            capacity=options.capacity,
            ranks=options.ranks,
            accumulate=options.accumulate,
            bins_per_batch=options.bins_per_batch,
            method=options.method,
            seed=options.seed,
            overlong=options.overlong,
            padded_rows=options.padded_rows,
            hidden_size=options.hidden_size,
        ),
    )
    if options.plot is not None:
        from multipack.cli.picture import draw

        draw(found, _name(options.paths), options.plot)
    if options.json:
        print(json.dumps(_numbers(found), indent=2))
        return
    from rich.console import Console

    from multipack.cli.tables import show

    console = Console()
    show(found, _name(options.paths), console)
    if options.plot is not None:
        console.print(f"picture: {options.plot}", highlight=False)


def _bench(options: argparse.Namespace) -> None:
    _need("rich", "the table", asked=not options.json, otherwise=" or ask for --json")
    scanned = _scan(options)
    tokens = open_tokens(
        options.paths, scanned, split=options.split, capacity=options.capacity, overlong=options.overlong
    )
    with _progress(options) as progress:
        measured = measure(
            tokens,
            capacity=options.capacity,
            bins_per_batch=options.bins_per_batch,
            method=options.method,
            workers=options.workers,
            step_ms=options.step_ms,
            seconds=options.seconds,
            progress=progress,
        )
    if options.json:
        print(json.dumps({"tokens": tokens.description, "measured": [_flat(m) for m in measured]}, indent=2))
        return
    from rich.console import Console

    from multipack.cli.tables import show_measured

    show_measured(measured, _name(options.paths), tokens.description, Console())


def _scan(options: argparse.Namespace) -> Scanned:
    tokenise = None
    if options.tokenizer is not None:
        tokenise = tokenizer_of(
            options.tokenizer, chat_template=options.chat_template, train_on=options.train_on
        )
    reading = Reading(type=options.type, fields=dict(options.fields), ignore_fields=options.ignore_fields)
    with _progress(options) as progress:
        return scan(
            options.paths,
            column=options.column,
            split=options.split,
            tokenise=tokenise,
            progress=progress,
            reading=reading,
        )


def _numbers(found: Inspection) -> dict[str, Any]:
    parts = ("question", "rows", "bins", "steps", "padded")
    numbers: dict[str, Any] = {name: asdict(getattr(found, name)) for name in parts}
    return numbers | {"balance": [asdict(balance) for balance in found.balance]}


def _flat(measured: Measured) -> dict[str, Any]:
    return asdict(measured) | {"shortest_step_ms": measured.shortest_step_ms}


def _name(paths: Sequence[Path]) -> str:
    return paths[0].name if len(paths) == 1 else f"{paths[0].name} and {len(paths) - 1} more"


def _need(package: str, what: str, *, asked: bool, otherwise: str = "") -> None:
    if asked and find_spec(package) is None:
        raise ValueError(
            f"{package}, which is needed for {what}, is not installed: pip install {package}{otherwise}."
        )


@contextmanager
def _progress(options: argparse.Namespace) -> Iterator[Progress]:
    """Progress bar if stderr is a terminal."""
    if options.json or not sys.stderr.isatty():
        yield lambda name, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda name, done, total: bar.update(
            task, description=name, completed=done, total=total or None
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="multipack", description="What sequence packing does with your data, and how fast it is fed."
    )
    parser.add_argument("--version", action="version", version=f"multipack {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspecting = commands.add_parser(
        "inspect",
        help="what packing does with a data set",
        description="Plan an epoch over your data: bins, steps, what padding would cost, what waiting costs.",
    )
    _add_data(inspecting)
    inspecting.add_argument(
        "--ranks", type=_count(1), default=1, metavar="N", help="processes that train (default: 1)"
    )
    inspecting.add_argument(
        "--accumulate",
        type=_count(1),
        default=1,
        metavar="N",
        help="batches of a rank in an optimizer step, gradient accumulation (default: 1)",
    )
    inspecting.add_argument(
        "--seed", type=_count(0), default=0, metavar="N", help="of the order (default: 0)"
    )
    inspecting.add_argument(
        "--padded-rows",
        type=_count(1),
        metavar="N",
        help="rows of the padded batches to compare with (default: about the tokens of a packed batch)",
    )
    inspecting.add_argument(
        "--hidden-size",
        type=_count(1),
        default=4096,
        metavar="N",
        help="hidden size of the model, for the cost of attention (default: 4096)",
    )
    inspecting.add_argument(
        "--plot", type=_picture, metavar="OUT.png", help="write a picture (.png, .pdf or .svg)"
    )
    inspecting.set_defaults(run=_inspect)
    measuring = commands.add_parser(
        "bench",
        help="how fast this machine feeds it",
        description="Run the loader on this machine, flat out and behind a training loop of a given step time.",
    )
    _add_data(measuring)
    measuring.add_argument(
        "--step-ms", type=_time, default=20.0, metavar="MS", help="time of a training step (default: 20)"
    )
    measuring.add_argument(
        "--workers",
        type=_count(0),
        nargs="+",
        default=[0, 1, 2],
        metavar="N",
        help="numbers of loader threads to try (default: 0 1 2)",
    )
    measuring.add_argument(
        "--seconds", type=_time, default=2.0, metavar="S", help="time of each measurement (default: 2)"
    )
    measuring.set_defaults(run=_bench)
    return parser


def _add_data(parser: argparse.ArgumentParser) -> None:
    """What both commands ask of the data."""
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="a folder of save_to_disk or of data files; a .parquet or .arrow file; .jsonl, .ndjson, .json, .csv, .tsv, .txt, also .gz or "
        ".zst; .npy of lengths",
    )
    parser.add_argument(
        "--capacity", type=_count(1), required=True, metavar="TOKENS", help="token slots of a bin"
    )
    parser.add_argument(
        "--bins-per-batch", type=_count(1), default=1, metavar="N", help="bins of a batch (default: 1)"
    )
    parser.add_argument(
        "--column",
        metavar="NAME",
        help="column of token lists, lengths, text or conversations (default: the first of the usual names)",
    )
    parser.add_argument(
        "--split",
        metavar="NAME",
        help="split of a saved DatasetDict or of a folder with files of several (default: train, or the only one)",
    )
    parser.add_argument("--type", choices=TYPES, default="auto", help="format of a row (default: auto)")
    parser.add_argument(
        "--fields",
        type=_pair,
        nargs="+",
        default=[],
        metavar="NAME=COLUMN",
        help="where the file has what the format calls NAME, as output=response",
    )
    parser.add_argument(
        "--ignore-fields", nargs="+", default=[], metavar="COLUMN", help="columns and keys to leave out"
    )
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="template for conversations (default: the tokenizer's)",
    )
    parser.add_argument(
        "--train-on", choices=("all", "last"), default="all", help="answers that are learnt (default: all)"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="folder of the tokenizer for text and conversations"
    )
    parser.add_argument(
        "--overlong",
        choices=("drop", "truncate", "split"),
        default="drop",
        help="what becomes of rows above the capacity (default: drop)",
    )
    parser.add_argument(
        "--method", choices=get_args(MethodName), default="auto", help="how to pack (default: auto)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def _count(least: int) -> Callable[[str], int]:
    """A whole number of at least that much."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number, {least} or more")
        return int(text)

    return read


def _pair(text: str) -> tuple[str, str]:
    name, equals, column = text.partition("=")
    if not (name and equals and column):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=COLUMN")
    return name, column


def _time(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a time above 0")
    return number


def _picture(text: str) -> Path:
    """Checked before a long scan, not after it."""
    path = Path(text)
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{text} does not end with .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {path.parent} does not exist")
    return path
