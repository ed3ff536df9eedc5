"""Random calls of the compiled module with wrong lengths, offsets, buffers and threads: an answer or an
exception, never more.

    python tests/fuzz/fuzz_core.py PATH_OF_CORE SECONDS SEED

The module is loaded by its path and without the package, so that a build under a sanitizer needs no torch
beside it.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from typing import Any

import numpy as np

REFUSED = (ValueError, TypeError, IndexError)
PACKERS = ("next_fit", "best_fit_decreasing", "stream", "pack_auto")
ELEMENTS = {
    "bit": 1, "int8": 8, "int16": 16, "int32": 32, "int64": 64, "uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64,
    "float16": 16, "float32": 32, "float64": 64,
}  # fmt: skip


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("multipack._core", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fuzz_packers(core: Any, rng: np.random.Generator) -> None:
    """Lengths outside 1..capacity, arrays that are too short, limits of no sense."""
    capacity = int(rng.integers(-1, 300))
    lengths = rng.integers(1, max(capacity, 1) + 1, rng.integers(0, 100)).astype(np.int32)
    if lengths.size and rng.random() < 0.5:
        lengths[rng.integers(lengths.size)] = rng.choice([0, -1, capacity + 1, -(2**31), 2**31 - 1])
    short = int(rng.random() < 0.2)
    offsets = np.empty(max(0, lengths.size + 1 - short), np.int64)
    indices = np.empty(max(0, lengths.size - int(rng.random() < 0.2)), np.int32)
    if rng.random() < 0.1:
        indices = lengths
    if rng.random() < 0.1:
        offsets = np.zeros(8 * offsets.size + 1, np.uint8)[1:].view(np.int64)
    limit = int(rng.choice([1, 3, 2**63 - 1, 0, -5]))
    capacity = int(rng.choice([capacity, 2**31 - 1, 2**24 + 1], p=[0.9, 0.05, 0.05]))
    name = rng.choice(PACKERS)
    num_bins = getattr(core, name)(lengths, capacity, limit, int(rng.integers(2**63)), offsets, indices)
    assert sorted(indices.tolist()) == list(range(lengths.size)), name
    sums = np.add.reduceat(lengths[indices], offsets[:num_bins]) if lengths.size else np.zeros(1)
    assert sums.max() <= capacity, name


def fuzz_tables(core: Any, rng: np.random.Generator) -> None:
    """Histograms, windows and bins that do not fit their arguments."""
    capacity = int(rng.integers(0, 100))
    counts = rng.integers(-1 if rng.random() < 0.2 else 0, 1000, capacity + int(rng.integers(0, 3)))
    name = rng.choice(["best_fit_decreasing_bins", "lower_bound"])
    choice = rng.random()
    if choice < 0.4:
        counts[:1] = 0
        getattr(core, name)(counts, capacity, int(rng.choice([1, 2**40, 0])))
    elif choice < 0.7:
        rows = np.empty(rng.integers(0, 50), np.int64)
        core.permuted_rows(
            int(rng.integers(-5, 100)), int(rng.integers(-1, 7)), 3, int(rng.integers(-7, 60)), rows
        )
        assert len(set(rows.tolist())) == rows.size
    else:
        indices = np.arange(rng.integers(0, 30), dtype=np.int32)
        offsets = np.sort(rng.integers(-1, indices.size + 2, rng.integers(0, 9)))
        if offsets.size > 1 and rng.random() < 0.7:
            offsets[0], offsets[-1] = 0, indices.size
        core.shuffle_bins(5, offsets, indices)
        assert sorted(indices.tolist()) == list(range(indices.size))


def fuzz_pool(core: Any, rng: np.random.Generator) -> None:
    """States with numbers that no pool would have, and pools that are asked for more than they hold."""
    capacity, size = int(rng.integers(1, 100)), int(rng.integers(1, 20))
    pool = core.StreamPool(capacity, size, int(rng.choice([1, 4, 2**63 - 1])), 0)
    corrupt = bool(rng.random() < 0.5)
    count = int(rng.integers(0, size + 1 + int(corrupt)))
    state = core.StreamPoolState(
        list(range(count)),
        np.sort(rng.integers(-(2**40) if corrupt else 0, 2**40, count)).tolist(),
        rng.integers(1, capacity + 1 + int(corrupt), count).tolist(),
        int(rng.choice([2**40, 2**63 - 1] if corrupt else [2**40])),
        int(rng.choice([0, -(2**40), -(2**63), 2**63 - 1][: 4 if corrupt else 2])),
        int(rng.integers(2**63)),
    )
    pool.restore(state)
    held = count
    for number in range(40):
        push = bool(rng.random() < 0.5) if corrupt or 0 < held < size else held == 0
        if push:
            pool.push(count + number, int(rng.integers(1, capacity + 1 + int(corrupt))))
            held += 1
        else:
            held -= len(pool.fill(bool(rng.random() < 0.5)))
    assert len(pool) == held


def any_column(core: Any, rng: np.random.Generator, corrupt: bool) -> tuple[Any, list[int]]:
    """A column, and the lengths its rows would have."""
    element = str(rng.choice(list(ELEMENTS)))
    offset_bytes = int(rng.choice([0, 4, 8]))
    row_length = int(rng.integers(0, 6))
    chunks, lengths = [], []
    for _ in range(int(rng.integers(0, 4))):
        num_rows, first = int(rng.integers(0, 6)), int(rng.integers(0, 9))
        sizes = rng.integers(0, 9, num_rows) if offset_bytes else np.full(num_rows, row_length)
        ends = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        num_values = int(ends[-1])
        if corrupt and rng.random() < 0.5:
            ends[rng.integers(ends.size)] = rng.choice(
                [-1, 2**31 - 1, num_values + 1, int(rng.integers(-(2**31), 2**31))]
            )
        offsets = ends.astype(f"<i{offset_bytes}").view(np.uint8) if offset_bytes else None
        bits = (first + num_values) * ELEMENTS[element]
        values: Any = rng.integers(0, 256, -(-bits // 8)).astype(np.uint8)
        if corrupt and rng.random() < 0.2:
            offsets = None if offsets is None else offsets[: rng.integers(offsets.size)].copy()
        if corrupt and rng.random() < 0.2:
            values = values[: rng.integers(values.size + 1)].copy() if rng.random() < 0.5 else None
        if corrupt and rng.random() < 0.1:
            num_rows, num_values = (int(rng.choice([-1, 2**62, 2**31])) for _ in range(2))
        chunks.append(core.Chunk(num_rows, offsets, values, first, num_values))
        lengths += sizes.tolist()
    return core.Column(element, offset_bytes, row_length, chunks), lengths


def fuzz_gather(core: Any, rng: np.random.Generator) -> None:
    """Corrupt columns, rows that are not there, places that collide, outputs of the wrong size."""
    corrupt = bool(rng.random() < 0.6)
    column, lengths = any_column(core, rng, corrupt)
    count = int(rng.integers(0, 6)) if lengths else 0
    rows = rng.integers(0, max(len(lengths), 1), count) + (rng.integers(-9, 9) if rng.random() < 0.1 else 0)
    column.lengths(rows, np.empty(count, np.int64))
    taken = np.array([lengths[row] for row in rows], np.int64)
    places = np.cumsum(taken) - taken
    num_slots = int(taken.sum() + rng.integers(0, 5))
    if corrupt and count and rng.random() < 0.3:
        rng.choice([taken, places])[rng.integers(count)] = rng.choice([-1, 2**62, num_slots])
    starts = None if rng.random() < 0.5 else rng.integers(0, 3 if corrupt else 1, count)
    gather = core.Gather(rows, starts, taken, places, num_slots)
    out = np.empty(max(0, num_slots - int(rng.random() < 0.1)), str(rng.choice(["int64", "float32", "bool"])))
    gather.tokens(column, out, float(rng.choice([7.0, 1e300, np.nan], p=[0.9, 0.05, 0.05])))
    if rng.random() < 0.1:
        gather.tokens(column, taken, 0.0)  # written over the lengths of the sequences
    if rng.random() < 0.5:
        ignore_index = int(rng.choice([-100, 2**63 - 1, -(2**63)]))
        gather.labels(column, [column], np.empty(num_slots, np.int64), ignore_index, True)
    if rng.random() < 0.5:
        bounds = np.unique(rng.integers(0, num_slots + 1 + int(corrupt), 4)).astype(np.int32)
        ends = (np.int32(0), np.int32(num_slots))
        bounds = np.unique(np.concatenate((ends[:1], bounds, ends[1:])).astype(np.int32))
        positions, numbers = np.empty(num_slots, np.int64), np.empty(num_slots, np.int32)
        gather.segments(bounds, positions, numbers, 2, int(rng.integers(-1, 9)))
    thread = threading.Thread(target=lambda: [gather.tokens(column, out, 0.0) for _ in range(20)])
    if rng.random() < 0.05:
        thread.start()
    try:
        gather.run()
    finally:
        if thread.ident is not None:
            thread.join()


def fuzz_threads(core: Any, rng: np.random.Generator) -> None:
    """Threads that read one column and pack the same lengths get what one thread gets, while the instruction
    set changes."""
    column, lengths = any_column(core, rng, corrupt=False)
    rows = np.arange(len(lengths))
    sizes = np.array(lengths, np.int64)
    packed = rng.integers(1, 100, 300).astype(np.int32)

    def answer() -> Any:
        out = np.zeros(int(sizes.sum()), np.float32)
        gather = core.Gather(rows, None, sizes, np.cumsum(sizes) - sizes, out.size)
        gather.tokens(column, out, 0.0)
        try:
            gather.run()
        except ValueError as error:
            return str(error)
        offsets, indices = np.empty(packed.size + 1, np.int64), np.empty(packed.size, np.int32)
        core.pack_auto(packed, 100, 2**63 - 1, 1, offsets, indices)
        return out.tobytes(), indices.tobytes()

    def work(number: int) -> None:
        core.use_instruction_set(core.instruction_sets()[number % len(core.instruction_sets())])
        answers[number] = answer()

    answers: dict[int, Any] = {}
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    assert set(answers.values()) == {answer()}


def main(path: str, seconds: float, seed: int) -> None:
    core = load(path)
    rng = np.random.default_rng(seed)
    targets = [fuzz_packers, fuzz_tables, fuzz_pool, fuzz_gather, fuzz_threads]
    held, refused = dict.fromkeys(targets, 0), dict.fromkeys(targets, 0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        target = targets[int(rng.choice(len(targets), p=[0.3, 0.2, 0.2, 0.28, 0.02]))]
        try:
            target(core, rng)
            held[target] += 1
        except REFUSED:
            refused[target] += 1
    for target in targets:
        print(f"{target.__name__}: {held[target]} calls held, {refused[target]} were refused")
        assert held[target] > 0
        assert refused[target] > 0 or target is fuzz_threads


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
