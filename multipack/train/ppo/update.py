"""The update phase: optimizer steps on packed micro-batches of the buffer.

Every rank plans the same steps and takes as many micro-batches; the sums of each step are divided by the
action tokens of the whole step, which all ranks know from the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from multipack.train.engine import Engine
from multipack.train.ppo.buffer import actions_of, micro_batches
from multipack.train.ppo.config import PPOConfig
from multipack.train.ppo.exchange import raise_everywhere
from multipack.train.ppo.experience import Experience
from multipack.train.ppo.loss import PPOLossSums, ppo_loss_sums
from multipack.train.ppo.phases import Phases
from multipack.train.ppo.ptx import PtxMix
from multipack.train.ppo.rollouts import IntArray
from multipack.train.ppo.update_plan import StepPlan, plan_step

_SUMS = ("policy_loss", "value_loss", "update_entropy", "clip_share", "value_clip_share", "step_divergence")


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What an update phase did, over all ranks; losses and shares are means over its optimizer steps."""

    policy_loss: float
    value_loss: float
    update_entropy: float
    """Nats an action token, while updating."""
    clip_share: float
    """Share of action tokens whose ratio left 1 +- clip_range. Above 0.3: lower the learning rate or
    num_update_steps."""
    value_clip_share: float
    """Share of action tokens whose value left the old one by more than value_clip_range."""
    step_divergence: float
    """Divergence from the policy that sampled, nats an action token. Above 0.1 the updates go far beyond what
    was sampled."""
    ptx_loss: float
    """Cross-entropy of the supervised mix, nats a token; NaN without one."""
    grad_norm: float
    """Largest of the phase, before clipping."""
    learning_rate: float
    """Of the last step."""
    num_optimizer_steps: int
    num_micro_steps: int
    """Of each rank."""
    num_sequences: int
    """Sequences trained on, over all ranks; one that is used twice counts twice."""
    num_tokens: int
    """Their tokens."""


