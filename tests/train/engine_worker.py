"""Started by torchrun: every engine takes the same five optimizer steps; rank 0 writes what came out.

argv: output file, then engine cells "stage", "stage-offload", or "deepspeed-stage[-offload]".
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from tiny_llama import packed, random_sequences, tiny_llama

from multipack.train.engine import EngineOptions, build_engine
from multipack.train.loss import causal_lm_loss_sum
from multipack.train.optim import OptimizerSpec
from multipack.train.process import process_group, sum_over_ranks

ADAMW = {"weight_decay": 0.01, "betas": (0.9, 0.99), "eps": 1e-3}
LEARNING_RATE = 1e-2
MAX_GRAD_NORM = 0.3


def micro_batches() -> list[list[list]]:
    """[step][micro-step * 2 + rank]: sequences of every length; step 3 gives rank 1 a batch without a
    target."""
    lengths = [
        [[5, 3], [20], [7, 7, 2], [1, 4]],
        [[30], [2], [12, 1], [9, 9, 9]],
        [[4], [4], [4], [40, 3]],
        [[6, 6], [8], [15], [11, 2]],
        [[3], [33], [25, 5], [2, 2, 2]],
    ]
    steps = [
        [random_sequences(n, seed=10 * s + m) for m, n in enumerate(step)] for s, step in enumerate(lengths)
    ]
    steps[3][1] = [(ids, [-100] * len(ids)) for ids, _ in steps[3][1]]
    return steps


def train(options: EngineOptions, device: torch.device) -> dict[str, object]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    spec = OptimizerSpec(learning_rate=LEARNING_RATE, **ADAMW)
    engine = build_engine(tiny_llama(), spec, options, device)
    losses, norms = [], []
    for step in micro_batches():
        mine = [packed(sequences) for sequences in step[rank::world_size]]
        (tokens,) = sum_over_ranks(sum(batch["num_target_tokens"] for batch in mine))
        total = torch.zeros(())
        for i, batch in enumerate(mine):
            total += engine.micro_step(
                lambda model, b=batch: causal_lm_loss_sum(model, b), divisor=tokens, last=i + 1 == len(mine)
            )
        norms.append(engine.step().item())
        dist.all_reduce(total)
        losses.append(total.item() / tokens)
    probe = packed(random_sequences([4, 9], seed=99))
    inferred = engine.infer(lambda model: causal_lm_loss_sum(model, probe)).item()
    with engine.gathered():  # rank 0 runs more forwards than rank 1: nothing may wait for it
        for _ in range(3 - rank):
            alone = engine.infer(lambda model: causal_lm_loss_sum(model, probe)).item()
    shard = sum(
        t.numel() if not hasattr(t, "to_local") else t.to_local().numel()
        for t in engine.state_tensors().values()
    )
    return {
        "losses": losses,
        "norms": norms,
        "inferred": [inferred, alone],
        "state_elements": shard,
        "parameters": engine.full_parameters(),
    }


def options_of(cell: str) -> EngineOptions:
    stage = int(cell.split("-")[-2 if cell.endswith("offload") else -1])
    offload = cell.endswith("offload")
    if not cell.startswith("deepspeed"):
        return EngineOptions(zero_stage=stage, offload=offload, max_grad_norm=MAX_GRAD_NORM)
    zero: dict[str, object] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return EngineOptions(deepspeed={"zero_optimization": zero}, max_grad_norm=MAX_GRAD_NORM)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group() as device:
        results = {cell: train(options_of(cell), device) for cell in sys.argv[2:]}
        if dist.get_rank() == 0:
            torch.save(results, sys.argv[1])
