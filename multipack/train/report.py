"""What a person sees of a run: one progress bar, metrics.jsonl, TensorBoard, run.png and a last line.

Only rank 0 makes a report. Lines of metrics.jsonl are flushed as they are written, so a killed run keeps what
it did; a resumed run drops the lines after its checkpoint and goes on.
"""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm.auto import tqdm

from multipack.train.metrics import Operations, StepMetrics, merge
from multipack.train.plot import plot_run
from multipack.train.step_lines import keep_steps

if TYPE_CHECKING:
    from typing_extensions import Self


class MetricsLog:
    """Numbers by step, as lines of `metrics.jsonl` and as TensorBoard scalars in `tensorboard/`.

    Args:
        folder: made if missing.
        first_step: steps done before; later lines of an earlier attempt are dropped. 0 starts a new run.
    """

    def __init__(self, folder: str | Path, *, first_step: int = 0) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        keep_steps(self.path, first_step)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._board = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=first_step + 1)

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Add one line; numbers that are not finite become null."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        self._board.close()


WARM_UP_STEPS = 3
"""First steps of a process, which also allocate, compile and fill queues; the summary gives the rate without
them as well."""


def peak_memory() -> str:
    """The most memory that this process held at once: on its GPU, where it has one, and of the host."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)  # KiB on Linux
    if not torch.cuda.is_available():
        return f"{host:.2f} GiB"
    return f"{torch.cuda.max_memory_allocated() / (1 << 30):.2f} GiB on the GPU, {host:.2f} GiB on the host"


class RunReport:
    """The report of a supervised run.

    Args:
        folder: where metrics.jsonl, tensorboard/ and run.png go.
        total_steps: optimizer steps of the whole run.
        first_step: steps done before, in a run that is resumed.
        logging_steps: steps joined into a line of metrics.
        operations: of the model, for MFU; see `metrics.model_operations`.
        peak_flops: of all ranks' devices together; None leaves MFU out.
        name: of the run, on the bar.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        total_steps: int | None,
        first_step: int = 0,
        logging_steps: int = 1,
        operations: Operations | None = None,
        peak_flops: float | None = None,
        name: str = "sft",
    ) -> None:
        self._log = MetricsLog(folder, first_step=first_step)
        self._bar = tqdm(total=total_steps, initial=first_step, desc=name, unit="step", dynamic_ncols=True)
        self._logging_steps = logging_steps
        self._operations = operations
        self._peak_flops = peak_flops if operations is not None else None
        self._first_step = first_step
        self._steady: StepMetrics | None = None
        self._pending: list[StepMetrics] = []
        self._total: StepMetrics | None = None
        self._last_loss = math.nan
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error)

    def step(self, metrics: StepMetrics) -> None:
        """Move the bar by one step, and write a line every `logging_steps` steps."""
        self._total = metrics if self._total is None else merge([self._total, metrics])
        if metrics.step > self._first_step + WARM_UP_STEPS:
            self._steady = metrics if self._steady is None else merge([self._steady, metrics])
        self._last_loss = metrics.loss
        self._pending.append(metrics)
        self._bar.set_postfix_str(
            f"loss {metrics.loss:.3f}, {metrics.tokens_per_s:,.0f} tokens/s, wait {metrics.wait_share:.1%}",
            refresh=False,
        )
        self._bar.update(1)
        if len(self._pending) >= self._logging_steps:
            self._write_pending()

    def evaluation(self, step: int, loss: float, num_target_tokens: int) -> None:
        """Write the validation loss, the mean of `num_target_tokens` target tokens."""
        self._log.write("eval", step, {"loss": loss, "num_target_tokens": num_target_tokens})
        self.message(f"step {step}: validation loss {loss:.4f} over {num_target_tokens:,} tokens")

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.write(text)

    def close(self, *, failed: BaseException | None = None) -> str:
        """Write what is pending, draw run.png, end the bar and print the summary, which is returned; a second
        call only returns it.

        Args:
            failed: what ended the run before its end; the last line then says so, and after which step.
        """
        if not self._closed:
            self._closed = True
            self._write_pending()
            self._log.close()
            self._bar.close()
            plot_run(self._log.path, self._log.path.with_name("run.png"))
            print(self.summary(), flush=True)
            if failed is not None:
                done = self._first_step if self._total is None else self._total.step
                print(
                    f"{self._bar.desc}: FAILED after step {done}: {type(failed).__name__}: {failed}",
                    flush=True,
                )
            else:
                print(self.places(), flush=True)
        return self.summary()

    def places(self) -> str:
        """One line: where the run's files are, and the most memory that this process used."""
        folder = self._log.path.parent
        left = [("model", folder / "model"), ("metrics", self._log.path), ("picture", folder / "run.png")]
        found = ", ".join(f"{name} {path}" for name, path in left if path.exists())
        return f"{self._bar.desc}: {found} | peak memory {peak_memory()}"

    def summary(self) -> str:
        """One line about all steps of this process: rates over the wall time of steps, validation and saving
        left out."""
        if self._total is None:
            return f"{self._bar.desc}: 0 steps trained"
        total = self._total
        mfu = f" | MFU {self._mfu(total):.1%}" if self._peak_flops else ""
        steady = ""
        if self._steady is not None:
            steady = f" ({self._steady.tokens_per_s:,.0f} without the first {WARM_UP_STEPS} steps)"
        return (
            f"{self._bar.desc}: step {total.step}, last loss {self._last_loss:.4f}, {total.num_sequences:,} "
            f"samples and {total.num_tokens:,} tokens in {total.seconds:.1f} s | {total.samples_per_s:,.2f} "
            f"samples/s | {total.tokens_per_s:,.0f} tokens/s{steady} | padding {total.padding_share:.2%} | "
            f"data wait {total.wait_share:.2%} | bin fill {total.bin_fill:.2%}{mfu}"
        )

    def _mfu(self, metrics: StepMetrics) -> float:
        """Share of the devices' peak that the model's own operations take."""
        assert self._operations is not None
        assert self._peak_flops
        return self._operations.of(metrics) / metrics.seconds / self._peak_flops

    def _write_pending(self) -> None:
        if not self._pending:
            return
        joined = merge(self._pending)
        self._pending.clear()
        values = {
            "epoch": joined.epoch,
            "loss": joined.loss,
            "learning_rate": joined.learning_rate,
            "grad_norm": joined.grad_norm,
            "num_sequences": joined.num_sequences,
            "num_tokens": joined.num_tokens,
            "num_target_tokens": joined.num_target_tokens,
            "num_slots": joined.num_slots,
            "seconds": joined.seconds,
            "samples_per_s": joined.samples_per_s,
            "tokens_per_s": joined.tokens_per_s,
            "padding_share": joined.padding_share,
            "wait_share": joined.wait_share,
            "bin_fill": joined.bin_fill,
        }
        if self._peak_flops:
            values["mfu"] = self._mfu(joined)
        self._log.write("train", joined.step, values)
