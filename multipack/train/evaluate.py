"""The validation loss: the mean over every target token of the validation rows, each counted once, over all
ranks."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from multipack.loading.loader import DataLoader
from multipack.train.engine import Engine
from multipack.train.loss import causal_lm_loss_sum
from multipack.train.model import evaluation_mode
from multipack.train.process import sum_over_ranks

logger = logging.getLogger(__name__)


class Evaluation(NamedTuple):
    """What a pass over the validation rows found."""

    loss: float
    """Nats a target token; 0 if there is none."""
    num_target_tokens: int


def evaluate(engine: Engine, loader: DataLoader[Any]) -> Evaluation:
    """One pass over all batches of `loader`, as many on every rank; the model is left in training mode."""
    loss = torch.zeros((), dtype=torch.float64, device=engine.device)
    targets = 0
    with evaluation_mode(engine.module):
        for batch in loader:
            loss += engine.infer(partial(causal_lm_loss_sum, batch=batch))
            targets += batch["num_target_tokens"]
    dist.all_reduce(loss)
    (targets,) = sum_over_ranks(targets)
    if targets == 0:
        logger.warning("the validation rows have no target token: their loss is given as 0")
    return Evaluation(loss.item() / max(targets, 1), targets)
