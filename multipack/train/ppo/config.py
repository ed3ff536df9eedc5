"""What a PPO run is told: one frozen record. Sizes count all ranks; what is a rank's says so in its name.

Keys that mean the same as in supervised training have its names and go through its checks. Everything is
checked before a model, a process group or a prompt file is opened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from multipack.train.config import TrainConfig
from multipack.train.config_file import read_config
from multipack.train.ppo.update_plan import UpdateMode
from multipack.train.run_config import RunConfig, Schedule


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RunConfig):
    """One run of proximal policy optimization: collect with the policy, score, update, again.

    Raises:
        ValueError: a value is out of its bounds or contradicts another one; the message holds both and the
            remedy.
    """

    # Task
    task: Literal["class_tokens", "gsm8k", "prompts"] = "class_tokens"
    """class_tokens needs no data; gsm8k checks the answers to the questions in `prompts`; prompts is any
    prompt file."""
    prompts: str | None = None
    """A jsonl(.gz) file; a row has input_ids, or text under `prompt_field`, or chat messages."""
    prompt_field: str = "prompt"
    """Column of the text, for the task prompts."""
    num_prompts: int = 3840
    """Prompts that class_tokens makes."""
    reward: str | None = None
    """module:function that rewards responses, for the task prompts; see `multipack.train.ppo.reward`."""
    reward_model: str | None = None
    """Folder or hub name of a sequence classifier with one output, in the place of `reward`."""
    reward_batch_size_per_rank: int = 16
    """Sequences that the reward model scores at once."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What happens to prompts above `max_prompt_tokens`."""
    missing_eos_penalty: float = 0.0
    """Taken from the reward of each response that was cut off at `max_new_tokens`."""
    val_set_size: int | float = 0
    """Prompts held out for evaluation: a share below 1 or a count. 0: none."""

    # Generation
    max_prompt_tokens: int = 12
    """Longest prompt."""
    max_new_tokens: int = 16
    """Longest response, the end token included."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in every log-probability."""
    generation_batch_size_per_rank: int | None = None
    """Prompts that a rank generates from at once. None: its whole share of a collect step."""

    # Sizes, over all ranks
    rollout_batch_size: int = 64
    """Prompts of a collect step."""
    num_collect_steps: int = 1
    """Collect steps before each update phase; the buffer then holds `rollout_batch_size * num_collect_steps`
    sequences."""
    train_batch_size: int = 16
    """Sequences of an optimizer step."""
    update_mode: UpdateMode = "epochs"
    """What `num_update_steps` counts: passes over the whole buffer (epochs), or optimizer steps on sampled
    sequences (steps)."""
    num_update_steps: int = 4
    """Passes or optimizer steps of an update phase."""
    num_episodes: int = 1
    """Times that each prompt is used."""
    micro_batch_tokens: int = 2048
    """Token slots of one packed micro-batch of one rank; the micro-batches of an optimizer step follow from
    it."""

    # Objective
    discount: float = 1.0
    """What a reward one token later is worth."""
    gae_lambda: float = 0.95
    """0 trusts the critic for the advantages, 1 the rewards alone."""
    clip_range: float = 0.2
    """How far the ratio of new to old probability may gain from 1."""
    value_clip_range: float = 0.2
    """How far a value may move from the old one before its gain stops counting."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy, which is raised."""
    kl_coef: float = 0.005
    """Penalty of each nat of divergence from the reference, in the reward. With `kl_target`: where it
    begins."""
    kl_target: float | None = None
    """Divergence of a response in nats to steer `kl_coef` to. None: it stays."""
    kl_horizon: int = 10_000
    """Sequences over which the steering may change `kl_coef` by the factor e."""
    critic: Literal["shared", "separate"] = "shared"
    """A value head on the actor's own layers, or a trunk of its own that starts as a copy of them."""
    ptx_coef: float = 0.0
    """Weight of the supervised loss that is mixed in (PPO-ptx)."""
    ptx_data: str | None = None
    """Supervised rows for it, in any format of `sft`'s `data`."""
    ptx_bins_per_step: int = 0
    """Packed bins of `micro_batch_tokens` of supervised rows in an optimizer step, over all ranks. 0: one a
    rank."""

    # Optimizer
    lr_scheduler: Schedule = "constant"
    adam_beta2: float = 0.95

    # Output
    output_dir: str = "outputs"
    save_iterations: int | None = None
    """Iterations (collect and update) between two checkpoints. None: at the end."""
    eval_iterations: int | None = None
    """Iterations between two evaluations on the held-out prompts. None: at the start and at the end only.
    Needs `val_set_size`."""
    log_samples: int = 4
    """Responses of each iteration and evaluation that are written to samples.jsonl, with prompt and reward.
    0: none."""

    def __post_init__(self) -> None:
        _check_bounds(self)
        _check_lengths(self)
        _check_task(self)
        _check_ptx(self)
        self.supervised()

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.max_prompt_tokens + self.max_new_tokens

    def supervised(self, **more: Any) -> TrainConfig:
        """The keys that supervised training has as well, as its record, through its checks.

        Args:
            more: further keys of that record.
        """
        values = {key.name: getattr(self, key.name) for key in fields(RunConfig)}
        return TrainConfig(**{**values, "sequence_len": self.longest_sequence, **more})


