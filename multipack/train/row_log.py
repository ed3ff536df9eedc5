"""Which rows every optimizer step trained on, for those who want to check that each came once
(`log_rows`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from multipack.train.step_lines import keep_steps


class RowLog:
    """`rows/rank-R.jsonl`: a line `{"step": ..., "rows": [...]}` for each step of this rank.

    Args:
        folder: of the run.
        first_step: steps of the checkpoint the run goes on from. Lines of later steps, of any rank, were of
            an attempt that is undone, and are dropped. All ranks together.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        rows = folder / "rows"
        if dist.get_rank() == 0:
            rows.mkdir(parents=True, exist_ok=True)
            for path in rows.glob("rank-*.jsonl"):
                keep_steps(path, first_step)
        dist.barrier()
        self._file = (rows / f"rank-{dist.get_rank()}.jsonl").open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, batches: Iterable[dict[str, Any]]) -> None:
        """Add the rows of a step; repeats that only even out the ranks, and -1 that only fills static shapes,
        are left out."""
        counted = (batch["indices"].tolist() for batch in batches if batch["num_sequences"])
        rows = [row for of_batch in counted for row in of_batch if row >= 0]
        self._file.write(json.dumps({"step": step, "rows": rows}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
