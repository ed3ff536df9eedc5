"""The log of rows goes on from the step of the checkpoint, whatever an earlier attempt left."""

from __future__ import annotations

import torch

from multipack.train.process import process_group
from multipack.train.row_log import RowLog


def batch(rows, num_sequences):
    return {"indices": torch.tensor(rows), "num_sequences": num_sequences}


def test_lines_of_later_steps_and_half_a_line_are_dropped_on_every_rank(tmp_path):
    lines = "".join(f'{{"step": {step}, "rows": [{step}]}}\n' for step in (1, 2, 3))
    (tmp_path / "rows").mkdir()
    for rank in (0, 1):
        (tmp_path / "rows" / f"rank-{rank}.jsonl").write_text(lines + '{"step": 4, "ro')
    with process_group():
        log = RowLog(tmp_path, first_step=2)
        log.write(3, [batch([7, 8], 2), batch([7], 0)])  # the second only repeats a row to even out the ranks
        log.close()
    kept = '{"step": 1, "rows": [1]}\n{"step": 2, "rows": [2]}\n'
    assert (tmp_path / "rows" / "rank-0.jsonl").read_text() == kept + '{"step": 3, "rows": [7, 8]}\n'
    assert (tmp_path / "rows" / "rank-1.jsonl").read_text() == kept