def load_ppo_config(argv: Sequence[str] | None = None) -> PPOConfig:
    """Read `--config FILE.yml` and `--key value` pairs, which go over the file's.

    Raises:
        ValueError: an unknown key (the message names the nearest one), a value of a wrong type, or one that
            the checks refuse.
    """
    return read_config(PPOConfig, argv)


_NOT_NEGATIVE = ("missing_eos_penalty", "val_set_size", "log_samples")


def _check_bounds(config: PPOConfig) -> None:
    for name in (
        *("num_prompts", "reward_batch_size_per_rank", "max_prompt_tokens", "max_new_tokens", "num_episodes"),
        *("rollout_batch_size", "num_collect_steps", "train_batch_size", "num_update_steps"),
        *("micro_batch_tokens", "kl_horizon"),
    ):
        _between(config, name, 1, math.inf)
    for name in ("save_iterations", "eval_iterations", "generation_batch_size_per_rank"):
        if getattr(config, name) is not None:
            _between(config, name, 1, math.inf)
    for name in ("discount", "gae_lambda"):
        _between(config, name, 0, 1)
    for name in ("value_coef", "entropy_coef", "kl_coef", "ptx_coef", "ptx_bins_per_step", *_NOT_NEGATIVE):
        _between(config, name, 0, math.inf)
    for name in ("temperature", "clip_range", "value_clip_range", "kl_target"):
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; it must be above 0 and finite.")


def _between(config: PPOConfig, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    if not low <= value <= high or value == math.inf:
        bounds = f"at least {low:g}" if high == math.inf else f"within {low:g}..{high:g}"
        raise ValueError(f"{name} is {value}; it must be {bounds}.")


def _check_lengths(config: PPOConfig) -> None:
    if config.longest_sequence > config.micro_batch_tokens:
        raise ValueError(
            f"max_prompt_tokens {config.max_prompt_tokens} + max_new_tokens {config.max_new_tokens} = "
            f"{config.longest_sequence} tokens do not fit micro_batch_tokens {config.micro_batch_tokens}: "
            "the longest sequence could not be trained on. Raise micro_batch_tokens to "
            f"{config.longest_sequence} or more, or lower the others."
        )


def _check_task(config: PPOConfig) -> None:
    if config.eval_iterations is not None and not config.val_set_size:
        raise ValueError(
            f"eval_iterations is {config.eval_iterations} but val_set_size is 0, so there is nothing to "
            "evaluate on. Set val_set_size, or remove eval_iterations."
        )
    judged = [name for name in ("reward", "reward_model") if getattr(config, name) is not None]
    if config.task == "prompts":
        if len(judged) != 1:
            raise ValueError(
                f"task prompts needs one reward and has {len(judged)}: set either reward to module:function "
                "or reward_model."
            )
    elif judged:
        raise ValueError(
            f"task {config.task} has a reward of its own but {judged[0]} is set: use task prompts."
        )
    if (config.prompts is None) != (config.task == "class_tokens"):
        raise ValueError(
            f"task {config.task} and prompts {config.prompts}: class_tokens makes its prompts, the other "
            "tasks read a file."
        )
    if config.task == "class_tokens" and (config.base_model or config.tokenizer):
        raise ValueError(
            "task class_tokens has token ids of its own, which no tokenizer or base_model knows: choose "
            "another task."
        )
    if config.task != "class_tokens" and not (config.base_model or config.tokenizer):
        raise ValueError(
            f"task {config.task} needs a tokenizer, and its end token: set base_model or tokenizer."
        )


def _check_ptx(config: PPOConfig) -> None:
    if (config.ptx_coef > 0) != (config.ptx_data is not None):
        raise ValueError(
            f"ptx_coef is {config.ptx_coef} and ptx_data is {config.ptx_data}: the mix needs a weight and "
            "data."
        )
    if config.ptx_bins_per_step and config.ptx_data is None:
        raise ValueError(
            f"ptx_bins_per_step is {config.ptx_bins_per_step} but ptx_data is not set, so there is nothing "
            "to mix in. Set ptx_data."
        )
    if config.ptx_data is not None and config.task == "class_tokens":
        raise ValueError(
            "ptx_data is text, which task class_tokens has no tokenizer for: choose another task."
        )
