"""Every engine on two ranks takes the very steps of one plain process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_llama import random_sequences, sequence_losses, tiny_llama, train_plainly
from train.engine_worker import ADAMW, LEARNING_RATE, MAX_GRAD_NORM, micro_batches
from train.ranks import run_ranks

ENGINES = Path(__file__).with_name("engine_worker.py")
TORCH_CELLS = ["0", "1", "2", "3", "2-offload", "3-offload"]
DEEPSPEED_CELLS = ["deepspeed-1", "deepspeed-2", "deepspeed-2-offload", "deepspeed-3"]


@pytest.fixture(scope="module")
def plain():
    steps = [[sequence for micro in step for sequence in micro] for step in micro_batches()]
    return train_plainly(steps, MAX_GRAD_NORM, lr=LEARNING_RATE, **ADAMW)


def check(result: dict, plain: tuple) -> None:
    losses, norms, parameters = plain
    assert result["losses"] == pytest.approx(losses, abs=1e-6)
    assert result["norms"] == pytest.approx(norms, rel=1e-5)
    for name, right in parameters.items():
        torch.testing.assert_close(
            result["parameters"][name], right, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
    # What training leaves behind computes the right loss, in step with the other rank and alone.
    model = tiny_llama(attention="eager")
    model.load_state_dict(parameters)
    right = torch.cat(list(sequence_losses(model, random_sequences([4, 9], seed=99)))).sum().item()
    assert result["inferred"] == pytest.approx([right, right], abs=1e-4)


@pytest.mark.distributed
def test_torch_engines_equal_one_plain_process(plain, tmp_path):
    run_ranks(2, ENGINES, tmp_path / "results.pt", *TORCH_CELLS)
    results = torch.load(tmp_path / "results.pt")
    for cell in TORCH_CELLS:
        check(results[cell], plain)
    # Stage 1 shares out the optimizer's two moments, stages 2 and 3 the parameters as well.
    elements = sum(p.numel() for p in plain[2].values())
    held = {cell: results[cell]["state_elements"] / elements for cell in TORCH_CELLS}
    assert held == pytest.approx(
        {"0": 3, "1": 2, "2": 1.5, "3": 1.5, "2-offload": 1.5, "3-offload": 1.5}, abs=0.2
    )


@pytest.mark.distributed
def test_deepspeed_engines_equal_one_plain_process(plain, tmp_path):
    run_ranks(2, ENGINES, tmp_path / "results.pt", *DEEPSPEED_CELLS)
    results = torch.load(tmp_path / "results.pt")
    for cell in DEEPSPEED_CELLS:
        check(results[cell], plain)
