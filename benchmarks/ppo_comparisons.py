"""The two comparisons of the PPO benchmark: sharded with redundant generation, packed with padded updates.

Runs alternate, and each comparison asserts that both sides do the same work before it times them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from multipack.data.collate import PaddedCollator
from multipack.data.dataset import TokenDataset
from multipack.integrations.attention import model_inputs, stock_attention
from multipack.loading.loader import DataLoader
from multipack.train.engine import Engine
from multipack.train.loss import IGNORE_INDEX
from multipack.train.optim import learning_rate_schedule
from multipack.train.ppo.actor_critic import ActorCritic, Scores
from multipack.train.ppo.buffer import actions_of, micro_batches
from multipack.train.ppo.config import PPOConfig
from multipack.train.ppo.experience import Experience
from multipack.train.ppo.generate import sequence_uniforms
from multipack.train.ppo.loss import ppo_loss_sums
from multipack.train.ppo.phases import Phases
from multipack.train.ppo.prompts import deal_prompts
from multipack.train.ppo.sizes import PPOSizes
from multipack.train.ppo.tasks import Task
from multipack.train.ppo.trainer import PPOTrainer
from multipack.train.ppo.update import UpdatePhase
from multipack.train.ppo.update_plan import plan_step, step_rows


class EitherWay(ActorCritic):
    """The networks of the trainer, which also take padded batches, as the rival needs."""

    def forward(self, inputs: Any, positions: Tensor, actions: Tensor, **more: Any) -> Scores:
        if "attention_mask" not in inputs:
            return super().forward(inputs, positions, actions, **more)
        causal = self.actor.get_base_model() if hasattr(self.actor, "get_base_model") else self.actor
        trunks = [causal.base_model, *([self.critic] if self.critic is not None else [])]
        hidden = []
        for trunk in trunks:
            with stock_attention(trunk):
                hidden.append(trunk(**inputs).last_hidden_state.flatten(0, 1)[positions])
        logs = causal.get_output_embeddings()(hidden[0]).float().log_softmax(-1)
        return Scores(
            logs.gather(-1, actions[:, None]).sum(-1),
            -(logs.exp() * logs).sum(-1),
            self.value_head(hidden[-1])[:, 0].float().clone(),
        )


def padded_actions_of(batch: dict[str, Any]) -> tuple[dict[str, Any], Tensor, Tensor]:
    """As `actions_of`, with positions in the flattened rows of a padded batch."""
    labels = batch["labels"].flatten()
    positions = torch.nonzero(labels != IGNORE_INDEX)[:, 0] - 1
    return model_inputs(batch), positions, labels[positions + 1]


def loss_of(batch: dict[str, Any], config: PPOConfig, ask: Callable[[Any], Any]) -> Callable[[Any], Tensor]:
    """The summed PPO loss of a packed or padded micro-batch."""

    def loss_sum(model: Any) -> Tensor:
        inputs, positions, actions = ask(batch)
        scores = model(inputs, positions, actions)
        of_actions = {
            name: batch[name].flatten()[positions + 1]
            for name in ("old_logprobs", "old_values", "advantages", "returns")
        }
        sums = ppo_loss_sums(
            **scores._asdict(),
            **of_actions,
            clip_range=config.clip_range,
            value_clip_range=config.value_clip_range,
        )
        return sums.policy + config.value_coef * sums.value

    return loss_sum


def padded_batches(
    experience: Experience, dataset: TokenDataset, rows: Any, config: PPOConfig, device: torch.device
) -> DataLoader[dict[str, Any]]:
    """This rank's micro-batches of an optimizer step as padding trainers cut them: as many sequences as fit
    at full length."""
    rank, num_replicas = dist.get_rank(), dist.get_world_size()
    size = max(1, config.micro_batch_tokens // int(experience.rollouts.lengths.max()))
    mine = rows[rank::num_replicas].tolist()
    cut = [mine[i : i + size] for i in range(0, len(mine), size)]
    return DataLoader(dataset, batch_sampler=cut, collate_fn=PaddedCollator(), device=device)


def mean_loss(engine: Engine, experience: Experience, batches: Any, config: PPOConfig, ask: Any) -> float:
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        total += engine.infer(loss_of(batch, config, ask)).double().cpu()
    dist.all_reduce(total)
    return float(total) / len(experience.rollouts.rewards)


def compare_updates(
    engine: Engine, experience: Experience, config: PPOConfig, hidden_size: int, rounds: int
) -> dict[str, float]:
    """Training samples a second of packed and padded updates over the same buffer, once both gave the same
    loss."""
    everything, dataset = np.arange(len(experience.rollouts)), experience.dataset()
    plan = plan_step(
        experience.rollouts.lengths,
        everything,
        micro_batch_tokens=config.micro_batch_tokens,
        num_replicas=dist.get_world_size(),
        hidden_size=hidden_size,
    )
    packed = micro_batches(dataset, [plan], dist.get_rank(), 1, engine.device)
    padded = padded_batches(experience, dataset, everything, config, engine.device)
    losses = [
        mean_loss(engine, experience, *of)
        for of in ((packed, config, actions_of), (padded, config, padded_actions_of))
    ]
    if not abs(losses[0] - losses[1]) < (1e-2 if torch.cuda.is_available() else 1e-5):
        raise RuntimeError(f"packed and padded updates disagree about the loss: {losses}")

    schedule = learning_rate_schedule("constant", engine.optimizer, warmup_steps=0, num_steps=1)
    # The buffer stays while the weights move on, so old and new probabilities of the first micro-batch may
    # differ.
    phase = UpdatePhase(engine, schedule, config, hidden_size=hidden_size, ratio_tolerance=math.inf)
    steps = list(step_rows(len(everything), config.train_batch_size, "epochs", 1, [0]))

    def padded_update() -> None:
        for rows in steps:
            num_actions = int(experience.rollouts.response_lengths[rows].sum())
            batches = list(padded_batches(experience, dataset, rows, config, engine.device))
            for i, batch in enumerate(batches):
                last = i + 1 == len(batches)
                engine.micro_step(loss_of(batch, config, padded_actions_of), divisor=num_actions, last=last)
            engine.step()

    seconds = alternately(
        {"packed": lambda: phase(experience, steps, Phases()), "padded": padded_update}, rounds
    )
    return {
        "loss_difference": abs(losses[0] - losses[1]),
        **rates(seconds, len(everything), "packed", "padded"),
    }


def compare_generation(
    trainer: PPOTrainer, task: Task, sizes: PPOSizes, config: PPOConfig, rounds: int
) -> dict[str, float]:
    """Distinct samples a second when each rank generates its share, and when every rank generates all of a
    collect step."""
    share = next(
        deal_prompts(sizes, len(task.prompts), num_episodes=1, seed=config.seed, rank=dist.get_rank())
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, share)
    whole = sorted(row for rows in everyone for row in rows)
    if len(set(whole)) != len(whole):
        raise RuntimeError(f"ranks share prompts: {everyone}")

    def generate(rows: Sequence[int]) -> None:
        policy: Any = trainer.engine.module
        with trainer.engine.gathered():
            policy.respond(
                [np.asarray(task.prompts[row]["input_ids"], np.int64) for row in rows],
                sequence_uniforms(config.seed, 0, rows, config.max_new_tokens),
                eos_token_id=task.eos_token_id,
                pad_token_id=task.pad_token_id,
                batch_size=None,
            )

    seconds = alternately({"sharded": lambda: generate(share), "redundant": lambda: generate(whole)}, rounds)
    return rates(seconds, len(whole), "sharded", "redundant")


def alternately(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in turn, after one round that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            seconds[name].append(timed(run))
    return {name: values[1:] for name, values in seconds.items()}


def rates(seconds: dict[str, list[float]], count: int, ours: str, theirs: str) -> dict[str, float]:
    """Medians, and the ratio of neighbours with its lowest and highest value."""
    ratios = sorted(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))
    return {
        f"{ours}_samples_per_s": count / statistics.median(seconds[ours]),
        f"{theirs}_samples_per_s": count / statistics.median(seconds[theirs]),
        f"{ours}_over_{theirs}": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
    }


def timed(run: Callable[[], Any]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - start
