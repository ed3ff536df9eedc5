"""The sizes of a PPO run, all of them global, and whether they fit together.

One iteration collects `rollout_batch_size * num_collect_steps` sequences into a buffer and then updates from
it in optimizer steps of `train_batch_size` sequences. Nothing here needs a model, so what cannot train fails
before one is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from multipack.train.ppo.update_plan import UpdateMode, num_optimizer_steps


@dataclass(frozen=True, kw_only=True)
class PPOSizes:
    """Sizes over all ranks.

    Raises:
        ValueError: no rank could train, or some could not; the message holds the sizes and those that work.
    """

    num_replicas: int
    """Ranks."""
    rollout_batch_size: int
    """Prompts of a collect step, over all ranks."""
    num_collect_steps: int
    """Collect steps before an update phase."""
    train_batch_size: int
    """Sequences of an optimizer step, over all ranks."""
    update_mode: UpdateMode
    """Whether `num_update_steps` counts passes over the buffer or single optimizer steps."""
    num_update_steps: int
    """Passes over the buffer or optimizer steps of an update phase."""

    def __post_init__(self) -> None:
        for name in ("rollout_batch_size", "num_collect_steps", "train_batch_size", "num_update_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; below 1 the run would train nothing.")
        self._check_ranks()
        self._check_buffer()

    @property
    def buffer_size(self) -> int:
        """Sequences that an iteration collects when the prompts last."""
        return self.rollout_batch_size * self.num_collect_steps

    @property
    def prompts_per_rank(self) -> int:
        """Prompts of one rank in a collect step."""
        return self.rollout_batch_size // self.num_replicas

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of an update phase over a full buffer."""
        return self.steps_over(self.buffer_size)

    def steps_over(self, buffer_size: int) -> int:
        """Optimizer steps of an update phase over a buffer of this many sequences."""
        return num_optimizer_steps(
            buffer_size, self.train_batch_size, self.update_mode, self.num_update_steps
        )

    @property
    def replay_ratio(self) -> float:
        """How often a sequence is trained on, on average."""
        if self.update_mode == "epochs":
            return float(self.num_update_steps)
        return self.num_update_steps * self.train_batch_size / self.buffer_size

    def _check_ranks(self) -> None:
        ranks = self.num_replicas
        if self.rollout_batch_size % ranks:
            above = -(-self.rollout_batch_size // ranks) * ranks
            below = above - ranks
            fits = f"{above}" if below == 0 else f"{below} or {above}"
            raise ValueError(
                f"rollout_batch_size is {self.rollout_batch_size} prompts for {ranks} ranks: every rank "
                f"needs at least one and all the same number, or the others would wait for it. Use {fits}."
            )
        if self.train_batch_size < ranks:
            raise ValueError(
                f"train_batch_size is {self.train_batch_size} sequences for {ranks} ranks (it counts all "
                f"ranks): some ranks would have nothing to train in every step. Use at least {ranks}, or at "
                f"most {self.train_batch_size} ranks."
            )

    def _check_buffer(self) -> None:
        buffer, wanted, ranks = self.buffer_size, self.train_batch_size, self.num_replicas
        if buffer >= wanted:
            return
        rollouts = -(-wanted // (self.num_collect_steps * ranks)) * ranks
        collects = -(-wanted // self.rollout_batch_size)
        raise ValueError(
            f"One iteration collects {buffer} sequences (rollout_batch_size {self.rollout_batch_size} x "
            f"num_collect_steps {self.num_collect_steps}) but train_batch_size is {wanted} over {ranks} "
            f"ranks ({wanted / ranks:g} a rank): {buffer} < {wanted}, so not one optimizer step would ever "
            f"fill and nothing would be trained. What works: train_batch_size {buffer} or less "
            f"({buffer / ranks:g} a rank), rollout_batch_size {rollouts} or more, or num_collect_steps "
            f"{collects} or more."
        )


def collect_sizes(num_prompts: int, rollout_batch_size: int, num_episodes: int) -> Iterator[int]:
    """Prompts of each collect step of a run: every episode takes each prompt once and ends with what is left
    over."""
    for _ in range(num_episodes):
        for start in range(0, num_prompts, rollout_batch_size):
            yield min(rollout_batch_size, num_prompts - start)


def buffer_sizes(sizes: PPOSizes, num_prompts: int, num_episodes: int) -> list[int]:
    """Sequences that each iteration of a run collects; the collect steps go on across episodes and none is
    left out."""
    steps = list(collect_sizes(num_prompts, sizes.rollout_batch_size, num_episodes))
    each = sizes.num_collect_steps
    return [sum(steps[start : start + each]) for start in range(0, len(steps), each)]


def check_prompts(sizes: PPOSizes, num_prompts: int, num_dropped: int, num_episodes: int) -> None:
    """Check that the prompts that are left fill at least the first optimizer step.

    Raises:
        ValueError: no prompts, or fewer than an optimizer step takes.
    """
    given = num_prompts + num_dropped
    story = f"{given} prompts, {num_dropped} of them dropped as too long, leave {num_prompts}"
    if num_prompts == 0:
        raise ValueError(f"{story}: there is nothing to generate from.")
    first = buffer_sizes(sizes, num_prompts, num_episodes)[0]
    if first < sizes.train_batch_size:
        raise ValueError(
            f"{story}; with rollout_batch_size {sizes.rollout_batch_size} and num_collect_steps "
            f"{sizes.num_collect_steps} the first iteration collects {first} sequences, and train_batch_size "
            f"is {sizes.train_batch_size}: {first} < {sizes.train_batch_size}, so no optimizer step would "
            f"fill. Use a train_batch_size of at most {first}, more or shorter prompts, or more "
            "num_collect_steps and num_episodes."
        )
