"""The training loop: one window of batches is one optimizer step, the same on every rank.

What the ranks must know of each other is summed once a step, before it: the target tokens their losses are
divided by, what is reported, and whether one of them was asked to stop. The loss itself is read one step
late, so the device never waits for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from multipack.train.engine import Engine
from multipack.train.loss import causal_lm_loss_sum
from multipack.train.metrics import StepMetrics
from multipack.train.process import sum_over_ranks
from multipack.train.stop import StopOnSigterm
from multipack.train.windows import Window

_MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class _Counts:
    """Sums over a window and all ranks."""

    targets: int
    sequences: int
    tokens: int
    slots: int
    bin_slots: int
    wait_us: int
    stops: int


class LateNumbers:
    """Numbers on their way from the device: reading them waits for the work that made them, and for nothing
    enqueued since.

    `Tensor.item()` would wait for the whole stream, so a loss read one step late would wait for the step just
    enqueued.

    Args:
        values: scalars.
    """

    def __init__(self, *values: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if any(value.is_cuda for value in values):
            self._host = [_pinned_copy(value) for value in values]
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._copied.record()
        else:
            self._host = [value.detach().clone() for value in values]

    def read(self) -> list[float]:
        """The values, once they have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        return [float(value) for value in self._host]


def _pinned_copy(value: Tensor) -> Tensor:
    if not value.is_cuda:
        return value.detach().clone()
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value.detach(), non_blocking=True)


class Stepper:
    """Takes optimizer steps and reports them.

    Args:
        engine, schedule: of the run.
        first_step: steps done before.
        report: gets the metrics of every step, in order, some time after the step; called on every rank.
        stop: whether the run was asked to end.
    """

    def __init__(
        self,
        engine: Engine,
        schedule: LambdaLR,
        *,
        first_step: int,
        report: Callable[[StepMetrics], None],
        stop: StopOnSigterm,
    ) -> None:
        self.step = first_step
        """Optimizer steps done."""
        self.stopping = False
        """Whether some rank was asked to stop; the same on every rank."""
        self._engine = engine
        self._schedule = schedule
        self._report = report
        self._stop = stop
        self._unread: tuple[StepMetrics, LateNumbers] | None = None

    def take(self, window: Window) -> None:
        """One optimizer step.

        Raises:
            FloatingPointError: the loss or the gradient of the step before is not finite.
        """
        started = time.perf_counter()
        counts = self._count(window)
        self.stopping = counts.stops > 0
        total = torch.zeros((), dtype=torch.float64, device=self._engine.device)
        for i, batch in enumerate(window.batches):
            total += self._engine.micro_step(
                partial(causal_lm_loss_sum, batch=batch),
                divisor=max(counts.targets, 1),
                last=i + 1 == len(window.batches),
            )
        dist.all_reduce(total)
        norm = self._engine.step()
        learning_rate = float(self._schedule.get_last_lr()[0])
        self._schedule.step()
        self.step += 1
        late = LateNumbers(total, norm)
        self.flush()
        metrics = StepMetrics(
            step=self.step,
            epoch=window.epoch,
            loss=math.nan,
            learning_rate=learning_rate,
            grad_norm=math.nan,
            num_sequences=counts.sequences,
            num_tokens=counts.tokens,
            num_target_tokens=counts.targets,
            num_slots=counts.slots,
            num_bin_slots=counts.bin_slots,
            seconds=window.wait_seconds + time.perf_counter() - started,
            wait_seconds=counts.wait_us / _MICROSECONDS / dist.get_world_size(),
        )
        self._unread = (metrics, late)

    def flush(self) -> None:
        """Report the last step, if it was not yet."""
        if self._unread is None:
            return
        metrics, late = self._unread
        self._unread = None
        total, norm = late.read()
        loss = total / max(metrics.num_target_tokens, 1)
        metrics = replace(metrics, loss=loss, grad_norm=norm)
        if not (math.isfinite(loss) and math.isfinite(metrics.grad_norm)):
            raise FloatingPointError(
                f"step {metrics.step}: loss {loss}, gradient norm {metrics.grad_norm}, at a learning rate of "
                f"{metrics.learning_rate:g}. The model is lost from here on: resume from a checkpoint with a "
                "lower learning_rate, more warmup_steps, or max_grad_norm 1."
            )
        self._report(metrics)

    def _count(self, window: Window) -> _Counts:
        keys = ("num_target_tokens", "num_sequences", "num_tokens", "num_slots")
        sums = [sum(batch[key] for batch in window.batches) for key in keys]
        # Without packing a batch is its own room.
        sums.append(sum(b["num_bins"] * b["bin_capacity"] or b["num_slots"] for b in window.batches))
        waited = round(window.wait_seconds * _MICROSECONDS)
        return _Counts(*sum_over_ranks(*sums, waited, int(self._stop.requested)))