class UpdatePhase:
    """Takes optimizer steps on a buffer; a collective object.

    Args:
        engine, schedule: of the run; the schedule moves with each optimizer step.
        config: of the run.
        hidden_size: of the model, for the balance of ranks.
        ratio_tolerance: how far old and new log-probabilities of the same weights may lie apart by rounding.
        ptx: the supervised mix, if any.
    """

    def __init__(
        self,
        engine: Engine,
        schedule: LRScheduler,
        config: PPOConfig,
        *,
        hidden_size: int,
        ratio_tolerance: float,
        ptx: PtxMix | None = None,
    ) -> None:
        self._engine = engine
        self._schedule = schedule
        self._config = config
        self._hidden_size = hidden_size
        self._ratio_tolerance = ratio_tolerance
        self._ptx = ptx

    def __call__(self, experience: Experience, step_rows: Sequence[IntArray], phases: Phases) -> UpdateResult:
        """Take one optimizer step for each entry of `step_rows`.

        Args:
            step_rows: rows of the buffer of each step; a row may come in several.
            phases: gets the times of "data wait" and "update".

        Raises:
            RuntimeError: the first micro-batch gives its actions other probabilities than scoring did, by the
                same weights.
            FloatingPointError: a loss or a gradient is not finite; on every rank, before anything is saved.
        """
        lengths, action_lengths = experience.rollouts.lengths, experience.rollouts.response_lengths
        plans = [self._plan(lengths, rows) for rows in step_rows]
        batches = self._batches(experience, plans, phases)
        means: list[Tensor] = []
        norms: list[Tensor] = []
        learning_rate = 0.0
        for plan, rows in zip(plans, step_rows, strict=True):
            # Every rank knows the action tokens of the step, so none has to ask. 1 where all responses are
            # empty.
            num_actions = max(1, int(action_lengths[rows].sum()))
            ptx_loss = self._add_ptx(phases)
            sums = self._add_gradients(
                plan,
                batches,
                num_actions,
                phases,
                hold_trunk=not experience.has_spread,
                check_ratio=not means,
            )
            with phases("update"):
                norms.append(self._engine.step())
                learning_rate = float(self._schedule.get_last_lr()[0])
                self._schedule.step()
            means.append(torch.stack([*(sums / num_actions), ptx_loss]))
        with phases("update"):
            losses = torch.stack(means).sum(0).double().cpu()
            dist.all_reduce(losses)
        *shared, ptx_sum = (losses / len(plans)).tolist()
        grad_norm = float(torch.stack(norms).max())
        if not all(map(math.isfinite, (*shared, ptx_sum, grad_norm))):
            raise FloatingPointError(
                f"losses {dict(zip(_SUMS, shared, strict=True))}, ptx_loss {ptx_sum}, gradient norm "
                f"{grad_norm}, at a learning rate of {learning_rate:g}. The policy is lost from here on: "
                "resume from a checkpoint with a lower learning_rate."
            )
        return UpdateResult(
            **dict(zip(_SUMS, shared, strict=True)),
            ptx_loss=ptx_sum if self._ptx is not None else float("nan"),
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_optimizer_steps=len(plans),
            num_micro_steps=sum(map(len, plans)),
            num_sequences=sum(map(len, step_rows)),
            num_tokens=sum(int(lengths[rows].sum()) for rows in step_rows),
        )

    def _plan(self, lengths: IntArray, rows: IntArray) -> StepPlan:
        return plan_step(
            lengths,
            rows,
            micro_batch_tokens=self._config.micro_batch_tokens,
            num_replicas=dist.get_world_size(),
            hidden_size=self._hidden_size,
        )

    def _batches(
        self, experience: Experience, plans: Sequence[StepPlan], phases: Phases
    ) -> Iterator[Mapping[str, Any]]:
        """This rank's micro-batches of all steps, with the time spent waiting for them."""
        loader = iter(
            micro_batches(
                experience.dataset(), plans, dist.get_rank(), self._config.num_workers, self._engine.device
            )
        )
        for _ in range(sum(map(len, plans))):
            with phases("data wait"):
                batch = next(loader)
            yield batch

    def _add_ptx(self, phases: Phases) -> Tensor:
        if self._ptx is None:
            return torch.zeros((), device=self._engine.device)
        with phases("update"):
            return self._ptx.add_gradient(self._engine)

    def _add_gradients(
        self,
        plan: StepPlan,
        batches: Iterator[Mapping[str, Any]],
        num_actions: int,
        phases: Phases,
        *,
        hold_trunk: bool,
        check_ratio: bool,
    ) -> Tensor:
        """The gradients of one optimizer step; returns this rank's sums, float32 [len(_SUMS)]."""
        sums = []
        for micro_step in range(len(plan)):
            collected: list[PPOLossSums] = []
            last = micro_step == len(plan) - 1
            objective = _Objective(next(batches), self._config, collected, hold_trunk)
            with phases("update"):
                self._engine.micro_step(objective, divisor=num_actions, last=last)
                if check_ratio and micro_step == 0:
                    self._check_first_ratio(float(collected[0].largest_log_ratio))
            sums.append(torch.stack([value.detach().float() for value in collected[0][: len(_SUMS)]]))
        return torch.stack(sums).sum(0)

    def _check_first_ratio(self, largest_log_ratio: float) -> None:
        error = None
        if not largest_log_ratio <= self._ratio_tolerance:
            error = RuntimeError(
                f"old and new log-probabilities of an action differ by {largest_log_ratio:g} before any "
                f"weight has moved, above rounding ({self._ratio_tolerance:g}): the ratio would start away "
                "from 1 and the first step would be wrong. Is something random in the model's forward, such "
                "as a dropout that is not a module or an attribute?"
            )
        raise_everywhere(error, "The first micro-batch")


class _Objective:
    """The PPO loss of one micro-batch as the engine wants it: from the model to a summed loss."""

    def __init__(
        self, batch: Mapping[str, Any], config: PPOConfig, collected: list[PPOLossSums], hold_trunk: bool
    ) -> None:
        self._batch = batch
        self._config = config
        self._collected = collected
        self._hold_trunk = hold_trunk

    def __call__(self, model: Any) -> Tensor:
        config, actions = self._config, actions_of(self._batch)
        scores = model(*actions, hold_trunk=self._hold_trunk)
        of_actions = {name: self._batch[name][0, actions.positions + 1] for name in _COLUMNS}
        sums = ppo_loss_sums(
            logprobs=scores.logprobs,
            values=scores.values,
            entropy=scores.entropy,
            **of_actions,
            clip_range=config.clip_range,
            value_clip_range=config.value_clip_range,
        )
        self._collected.append(sums)
        loss = sums.policy + config.value_coef * sums.value
        return loss - config.entropy_coef * sums.entropy if config.entropy_coef else loss


_COLUMNS = ("old_logprobs", "old_values", "advantages", "returns")
