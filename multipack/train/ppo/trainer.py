"""The loop of a PPO run on this rank: networks, optimizer, KL controller and how far it has come.

    prompts -> collect (generate, reward, exchange) -> score -> learn_from -> update

All random numbers are named by the seed and a counter, so where a run stands is a handful of integers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method

from multipack.order.orders import Permutation, torch_permutation
from multipack.train.checkpoint import load_tensors, read_state, save_checkpoint
from multipack.train.config import warmup_of
from multipack.train.engine import EngineOptions, build_engine
from multipack.train.metrics import flops_per_token
from multipack.train.optim import go_to_step, learning_rate_schedule, optimizer_spec
from multipack.train.ppo.actor_critic import ActorCritic
from multipack.train.ppo.collect import collect
from multipack.train.ppo.config import PPOConfig
from multipack.train.ppo.experience import Experience, learn_from
from multipack.train.ppo.kl import KLController
from multipack.train.ppo.phases import Phases
from multipack.train.ppo.prompts import permutation_of_old_checkpoints
from multipack.train.ppo.ptx import PtxMix
from multipack.train.ppo.samples import Sample, sample_rows
from multipack.train.ppo.scoring import score
from multipack.train.ppo.sizes import PPOSizes, buffer_sizes
from multipack.train.ppo.tasks import Task
from multipack.train.ppo.update import UpdatePhase, UpdateResult
from multipack.train.ppo.update_plan import step_rows

logger = logging.getLogger(__name__)

Metrics = dict[str, float]

_EVALUATION = 1 << 31
"""In the place of a collect step, names the random numbers of evaluations; no run has so many."""

_ROUNDING = {False: 1e-3, True: 0.5}
"""How far two packed forwards of the same weights may put the log-probability of a token, by whether they run
in bfloat16."""

_PHASES = {
    "generation": "generation",
    "reward": "reward",
    "exchange": "exchange",
    "scoring": "scoring",
    "update": "train",
    "data wait": "wait",
}
"""Phases of an iteration and their names in the metrics."""


class Evaluation(NamedTuple):
    """What the policy earns on held-out prompts, over all ranks."""

    metrics: Metrics
    samples: list[Sample]


class PPOTrainer:
    """Runs iterations and saves where it stands; every method is a collective call.

    Args:
        model: the networks, on the CPU, the same on every rank.
        task: prompts and reward.
        config, sizes: of the run; `sizes` are those of its ranks.
        options: how the engine spreads the model.
        device: of this rank.
        ptx: the supervised mix, if any.
    """

    def __init__(
        self,
        model: ActorCritic,
        task: Task,
        config: PPOConfig,
        sizes: PPOSizes,
        options: EngineOptions,
        device: torch.device,
        ptx: PtxMix | None = None,
    ) -> None:
        self._task = task
        self._config = config
        self._sizes = sizes
        self._ptx = ptx
        self._hidden_size = model.hidden_size
        self._operations = _Operations(model)
        self.iteration = 0
        """Iterations done."""
        self.collect_step = 0
        """Collect steps done."""
        self.permutation: Permutation = torch_permutation
        """Order of the prompts of an episode."""
        self.history: list[Metrics] = []
        """Metrics of the iterations of this process, the same on every rank."""
        self.samples: list[Sample] = []
        """Some responses of the last iteration, the same on every rank."""
        self._said: set[str] = set()
        self.kl = KLController(config.kl_coef, config.kl_target, config.kl_horizon)
        self.engine = build_engine(model, optimizer_spec(config), options, device)
        for method in (
            "respond",
            "reference_logprobs",
            "verify_packing",
        ):  # forwards like any other, where parameters are sharded
            register_fsdp_forward_method(self.engine.module, method)
        with self.engine.gathered():
            self.engine.infer(lambda networks: networks.verify_packing(device))
        buffers = buffer_sizes(sizes, len(task.prompts), config.num_episodes)
        self._steps_of_iterations = [sizes.steps_over(size) for size in buffers]
        self._schedule = learning_rate_schedule(
            config.lr_scheduler,
            self.engine.optimizer,
            warmup_steps=warmup_of(config.warmup_steps, sum(self._steps_of_iterations)),
            num_steps=sum(self._steps_of_iterations),
        )
        self._update = UpdatePhase(
            self.engine,
            self._schedule,
            config,
            hidden_size=self._hidden_size,
            ratio_tolerance=_ROUNDING[options.bf16],
            ptx=ptx,
        )

    def run_iteration(self, prompt_rows: Sequence[Sequence[int]]) -> Metrics:
        """Collect, score, learn and update once; the same metrics on every rank.

        Args:
            prompt_rows: this rank's prompts of each collect step of the iteration.
        """
        config, start, phases = self._config, time.perf_counter(), Phases()
        numbered = {self.collect_step + i: rows for i, rows in enumerate(prompt_rows)}
        rollouts = collect(self.engine, self._task, numbered, config, phases)
        with phases("scoring"):
            scores = score(
                self.engine,
                rollouts,
                micro_batch_tokens=config.micro_batch_tokens,
                hidden_size=self._hidden_size,
                num_workers=config.num_workers,
            )
            experience = learn_from(
                rollouts,
                scores,
                kl_coef=self.kl.coefficient,
                discount=config.discount,
                gae_lambda=config.gae_lambda,
            )
        result = self._update(experience, self._step_rows(len(rollouts)), phases)
        metrics = self._metrics(experience, result, phases, time.perf_counter() - start)
        self.samples = sample_rows(self._task, rollouts, config.log_samples)
        self._say_what_teaches_nothing(experience)
        self.kl.update(experience.divergence, len(rollouts))
        self.iteration += 1
        self.collect_step += len(prompt_rows)
        self.history.append(metrics)
        return metrics

    def evaluate(self, held_out: Task) -> Evaluation:
        """Sample a response to each held-out prompt and reward it, with the same random numbers each time.

        Raises:
            RunError: the reward failed on some rank; every rank raises.
        """
        rank, num_replicas = dist.get_rank(), dist.get_world_size()
        mine = range(rank, len(held_out.prompts), num_replicas)
        rollouts = collect(self.engine, held_out, {_EVALUATION: mine}, self._config, Phases())
        rewards = rollouts.sequence_rewards
        metrics = {
            "reward": float(rewards.mean(dtype=np.float64)),
            "reward_std": float(rewards.std(dtype=np.float64)),
            "response_tokens": float(rollouts.response_lengths.mean()),
            "finished_share": float(rollouts.finished.mean()),
            "num_prompts": float(len(rollouts)),
        }
        return Evaluation(metrics, sample_rows(held_out, rollouts, self._config.log_samples))

    def save(self) -> Path:
        """Write a checkpoint of the run as it stands."""
        state = {
            "run": self._identity(),
            "iteration": self.iteration,
            "collect_step": self.collect_step,
            "permutation": self.permutation.__name__,
            "kl_coef": self.kl.coefficient,
            "ptx": None if self._ptx is None else self._ptx.state_dict(),
        }
        folder, keep = Path(self._config.output_dir), self._config.save_total_limit
        saved = save_checkpoint(folder, self.iteration, self.engine.state_tensors(), state, keep=keep)
        self.engine.loaded()
        return saved

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, also of another number of ranks or ZeRO stage.

        Raises:
            ValueError: it is damaged, or of a run with other prompts, sizes or seed, whose position would
                mean something else.
        """
        state = read_state(checkpoint)
        ours, theirs = self._identity(), state.get("run", {})
        differing = [
            f"{name} ({theirs.get(name)!r} there, {ours[name]!r} here)"
            for name in ours
            if theirs.get(name) != ours[name]
        ]
        if differing:
            raise ValueError(
                f"{checkpoint} is of another run: {', '.join(differing)}. Resuming would repeat or lose "
                "prompts: resume with the configuration that wrote it."
            )
        load_tensors(checkpoint, self.engine.state_tensors())
        self.engine.loaded()
        self.iteration, self.collect_step = state["iteration"], state["collect_step"]
        if state.get("permutation") != torch_permutation.__name__:
            self.permutation = permutation_of_old_checkpoints
        self.kl.coefficient = state["kl_coef"]
        go_to_step(self._schedule, sum(self._steps_of_iterations[: self.iteration]))
        if self._ptx is not None:
            self._ptx.load_state_dict(state["ptx"])

    def _say_what_teaches_nothing(self, experience: Experience) -> None:
        rollouts, iteration = experience.rollouts, self.iteration + 1
        if not experience.has_spread:
            self._say_once(
                "spread",
                f"iteration {iteration}: all {len(rollouts)} rewards are {rollouts.sequence_rewards[0]:g}, "
                "so no response is better than another and the policy is not moved (advantages are 0; only "
                "the critic learns). Check the reward, raise the temperature, or choose prompts that the "
                "policy sometimes answers well.",
            )
        # Class tokens are rewarded token by token and need no end.
        if self._task.tokenizer is not None and not rollouts.finished.any():
            self._say_once(
                "end",
                f"iteration {iteration}: none of {len(rollouts)} responses ended within max_new_tokens "
                f"{self._config.max_new_tokens}; rewards are for texts that were cut off. Raise "
                "max_new_tokens, set missing_eos_penalty, or begin with a model that ends its answers.",
            )

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said and dist.get_rank() == 0:
            logger.warning(
                "%s (Said once; reward_std and finished_share in metrics.jsonl tell the rest.)", text
            )
        self._said.add(what)

    def _identity(self) -> dict[str, Any]:
        """What the position in the run refers to."""
        sizes = asdict(self._sizes)
        del sizes["num_replicas"]
        return {"trainer": "ppo", "seed": self._config.seed, "num_prompts": len(self._task.prompts), **sizes}

    def _step_rows(self, buffer_size: int) -> list[Any]:
        sizes = self._sizes
        seed = [self._config.seed, self.iteration]
        return list(
            step_rows(buffer_size, sizes.train_batch_size, sizes.update_mode, sizes.num_update_steps, seed)
        )

    def _metrics(
        self, experience: Experience, result: UpdateResult, phases: Phases, seconds: float
    ) -> Metrics:
        shares = _mean_shares(phases, seconds)
        trained = asdict(result)
        tokens = int(experience.rollouts.lengths.sum())
        operations = self._operations.of_iteration(tokens, result.num_tokens)
        slots = result.num_micro_steps * self._config.micro_batch_tokens * dist.get_world_size()

        def tera(operations: float, seconds: float) -> float:
            return _rate(operations, seconds) / dist.get_world_size() / 1e12

        return {
            **experience.metrics(),
            "kl_coef": self.kl.coefficient,
            **{name: float(value) for name, value in trained.items()},
            "bin_fill": result.num_tokens / slots,
            "seconds": seconds,
            **{f"{name}_share": share for name, share in shares.items()},
            "rollouts_per_s": len(experience.rollouts) / seconds,
            "generated_tokens_per_s": _rate(
                int(experience.rollouts.response_lengths.sum()), shares["generation"] * seconds
            ),
            "trained_samples_per_s": _rate(
                result.num_sequences, (shares["train"] + shares["wait"]) * seconds
            ),
            "trained_tokens_per_s": _rate(result.num_tokens, (shares["train"] + shares["wait"]) * seconds),
            "tflops": tera(sum(operations.values()), seconds),
            "generation_tflops": tera(operations["generation"], shares["generation"] * seconds),
            "train_tflops": tera(operations["train"], (shares["train"] + shares["wait"]) * seconds),
        }


class _Operations:
    """Floating-point operations of a run's model, attention's products left out."""

    def __init__(self, model: ActorCritic) -> None:
        networks = [network for network in (model.actor, model.critic) if network is not None]
        self._weights: int = sum(p.numel() for network in networks for p in network.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._actor: int = sum(p.numel() for p in model.actor.parameters())
        self._update = flops_per_token(self._weights, trained)

    def of_iteration(self, collected_tokens: int, trained_tokens: int) -> dict[str, float]:
        """By phase: generation (2 for each weight of the actor and token), scoring by policy and reference,
        updates."""
        return {
            "generation": 2.0 * self._actor * collected_tokens,
            "scoring": 2.0 * (self._weights + self._actor) * collected_tokens,
            "train": self._update * trained_tokens,
        }


def _mean_shares(phases: Phases, seconds: float) -> Mapping[str, float]:
    """Share of each phase in the iteration's time, mean over ranks."""
    shares = torch.tensor([phases.seconds[phase] / seconds for phase in _PHASES], dtype=torch.float64)
    dist.all_reduce(shares)
    return dict(zip(_PHASES.values(), (shares / dist.get_world_size()).tolist(), strict=True))


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else float("nan")
