"""What a person sees of a PPO run: one progress bar, metrics.jsonl, samples.jsonl, TensorBoard, run.png and a
last line.

Rank 0 only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from multipack.train.ppo.plot import plot_ppo
from multipack.train.report import MetricsLog
from multipack.train.step_lines import keep_steps

if TYPE_CHECKING:
    from typing_extensions import Self

_LAST = 10
"""Iterations whose mean reward the summary gives."""


class PPOReport:
    """The report of a run; a step is an iteration: collect, then update.

    Args:
        folder: where metrics.jsonl, tensorboard/ and run.png go.
        total: iterations of the whole run.
        done: iterations done before, in a run that is resumed.
    """

    def __init__(self, folder: str | Path, *, total: int, done: int = 0) -> None:
        self._log = MetricsLog(folder, first_step=done)
        path = Path(folder) / "samples.jsonl"
        keep_steps(path, done)
        self._samples_file = path.open("a", encoding="utf-8", buffering=1)
        self._bar = tqdm(total=total, initial=done, desc="ppo", unit="iteration", dynamic_ncols=True)
        self._rewards: list[float] = []
        self._newest: Mapping[str, float] = {}
        self._done = done
        self._seconds = self._samples = self._optimizer_steps = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()
        self._samples_file.close()
        self._bar.close()
        plot_ppo(self._log.path, self._log.path.with_name("run.png"))
        if self._rewards:
            print(self.summary(), flush=True)

    def iteration(self, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write one iteration and some of its responses, and move the bar."""
        self._done += 1
        self._newest = metrics
        self._rewards.append(metrics["reward"])
        self._seconds += metrics["seconds"]
        self._samples += metrics["num_rollouts"]
        self._optimizer_steps += metrics["num_optimizer_steps"]
        self._log.write("ppo", self._done, metrics)
        self._bar.set_postfix_str(
            f"reward {metrics['reward']:.3f}, kl {metrics['kl']:.3f}, {metrics['response_tokens']:.0f} "
            f"tokens, generation {metrics['generation_share']:.0%}, wait {metrics['wait_share']:.1%}",
            refresh=False,
        )
        self._bar.update(1)
        self._write_samples("ppo", self._done, samples)

    def evaluation(
        self, iteration: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Write what the held-out prompts earn, and some of the responses."""
        self._log.write("eval", iteration, metrics)
        self._write_samples("eval", iteration, samples)
        self.message(
            f"iteration {iteration}: held-out reward {metrics['reward']:.4f} over "
            f"{metrics['num_prompts']:,.0f} prompts, {metrics['finished_share']:.0%} of responses ended"
        )

    def _write_samples(self, kind: str, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for sample in samples:
            line = json.dumps({"kind": kind, "step": step, **sample}, ensure_ascii=False)
            self._samples_file.write(line + "\n")

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.write(text)

    @property
    def last_reward(self) -> float:
        """Mean reward of the last iterations; NaN before any."""
        last = self._rewards[-_LAST:]
        return math.fsum(last) / len(last) if last else math.nan

    def summary(self) -> str:
        """One line about the iterations of this process, of which there is at least one."""
        newest = self._newest
        return (
            f"ppo: iteration {self._done}, reward {self.last_reward:.4f} (mean of the last "
            f"{len(self._rewards[-_LAST:])}), {self._samples:,.0f} samples and {self._optimizer_steps:,.0f} "
            f"optimizer steps in {self._seconds:.1f} s | {self._samples / self._seconds:,.1f} samples/s | kl "
            f"{newest['kl']:.4f} | generation {newest['generation_share']:.1%}, training "
            f"{newest['train_share']:.1%}, data wait {newest['wait_share']:.2%} | {newest['tflops']:.4f} "
            "TFLOPS a rank"
        )
