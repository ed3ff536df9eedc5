"""Which rows every optimizer step trained on, for those who want to check that each came once (`log_rows`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist


class RowLog:
    """`rows/rank-R.jsonl`: a line `{"step": ..., "rows": [...]}` for each step of this rank.

    Args:
        folder: of the run.
        first_step: steps of the checkpoint the run goes on from. Lines of later steps, of any rank, were of an attempt that is
            undone, and are dropped. All ranks together.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        rows = folder / "rows"
        if dist.get_rank() == 0:
            rows.mkdir(parents=True, exist_ok=True)
            for path in rows.glob("rank-*.jsonl"):
                _keep_steps(path, first_step)
        dist.barrier()
        self._file = (rows / f"rank-{dist.get_rank()}.jsonl").open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, batches: Iterable[dict[str, Any]]) -> None:
        """Add the rows of a step; repeats that only even out the ranks are left out."""
        rows = [row for batch in batches if batch["num_sequences"] for row in batch["indices"].tolist()]
        self._file.write(json.dumps({"step": step, "rows": rows}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _keep_steps(path: Path, last: int) -> None:
    whole = path.read_text(encoding="utf-8").split("\n")[:-1]  # a kill may have left half a line
    partial = path.with_suffix(
        ".partial"
    )  # a kill while lines are dropped must not take the others with them
    partial.write_text(
        "".join(line + "\n" for line in whole if json.loads(line)["step"] <= last), encoding="utf-8"
    )
    partial.replace(path)
