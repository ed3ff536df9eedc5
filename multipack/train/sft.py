"""Supervised fine-tuning: `torchrun --nproc-per-node N -m multipack.train sft [--config FILE.yml] [--key
value]`.

First everything that can be wrong is found out (`plan_run`), at the cost of reading data and sizes; only then
is a model loaded (`train`).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PretrainedConfig

from multipack.distributed import check_agreement
from multipack.loading.loader import DataLoader
from multipack.order.sampler import DistributedBatchSampler
from multipack.train.checkpoint import (
    checkpoint_to_resume,
    has_tensor,
    load_tensors,
    read_state,
    save_checkpoint,
    set_later_aside,
)
from multipack.train.config import TrainConfig, every_steps, load_config, warmup_of
from multipack.train.data.prepare import PreparedData, prepare_data
from multipack.train.engine import Engine, EngineOptions, build_engine
from multipack.train.engine_deepspeed import read_deepspeed_file
from multipack.train.evaluate import evaluate
from multipack.train.export import export_model
from multipack.train.loop import Stepper
from multipack.train.metrics import Operations, StepMetrics, model_operations, peak_flops
from multipack.train.model import build_model, model_config, verify_engine
from multipack.train.optim import go_to_step, learning_rate_schedule, optimizer_spec
from multipack.train.process import one_sentence, process_group
from multipack.train.profile import StepProfile
from multipack.train.report import RunReport
from multipack.train.resolved import write_resolved
from multipack.train.row_log import RowLog
from multipack.train.stop import StopOnSigterm
from multipack.train.windows import (
    Window,
    epoch_steps,
    steps_left,
    training_loader,
    validation_loader,
    windows,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the configuration, train, and leave metrics, checkpoints and the model in `output_dir`.

    Raises:
        SystemExit: with the reason, when the configuration, the data or the checkpoint allows no training.
    """
    logging.basicConfig(level=logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    transformers.utils.logging.disable_progress_bar()  # there is one bar, the run's
    with one_sentence("sft", ValueError, OSError):
        config = load_config(argv)
        options = engine_options(config)
        data = prepare_data(config)
        if config.prepare_only:
            if os.environ.get("RANK", "0") == "0":
                print(data, flush=True)
            return
    with process_group(config.ddp_timeout) as device:
        with one_sentence("sft", ValueError, OSError):
            run = plan_run(config, data, device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            train(run, options)


@dataclass(frozen=True)
class Run:
    """A run that can be done: what is read, how many steps it has, where it begins."""

    config: TrainConfig
    data: PreparedData
    device: torch.device
    model_config: PretrainedConfig
    loader: DataLoader[Any]
    validation: DataLoader[Any] | None
    checkpoint: Path | None
    state: dict[str, Any]
    """The JSON part of the checkpoint; empty without one."""
    first_step: int
    """Optimizer steps done before."""
    num_steps: int
    """Optimizer steps of the run, those included. Equal to `first_step`: only the model is left to export."""

    @property
    def folder(self) -> Path:
        """Where the run's files go."""
        return Path(self.config.output_dir)


def engine_options(config: TrainConfig) -> EngineOptions:
    """How the model is spread over the ranks, with `bf16: auto` decided.

    Raises:
        ValueError: the DeepSpeed file does not fit; see `read_deepspeed_file`.
    """
    bf16 = (
        torch.cuda.is_available() and torch.cuda.is_bf16_supported() if config.bf16 == "auto" else config.bf16
    )
    deepspeed = None
    if config.deepspeed is not None:
        deepspeed = read_deepspeed_file(
            config.deepspeed,
            micro_batch_size=config.micro_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            max_grad_norm=config.max_grad_norm,
            bf16=bf16,
        )
    return EngineOptions(
        zero_stage=config.zero_stage,
        offload=config.offload,
        bf16=bf16,
        max_grad_norm=config.max_grad_norm,
        deepspeed=deepspeed,
    )


def plan_run(config: TrainConfig, data: PreparedData, device: torch.device) -> Run:
    """Find out everything that can be known before the model is loaded. All ranks together.

    Raises:
        ValueError: no rank would train, or the model, the data or the checkpoint does not fit; with numbers
            and remedy.
    """
    checkpoint = checkpoint_to_resume(config.resume_from_checkpoint, Path(config.output_dir))
    state = read_state(checkpoint) if checkpoint is not None else {}
    of = model_config(config, len(data.tokenizer), data.longest)
    data.check_ids(of.vocab_size)
    pad = data.tokenizer.pad_token_id or 0
    loader = training_loader(config, data.train, pad_token_id=pad, hidden_size=of.hidden_size, device=device)
    sampler = loader.batch_sampler
    assert isinstance(sampler, DistributedBatchSampler)
    check_agreement(sampler.fingerprint)
    steps_of_epochs = epoch_steps(sampler, config)
    if checkpoint is not None:
        if "sampler" not in state:
            raise ValueError(
                f"{checkpoint} is of no supervised run. Resume it with the command that wrote it."
            )
        sampler.load_state_dict(state["sampler"])
    first_step: int = state.get("step", 0)
    num_steps = first_step + steps_left(sampler, steps_of_epochs, config)
    if config.max_steps is not None:
        num_steps = min(num_steps, config.max_steps)
    if num_steps < first_step:
        raise ValueError(
            f"{checkpoint} is at step {first_step}, beyond max_steps {config.max_steps}: no step can be "
            "taken back. Raise max_steps, or resume from an earlier checkpoint."
        )
    if warmup_of(config.warmup_steps, num_steps) > num_steps:
        raise ValueError(
            f"warmup_steps is {config.warmup_steps} but the run has {num_steps} optimizer steps: the "
            "learning rate would never arrive. Lower warmup_steps, or raise num_epochs."
        )
    validation = None
    if data.validation is not None:
        validation = validation_loader(config, data.validation, pad_token_id=pad, device=device)
    return Run(config, data, device, of, loader, validation, checkpoint, state, first_step, num_steps)


def train(run: Run, options: EngineOptions) -> None:
    """Load the model and take the run's steps; on SIGTERM save a checkpoint and return early."""
    config = run.config
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    model = build_model(config, run.model_config, bf16=options.bf16)
    operations = model_operations(model)
    opening = _opening(run, options, model)
    engine = build_engine(model, optimizer_spec(config), options, run.device)
    schedule = learning_rate_schedule(
        config.lr_scheduler,
        engine.optimizer,
        warmup_steps=warmup_of(config.warmup_steps, run.num_steps),
        num_steps=run.num_steps,
    )
    _seed_dropout(config.seed, run.device)
    _restore(run, engine, schedule)
    if config.sample_packing:
        verify_engine(engine, max_length=config.sequence_len)
    set_later_aside(run.folder, run.first_step)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopOnSigterm())
        report = stack.enter_context(_report(run, operations)) if dist.get_rank() == 0 else None
        rows = RowLog(run.folder, first_step=run.first_step) if config.log_rows else None
        if rows is not None:
            stack.callback(rows.close)

        def note(metrics: StepMetrics) -> None:
            if report is not None:
                report.step(metrics)

        profile = stack.enter_context(StepProfile(run.folder, config.profile_steps))
        if report is not None:
            write_resolved(config, run.folder)
            report.message(opening)
        if run.validation is not None and config.eval_on_start and run.first_step == 0:
            found = evaluate(engine, run.validation)
            if report is not None:
                report.evaluation(0, *found)
        stepper = Stepper(engine, schedule, first_step=run.first_step, report=note, stop=stop)
        if report is not None and run.first_step == run.num_steps:
            report.message(
                f"{run.checkpoint} is at step {run.first_step} of {run.num_steps}: nothing is left to train, "
                "the model is exported. More steps: raise num_epochs or max_steps."
            )
        for window in islice(windows(run.loader, config), run.num_steps - run.first_step):
            stepper.take(window)
            profile.step()
            if rows is not None:
                rows.write(stepper.step, window.batches)
            _after_step(run, stepper, window, engine, report)
            if stepper.stopping:
                break
        stepper.flush()
        saved = _save(run, stepper.step, engine)
        if stepper.step == run.num_steps:
            export_model(engine, run.data.tokenizer, run.folder / "model")
        elif report is not None:
            report.message(
                f"stopped by SIGTERM after step {stepper.step}; saved {saved}: resume with "
                "--resume_from_checkpoint last"
            )


def _report(run: Run, operations: Operations) -> RunReport:
    peak = peak_flops(torch.cuda.get_device_name(run.device)) if run.device.type == "cuda" else None
    return RunReport(
        run.folder,
        total_steps=run.num_steps,
        first_step=run.first_step,
        logging_steps=run.config.logging_steps,
        operations=operations,
        peak_flops=None if peak is None else peak * dist.get_world_size(),
    )


def _opening(run: Run, options: EngineOptions, model: Any) -> str:
    """What is about to be trained, in two lines."""
    config = run.config
    rows, tokens = len(run.data.train), int(run.data.train.lengths.sum(dtype=np.int64))
    every, trained = (
        sum(p.numel() for p in ps) for ps in (model.parameters(), filter(_is_trained, model.parameters()))
    )
    engine = "DeepSpeed" if options.deepspeed is not None else f"zero_stage {options.zero_stage}"
    packing = f"bins of {config.sequence_len:,}" if config.sample_packing else "padded rows"
    return (
        f"sft: {rows:,} rows, {tokens:,} tokens, the longest row {run.data.longest:,} | "
        f"{config.micro_batch_size} {packing} a rank and micro-step, {len(run.loader):,} micro-steps an "
        f"epoch\nsft: steps {run.first_step:,} to {run.num_steps:,} | {dist.get_world_size()} ranks on "
        f"{run.device.type}, {engine}, {'bfloat16' if options.bf16 else 'float32'} | {trained:,} of "
        f"{every:,} parameters trained"
    )


def _is_trained(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad


def _after_step(run: Run, stepper: Stepper, window: Window, engine: Engine, report: RunReport | None) -> None:
    """Validate and save where the step is one for it."""
    config, step = run.config, stepper.step
    if run.validation is not None and _due(
        config.eval_steps, step, run.num_steps, otherwise=window.ends_epoch or step == run.num_steps
    ):
        stepper.flush()
        found = evaluate(engine, run.validation)
        if report is not None:
            report.evaluation(step, *found)
    if _due(config.save_steps, step, run.num_steps, otherwise=False):
        stepper.flush()
        _save(run, step, engine)


def _due(interval: float | None, step: int, num_steps: int, *, otherwise: bool) -> bool:
    return otherwise if interval is None else step % every_steps(interval, num_steps) == 0


def _save(run: Run, step: int, engine: Engine) -> Path:
    """Everything the run needs to go on as if it had never stopped."""
    sampler = run.loader.batch_sampler
    assert isinstance(sampler, DistributedBatchSampler)
    tensors = engine.state_tensors() | _random_states(run.device)
    state = {
        "sampler": sampler.state_dict(),
        "world_size": dist.get_world_size(),
    }
    saved = save_checkpoint(run.folder, step, tensors, state, keep=run.config.save_total_limit)
    engine.loaded()
    return saved


def _restore(run: Run, engine: Engine, schedule: LambdaLR) -> None:
    if run.checkpoint is None:
        return
    load_tensors(run.checkpoint, engine.state_tensors())
    engine.loaded()
    go_to_step(schedule, run.first_step)
    random_states = _random_states(run.device)
    if run.state["world_size"] == dist.get_world_size() and all(
        has_tensor(run.checkpoint, name) for name in random_states
    ):
        load_tensors(run.checkpoint, random_states)
        torch.set_rng_state(random_states[_random_name("cpu")])
        if run.device.type == "cuda":
            torch.cuda.set_rng_state(random_states[_random_name("cuda")], run.device)


def _random_states(device: torch.device) -> dict[str, Tensor]:
    """This rank's random generators, which only dropout draws from."""
    states = {_random_name("cpu"): torch.get_rng_state()}
    if device.type == "cuda":
        states[_random_name("cuda")] = torch.cuda.get_rng_state(device)
    return states


def _random_name(device: str) -> str:
    return f"random.{device}.rank{dist.get_rank()}"


def _seed_dropout(seed: int, device: torch.device) -> None:
    """Other noise on every rank, the same in every run."""
    (state,) = np.random.SeedSequence([seed, dist.get_rank()]).generate_state(1, np.uint64)
    torch.manual_seed(int(state >> np.uint64(1)))
