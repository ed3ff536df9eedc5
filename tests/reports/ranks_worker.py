"""One of two ranks for the reports that need ranks that talk; writes what it found as JSON."""

from __future__ import annotations

import json
import logging.handlers
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from multipack import DistributedBatchSampler, MultipackBatchSampler
from multipack.distributed import check_agreement
from multipack.train import evaluate
from multipack.train.engine import EngineOptions, build_engine
from multipack.train.optim import OptimizerSpec


class Weight(nn.Module):
    """Multiplies given losses by a weight, so that the gradient is the loss that is minimised."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, losses: torch.Tensor) -> torch.Tensor:
        return self.weight.mean() * losses.sum()


def loss_of(stage: int, losses: list[float], targets: int) -> float:
    """What an optimizer step over `targets` tokens minimises when this rank's micro-batch has these losses."""
    spec = OptimizerSpec(name="sgd", learning_rate=0.0, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)
    engine = build_engine(Weight(), spec, EngineOptions(zero_stage=stage), torch.device("cpu"))
    engine.micro_step(lambda model: model(torch.tensor(losses)), divisor=targets, last=True)
    gradient: Any = engine.module.weight.grad
    return float((gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).sum())


def evaluated(sums: list[tuple[float, int]]) -> tuple[float, int]:
    """`evaluate` over batches of these summed losses and target counts."""

    class Engine:
        module, device = nn.Identity(), torch.device("cpu")

        def infer(self, compute: Any) -> torch.Tensor:
            return compute(None)

    evaluate.causal_lm_loss_sum = lambda model, batch: torch.tensor(batch["sum"], dtype=torch.float64)
    batches: Any = [{"sum": total, "num_target_tokens": count} for total, count in sums]
    return evaluate.evaluate(Engine(), batches)  # type: ignore[arg-type]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    answer: dict[str, Any] = {}

    sampler = DistributedBatchSampler(MultipackBatchSampler([3] * 200, 16))
    if rank == 0:  # a collective would wait for rank 1, which asks later
        answer["alone"] = [len(sampler), str(sampler.state_dict()), sampler.capacity]
    dist.barrier()
    if rank == 1:
        answer["alone"] = [len(sampler), str(sampler.state_dict()), sampler.capacity]

    seeded = DistributedBatchSampler(MultipackBatchSampler([3] * 200, 16, seed=rank))
    try:
        check_agreement(seeded.fingerprint)
    except ValueError as error:
        answer["seeds differ"] = str(error)

    for stage in (0, 1, 2, 3):
        losses = ([1.0] * 2, [2.0] * 8)[rank]
        answer[f"2 of 1.0 and 8 of 2.0, stage {stage}"] = loss_of(stage, losses, targets=10)
        losses = ([1.0] * 5, [7.0])[rank]
        answer[f"5 of 1.0 and 1 of 7.0, stage {stage}"] = loss_of(stage, losses, targets=6)
    answer["1 of 4.0 and 3 of 2.0"] = evaluated([[(4.0, 1)], [(6.0, 3)]][rank])
    answer["three batches"] = evaluated([[(20.0, 10), (0.0, 0)], [(9.0, 3), (0.0, 0)]][rank])
    warnings = logging.handlers.BufferingHandler(100)
    evaluate.logger.addHandler(warnings)
    answer["nothing"] = [*evaluated([(0.0, 0)]), [record.levelname for record in warnings.buffer]]
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads abort an interpreter that ends before they do


if __name__ == "__main__":
    main(Path(sys.argv[1]))
