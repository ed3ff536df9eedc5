"""The wait for batches while rows still lie on the disk: a loop that sleeps 20 ms a step, over a cold and
then a warm page cache.

    python -m benchmarks.cold_cache

The rows (600 MB) are written, flushed, and dropped from the page cache. Rows of a batch lie all over the
files, as a shuffled epoch reads them. `read` is what came from the disk during the loop: zero in the first
row means that the system kept the files after all.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.loading_rivals import Workload, our_loader, workload
from benchmarks.probes import sleep
from benchmarks.record import record
from benchmarks.test_overlap_speed import run

STEPS = 100


def drop_from_page_cache(data: Workload) -> None:
    """Flush the files of the rows and let the kernel forget them."""
    for file in data.rows.cache_files:
        descriptor = os.open(file["filename"], os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_bytes() -> int:
    """What this process has had read from the disk so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def main() -> None:
    table = "20 ms sleep beside our loader, by page cache"
    with workload(150_000) as data:
        drop_from_page_cache(data)
        for row in ("cold page cache", "warm page cache, the same rows", "warm page cache, again"):
            before = read_bytes()
            step = run(our_loader, data, sleep, STEPS)
            record(table, row, "waiting", 100 * step.wait_ms / step.ms, "%")
            record(table, row, "wait", step.wait_ms, "ms")
            record(table, row, "read", (read_bytes() - before) / 1e6, "MB")


if __name__ == "__main__":
    main()
