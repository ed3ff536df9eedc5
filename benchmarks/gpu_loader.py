"""Do copies to the GPU overlap with training, and do batches arrive whole? Under a minute on one GPU.

    python -m benchmarks.gpu_loader

Part 1 trains by matrix products of about 20 ms a step, with batches of 16 MB: alone, with batches copied by
the loop itself, and with `DataLoader(device=...)`. Overlapped copies cost nothing, so the step must take what
it takes alone. Part 2 is made to catch memory that is reused too early: the consumer's stream falls ever
further behind the copies, as it is kept busy before it reads each batch, and every batch is checked on the
GPU.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.record import record
from benchmarks.timing import over
from multipack import DataLoader

BATCH_TOKENS = 2 * 1024 * 1024  # int64: 16 MB
STEPS = 50
STEP_S = 0.020
LATE_S = 0.005
CHECKED_BATCHES = 400
ALONE = "alone (batch stays on the device)"


class Counted(Dataset[torch.Tensor]):
    """Row i is full of i."""

    def __init__(self, length: int, tokens: int) -> None:
        self.length, self.tokens = length, tokens

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.tokens,), index)


def training_step(device: torch.device, seconds: float) -> Callable[[], None]:
    """Matrix products that keep the device busy for about so long."""
    a = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        a @ a
    torch.accelerator.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        a @ a
    torch.accelerator.synchronize()
    products = max(1, round(seconds / ((time.perf_counter() - started) / 20)))

    def step() -> None:
        for _ in range(products):
            a @ a

    return step


def step_ms(batches: Iterable[Any], step: Callable[[], None]) -> float:
    """Mean time of a step whose work reads the batch on the device."""
    iterator: Iterator[Any] = iter(batches)
    total = None
    for _ in range(5):
        total = next(iterator).sum()
        step()
    torch.accelerator.synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        total = next(iterator).sum()
        step()
    torch.accelerator.synchronize()
    assert total is not None
    return 1e3 * (time.perf_counter() - started) / STEPS


def overlap(device: torch.device) -> bool:
    rows = Counted(STEPS + 10, BATCH_TOKENS)
    step = training_step(device, STEP_S)
    resident = torch.zeros(BATCH_TOKENS, dtype=torch.int64, device=device)

    def copied_by_the_loop() -> Iterator[torch.Tensor]:
        for batch in DataLoader(rows, batch_size=None, num_workers=4):
            yield batch.to(device)

    ways: dict[str, Callable[[], Iterable[Any]]] = {
        ALONE: lambda: itertools.repeat(resident),
        "copied by the loop": copied_by_the_loop,
        "DataLoader(device=...)": lambda: DataLoader(rows, batch_size=None, num_workers=4, device=device),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3):
        for name, make in ways.items():
            times[name].append(step_ms(make(), step))
    for name, values in times.items():
        record("a step on the GPU", name, "over alone", over(values, times[ALONE]), "x")
        record("a step on the GPU", name, "time", values, "ms")
    return statistics.median(over(times["DataLoader(device=...)"], times[ALONE])) <= 1.02


def arrives_whole(device: torch.device) -> bool:
    """Every value of every batch, read late, while the next batches are being copied and older memory is free
    for reuse."""
    loader: DataLoader[torch.Tensor] = DataLoader(
        Counted(CHECKED_BATCHES, 1024 * 1024),
        batch_size=None,
        num_workers=3,
        prefetch_batches=6,
        device=device,
    )
    keep_busy = training_step(device, LATE_S)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number, batch in enumerate(loader):
        keep_busy()
        wrong += (batch != number).sum()
        del batch
    torch.accelerator.synchronize()
    row = f"{CHECKED_BATCHES} of 8 MB"
    held = torch.get_device_module(device).memory_reserved() / 1e6
    record("batches read late on the GPU", row, "wrong values", int(wrong))
    record("batches read late on the GPU", row, "device memory reserved", held, "MB")
    return int(wrong) == 0


def main() -> int:
    if not torch.accelerator.is_available():
        print(
            "No accelerator here: nothing was measured. Batches stay on the CPU, where device=None and "
            "'cpu' leave them as they are."
        )
        return 0
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    results = [overlap(device), arrives_whole(device)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
