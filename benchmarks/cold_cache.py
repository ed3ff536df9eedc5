"""The wait for batches while rows still lie on the disk: a loop that sleeps 20 ms a step, over a cold and then a warm page cache.

    python -m benchmarks.cold_cache

The rows (600 MB) are written, flushed, and dropped from the page cache. Rows of a batch lie all over the files, as a shuffled epoch
reads them. `read MB` is what came from the disk during the loop: a row of zero means that the system kept the files after all.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.loading_rivals import Workload, our_loader, workload
from benchmarks.test_overlap_speed import SLEEP_STEPS, run, sleep

LOOPS = ("cold page cache", "warm page cache, the same rows", "warm page cache, again")


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
    print("| 20 ms sleep, beside our loader | wait ms | wait share | read MB |\n|---|---|---|---|")
    with workload(150_000) as data:
        drop_from_page_cache(data)
        for name in LOOPS:
            before = read_bytes()
            step = run(our_loader, data, sleep, SLEEP_STEPS)
            print(
                f"| {name} | {step.wait_ms:.3f} | {step.wait_share:.2%} | {(read_bytes() - before) / 1e6:.0f} |"
            )


if __name__ == "__main__":
    main()
