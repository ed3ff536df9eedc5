"""Started by torchrun: train some steps with one engine, save, or load what another number of ranks saved and
go on.

argv: folder, output file, then actions `save:CELL:STEPS:NAME` or `load:CELL:STEPS:NAME`; every action starts
from a new model. CELL may end in `:8bit`, for adamw_bnb_8bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_llama import packed, tiny_llama
from train.engine_worker import ADAMW, LEARNING_RATE, micro_batches, options_of

from multipack.train.checkpoint import load_tensors, newest_checkpoint, read_state, save_checkpoint
from multipack.train.engine import build_engine
from multipack.train.loss import causal_lm_loss_sum
from multipack.train.optim import OptimizerSpec
from multipack.train.process import process_group, sum_over_ranks


def run(action: str, root: Path, device: torch.device) -> dict[str, object]:
    verb, rest = action.split(":", 1)
    cell, steps, name = rest.rsplit(":", 2)
    folder = root / name
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rule = "adamw_bnb_8bit" if cell.endswith(":8bit") else "adamw_torch"
    optimizer = OptimizerSpec(name=rule, learning_rate=LEARNING_RATE, **ADAMW)
    options = options_of(cell.removesuffix(":8bit"))
    engine = build_engine(tiny_llama(seed=0 if verb == "save" else 7), optimizer, options, device)
    done = 0
    if verb == "load":
        checkpoint = newest_checkpoint(folder)
        done = read_state(checkpoint)["step"]
        load_tensors(checkpoint, engine.state_tensors())
        engine.loaded()
    losses = []
    for step in micro_batches()[done : done + int(steps)]:
        mine = [packed(sequences) for sequences in step[rank::world_size]]
        (tokens,) = sum_over_ranks(sum(batch["num_target_tokens"] for batch in mine))
        total = torch.zeros(())
        for i, batch in enumerate(mine):
            total += engine.micro_step(
                lambda model, b=batch: causal_lm_loss_sum(model, b), divisor=tokens, last=i + 1 == len(mine)
            )
        engine.step()
        dist.all_reduce(total)
        losses.append(total.item() / tokens)
    if verb == "save":
        save_checkpoint(folder, int(steps), engine.state_tensors(), {}, keep=1)
    return {"losses": losses, "parameters": engine.full_parameters()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group() as device:
        results = {action: run(action, Path(sys.argv[1]), device) for action in sys.argv[3:]}
        if dist.get_rank() == 0:
            torch.save(results, sys.argv[2])
