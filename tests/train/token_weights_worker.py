"""One of two ranks for the tests of token weights; writes what it found as JSON."""

from __future__ import annotations

import json
import logging.handlers
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from multipack import DistributedBatchSampler, MultipackBatchSampler, packed_dataloader
from multipack.distributed import check_agreement
from multipack.train import evaluate, loop
from multipack.train.engine import EngineOptions, build_engine
from multipack.train.metrics import StepMetrics
from multipack.train.optim import OptimizerSpec
from multipack.train.ppo.exchange import gather_counts, gather_ragged
from multipack.train.ppo.prompts import deal_prompts
from multipack.train.ppo.sizes import PPOSizes
from multipack.train.process import leave_process_group
from multipack.train.stop import StopOnSigterm
from multipack.train.windows import Window


class Weight(nn.Module):
    """Multiplies given losses by a weight, so that the gradient is the loss that is minimised."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, losses: torch.Tensor) -> torch.Tensor:
        return self.weight.mean() * losses.sum()


def step_of(stage: int, *micro_batches: list[float]) -> list[float]:
    """The loss that an optimizer step reports, and the one that it minimises, when the tokens of this rank's
    micro-batches have these losses."""
    spec = OptimizerSpec(name="sgd", learning_rate=0.0, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)
    engine = build_engine(Weight(), spec, EngineOptions(zero_stage=stage), torch.device("cpu"))
    schedule = LambdaLR(engine.optimizer, lambda _: 1.0)
    reported: list[StepMetrics] = []
    stepper = loop.Stepper(engine, schedule, first_step=0, report=reported.append, stop=StopOnSigterm())
    counts = dict.fromkeys(("num_sequences", "num_tokens", "num_slots", "num_bins", "bin_capacity"), 1)
    batches = [
        {"losses": torch.tensor(losses), "num_target_tokens": len(losses)} | counts
        for losses in micro_batches
    ]
    loop.causal_lm_loss_sum = lambda model, batch: model(batch["losses"])
    stepper.take(Window(batches, epoch=1.0, ends_epoch=True, wait_seconds=0.0))
    stepper.flush()
    (metrics,) = reported
    # Both weights have half of the loss for a gradient.
    return [metrics.loss, metrics.grad_norm * 2**0.5]


def known_alone(loader: Any) -> list[Any]:
    """What a progress bar or a checkpoint asks for; a loader's address is its own."""
    sampler = loader.batch_sampler
    plan = sampler.batch_sampler.plan
    said = [repr(loader).split(" object")[0], str(loader.stats), str(loader.state_dict())]
    return [len(loader), len(sampler), sampler.remaining, sampler.capacity, plan.efficiency, *said]


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

    loader = packed_dataloader((np.zeros(600, np.int32), np.arange(0, 601, 3)), 16)
    if rank == 0:  # a collective would wait for rank 1, which asks later
        answer["alone"] = known_alone(loader)
    dist.barrier()
    if rank == 1:
        answer["alone"] = known_alone(loader)
    run = PPOSizes(
        num_replicas=2, rollout_batch_size=8, num_collect_steps=1, train_batch_size=2, update_mode="epochs", num_update_steps=1
    )  # fmt: skip
    (prompts,) = deal_prompts(run, 8, num_episodes=1, seed=0, rank=rank)
    answer["prompts"] = gather_ragged(np.array(prompts), gather_counts(len(prompts))).tolist()

    seeded = DistributedBatchSampler(MultipackBatchSampler([3] * 200, 16, seed=rank))
    try:
        check_agreement(seeded.fingerprint)
    except ValueError as error:
        answer["seeds differ"] = str(error)

    for stage in (0, 1, 2, 3):
        two, eight = [1.0] * 2, [2.0] * 8
        answer[f"2 of 1.0 and 8 of 2.0, stage {stage}"] = [
            step_of(stage, (two, eight)[rank]),  # each on a rank
            step_of(stage, two, eight),  # one after the other on both
            step_of(stage, (two, eight)[rank], (eight, two)[rank]),
        ]
        answer[f"5 of 1.0 and 1 of 7.0, stage {stage}"] = step_of(stage, ([1.0] * 5, [7.0])[rank])
    answer["1 of 4.0 and 3 of 2.0"] = evaluated([[(4.0, 1)], [(6.0, 3)]][rank])
    answer["three batches"] = evaluated([[(20.0, 10), (0.0, 0)], [(9.0, 3), (0.0, 0)]][rank])
    warnings = logging.handlers.BufferingHandler(100)
    evaluate.logger.addHandler(warnings)
    answer["nothing"] = [*evaluated([(0.0, 0)]), [record.levelname for record in warnings.buffer]]
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
