"""Proximal policy optimization from configuration to summary: `python -m multipack.train ppo`.

What cannot train fails before the model is loaded; from then on every rank takes the same steps.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import transformers
from transformers import PretrainedConfig

from multipack.distributed import rank_and_world_size
from multipack.train.checkpoint import checkpoint_to_resume, set_later_aside
from multipack.train.data.prepare import prepare_data
from multipack.train.engine import EngineOptions
from multipack.train.export import export_model
from multipack.train.ppo.config import PPOConfig, load_ppo_config
from multipack.train.ppo.model import build_actor_critic, ppo_model_config
from multipack.train.ppo.prompts import deal_prompts
from multipack.train.ppo.ptx import PtxMix
from multipack.train.ppo.report import PPOReport
from multipack.train.ppo.sizes import PPOSizes, buffer_sizes
from multipack.train.ppo.task import load_task
from multipack.train.ppo.tasks import Task
from multipack.train.ppo.trainer import PPOTrainer
from multipack.train.process import RunError, one_sentence, process_group, sum_over_ranks
from multipack.train.resolved import write_resolved
from multipack.train.sft import engine_options
from multipack.train.stop import StopOnSigterm

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> None:
    """Read the configuration, train, and leave metrics, checkpoints and the policy in `output_dir`.

    Raises:
        SystemExit: with the reason, when the configuration, the prompts or the checkpoint allow no training.
    """
    logging.basicConfig(level=logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    transformers.utils.logging.disable_progress_bar()  # there is one bar, the run's
    with one_sentence("ppo", ValueError, OSError):
        run = plan_run(load_ppo_config(argv))
    with one_sentence("ppo", RunError), process_group(run.config.ddp_timeout) as device:
        train(run, device)


@dataclass(frozen=True)
class Run:
    """A run that can be done: sizes, prompts, reward, and the shape of the model."""

    config: PPOConfig
    sizes: PPOSizes
    task: Task
    held_out: Task | None
    """Prompts of the evaluation, if any are held out."""
    model_config: PretrainedConfig
    options: EngineOptions
    checkpoint: Path | None

    @property
    def num_iterations(self) -> int:
        """Iterations of the whole run."""
        return len(buffer_sizes(self.sizes, len(self.task.prompts), self.config.num_episodes))


def plan_run(config: PPOConfig) -> Run:
    """Find out everything that can be known before a model is loaded or ranks meet.

    Raises:
        ValueError: sizes, prompts, model or files do not fit together; with numbers and remedy.
    """
    sizes = ppo_sizes(config, rank_and_world_size()[1])
    task, held_out, vocabulary = load_task(config, sizes)
    return Run(
        config=config,
        sizes=sizes,
        task=task,
        held_out=held_out,
        model_config=ppo_model_config(config, vocabulary),
        options=engine_options(config.supervised()),
        checkpoint=checkpoint_to_resume(config.resume_from_checkpoint, Path(config.output_dir)),
    )


def train(run: Run, device: torch.device) -> PPOTrainer:
    """Load the model and run the iterations; on SIGTERM save a checkpoint and return early. All ranks
    together.

    Returns:
        The trainer as the run left it. It must be gone before the process group is.

    Raises:
        ValueError: the checkpoint or the supervised mix does not fit.
        FloatingPointError: a loss or a gradient is not finite; on every rank.
        RuntimeError: generation or a check failed on some rank; every rank raises.
        RunError: the reward failed on some rank; every rank raises.
    """
    config, task = run.config, run.task
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    ptx = _ptx(config, device)
    model = build_actor_critic(config, run.model_config, bf16=run.options.bf16)
    trainer = PPOTrainer(model, task, config, run.sizes, run.options, device, ptx)
    if run.checkpoint is not None:
        trainer.load(run.checkpoint)
        if trainer.iteration > run.num_iterations:
            raise ValueError(
                f"{run.checkpoint} is at iteration {trainer.iteration}, beyond the {run.num_iterations} of "
                f"num_episodes {config.num_episodes}: no iteration can be taken back. Raise num_episodes, or "
                "resume from an earlier checkpoint."
            )
    set_later_aside(Path(config.output_dir), trainer.iteration)
    prompts = deal_prompts(
        run.sizes,
        len(task.prompts),
        num_episodes=config.num_episodes,
        seed=config.seed,
        rank=dist.get_rank(),
        first_collect_step=trainer.collect_step,
        permutation=trainer.permutation,
    )
    _run_iterations(trainer, _groups(prompts, config.num_collect_steps), run)
    if task.tokenizer is not None and trainer.iteration == run.num_iterations:
        export_model(trainer.engine, task.tokenizer, Path(config.output_dir) / "model")
    return trainer


def ppo_sizes(config: PPOConfig, num_replicas: int) -> PPOSizes:
    """The sizes of a run on so many ranks, checked."""
    return PPOSizes(
        num_replicas=num_replicas,
        rollout_batch_size=config.rollout_batch_size,
        num_collect_steps=config.num_collect_steps,
        train_batch_size=config.train_batch_size,
        update_mode=config.update_mode,
        num_update_steps=config.num_update_steps,
    )


def _run_iterations(trainer: PPOTrainer, prompts: Iterator[list[list[int]]], run: Run) -> None:
    """Run what is left, which is nothing where a run was ended between its last checkpoint and its export."""
    config, total = run.config, run.num_iterations
    every = config.save_iterations or total
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopOnSigterm())
        report = None
        if dist.get_rank() == 0:
            write_resolved(config, Path(config.output_dir))
            report = stack.enter_context(PPOReport(config.output_dir, total=total, done=trainer.iteration))
            if trainer.iteration == total:
                report.message(
                    f"{run.checkpoint} is at iteration {total} of {total}: nothing is left to train. More: "
                    "raise num_episodes."
                )

        def evaluate() -> None:
            assert run.held_out is not None
            found = trainer.evaluate(run.held_out)
            if report is not None:
                report.evaluation(trainer.iteration, found.metrics, found.samples)

        if run.held_out is not None and trainer.iteration == 0:
            evaluate()
        for prompt_rows in prompts:
            metrics = trainer.run_iteration(prompt_rows)
            if report is not None:
                report.iteration(metrics, trainer.samples)
            if run.held_out is not None and (
                trainer.iteration == total or trainer.iteration % (config.eval_iterations or total) == 0
            ):
                evaluate()
            (stops,) = sum_over_ranks(int(stop.requested))
            if stops or trainer.iteration % every == 0 or trainer.iteration == total:
                saved = trainer.save()
            if stops and trainer.iteration < total:
                if report is not None:
                    report.message(
                        f"stopped by SIGTERM after iteration {trainer.iteration}; saved {saved}: resume with "
                        "--resume_from_checkpoint last"
                    )
                break


def _groups(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Consecutive groups of `size`, the last one smaller where it does not divide."""
    while group := list(itertools.islice(items, size)):
        yield group


def _ptx(config: PPOConfig, device: torch.device) -> PtxMix | None:
    if config.ptx_data is None:
        return None
    rows = prepare_data(config.supervised(data=config.ptx_data, sequence_len=config.micro_batch_tokens))
    return PtxMix(
        rows.train,
        capacity=config.micro_batch_tokens,
        bins_per_step=config.ptx_bins_per_step or dist.get_world_size(),
        coef=config.ptx_coef,
        seed=config.seed,
        num_workers=config.num_workers,
        device=device,
    )
