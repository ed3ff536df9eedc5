"""What the threaded loader's history measured: samples a second by loader and engine, on this machine.

    python -m benchmarks.throughput                        # trains a tiny Llama on the CPU, or on GPUs where
    there are some python -m benchmarks.throughput --simulate-step 20     # a sleep in the accelerator's
    place: 20 ms for 16 x 4096 token slots

Loaders: `padded`, torch's DataLoader with padded batches; `trl packed`, the same over rows that trl packed
before, with trl's padding-free collator (`+2`: with two worker processes); `multipack`. All train on the same
rows through the same engines, packed batches through the attention of multipack. The ratios come first: they
are what another machine can compare with. trl's rows are sorted by length, so that its batches hold few long
or many short samples: over few steps its tokens/s say more than its samples/s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.real_lengths import LENGTH_QUANTILES
from benchmarks.record import record
from benchmarks.throughput_settings import Settings
from benchmarks.timing import over

ENGINES = ("1 rank", "zero1", "zero2", "zero2 + offload", "zero3")
TINY_LLAMA = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--simulate-step", type=float, metavar="MS", help="milliseconds of an accelerator's step"
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=ENGINES,
        help="all; of a sleep only `1 rank` and zero2, as all are alike",
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the zero engines")
    parser.add_argument("--steps", type=int, help="timed steps of a cell")
    parser.add_argument("--rounds", type=int, default=3, help="how often each cell is measured")
    arguments = parser.parse_args()
    settings = settings_of(arguments.simulate_step, arguments.steps, arguments.rounds)
    chosen = arguments.engines or (ENGINES if arguments.simulate_step is None else ("1 rank", "zero2"))
    cells = []
    for ranks, engines in ((1, ["1 rank"]), (arguments.ranks, list(ENGINES[1:]))):
        wanted = [engine for engine in engines if engine in chosen]
        if wanted:
            cells += measured(ranks, replace(settings, engines=wanted))
    record_cells(cells, settings)


def settings_of(simulate_step_ms: float | None, steps: int | None, rounds: int) -> Settings:
    """History's sizes where the step is simulated, small ones where the CPU computes it."""
    if simulate_step_ms is not None:
        return Settings(
            loaders=["padded", "trl packed", "trl packed +2", "multipack"],
            num_rows=52_000,
            sequence_len=4096,
            micro_batch_size=16,
            padded_rows=4096 * 16 // (LENGTH_QUANTILES[10] + 14),
            steps=steps or 25,
            rounds=rounds,
            simulate_step_ms=simulate_step_ms,
        )
    return Settings(
        loaders=["padded", "trl packed", "multipack"],
        steps=steps or 8,
        rounds=rounds,
        model=TINY_LLAMA,
        bf16=torch.cuda.is_available(),
    )


def measured(ranks: int, settings: Settings) -> list[dict[str, Any]]:
    """Run the cells in a process group of its own."""
    launcher = (
        [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cells.json"
        module = ["-m", "benchmarks.throughput_cells", json.dumps(asdict(settings)), str(out)]
        subprocess.run([sys.executable, *launcher, *module], check=True)
        cells: list[dict[str, Any]] = json.loads(out.read_text())
    return cells


def record_cells(cells: list[dict[str, Any]], settings: Settings) -> None:
    """Rates of every engine and loader, and multipack's over them in the same round."""
    table = f"samples a second, {step_of(settings)}"
    for engine in dict.fromkeys(cell["engine"] for cell in cells):
        ours = cells_of(cells, engine, "multipack")
        for loader in settings.loaders:
            of, row = cells_of(cells, engine, loader), f"{engine}, {loader}"
            for name in ("samples_per_s", "tokens_per_s"):
                title = name.replace("_per_", "/")
                record(
                    table,
                    row,
                    f"multipack over it, by {title}",
                    over(values(ours, name), values(of, name)),
                    "x",
                )
            record(table, row, "samples/s", values(of, "samples_per_s"))
            record(table, row, "tokens/s", values(of, "tokens_per_s"))
            for name in ("wait_share", "padding_share", "gpu_busy_share"):
                if name in of[0]:
                    shares = [100 * share for share in values(of, name)]
                    record(table, row, name.removesuffix("_share").replace("_", " "), shares, "%")


def cells_of(cells: Iterable[dict[str, Any]], engine: str, loader: str) -> list[dict[str, Any]]:
    return [cell for cell in cells if (cell["engine"], cell["loader"]) == (engine, loader)]


def values(cells: list[dict[str, Any]], name: str) -> list[float]:
    return [float(cell[name]) for cell in cells]


def step_of(settings: Settings) -> str:
    """The work of a step, in the words of the tables' names."""
    if settings.simulate_step_ms is not None:
        return f"step simulated by {settings.simulate_step_ms:g} ms of sleep"
    shape = settings.model
    return f"Llama of {shape['num_hidden_layers']} layers x {shape['hidden_size']}, {settings.optimizer}"


if __name__ == "__main__":
    main()
