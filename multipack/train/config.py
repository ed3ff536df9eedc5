"""What a training run is told: one frozen record, its keys named as in axolotl where they mean the same.

Every key is checked when the record is made, before a model, a data set or a process group exists. A file
written for axolotl is translated; see `multipack.train.axolotl`. No key is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from dataclasses import field as field_
from typing import Any, Literal

from multipack.train.axolotl import explained, is_axolotl, translate
from multipack.train.config_checks import check_config, check_dataset
from multipack.train.config_file import read_config
from multipack.train.run_config import RunConfig

BUILTIN = "builtin"
"""Path of the source that needs no download."""
Overlong = Literal["error", "truncate", "split", "drop"]
RowType = Literal[
    "auto",
    "tokens",
    "messages",
    "alpaca",
    "prompt_completion",
    "question_answer",
    "text",
    "chat_template",
    "sharegpt",
    "completion",
]


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One source of rows and how a row becomes tokens."""

    path: str
    """A jsonl, ndjson, json, csv, tsv or txt file (also .gz or .zst), a parquet or arrow file, a folder of
    such files or of `save_to_disk`, a name on the hub, or "builtin": conversations made from the installed
    Python's standard library."""
    type: RowType = "auto"
    """Format of a row. axolotl's `chat_template` and `sharegpt` are `messages`, its `completion` is `text`;
    `auto` looks at the columns."""
    name: str | None = None
    """Configuration of a hub data set."""
    split: str = "train"
    """Split to train on, in the language of `datasets`: "train", "train[:1%]". Of a folder of files it goes
    by their names."""
    field_messages: str = "messages"
    """Column of the conversation, for `messages`."""
    field: str = "text"
    """Column of the document, for `text`."""
    fields: dict[str, str] = field_(default_factory=dict)
    """What the format calls a column, or a key of a message -> what this source calls it: {output: response},
    {role: speaker}."""
    ignore_fields: list[str] = field_(default_factory=list)
    """Columns and keys of messages to leave out, also where they would change what a row means."""

    def __post_init__(self) -> None:
        check_dataset(self)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """One supervised run. Sizes are a rank's unless the name says otherwise; a step is an optimizer step.

    Tokens a rank takes in one micro-step: at most `micro_batch_size * sequence_len`, in `micro_batch_size`
    bins laid end to end. Tokens of an optimizer step: that times `gradient_accumulation_steps` times the
    number of ranks.

    Raises:
        ValueError: a value is out of its bounds or contradicts another one; the message holds both and the
            remedy.
    """

    # Data
    datasets: list[DatasetConfig] = field(default_factory=list)
    """Sources of rows, joined in this order. None and no `data`: the built-in one."""
    data: str | None = None
    """Short for one source with `type: auto`; on the command line it takes the place of the file's
    `datasets`."""
    dataset_prepared_path: str = "last_run_prepared"
    """Folder of the token cache, shared between runs."""
    prepare_only: bool = False
    """Fill the token cache and stop."""
    prepare_timeout_s: float = 7200.0
    """Seconds a rank waits for another one that is filling the cache before it gives up."""
    val_set_size: int | float = 0
    """Rows held out for validation: a share below 1 or a count. 0: none."""
    train_on_inputs: bool = False
    """Also learn to predict the prompt. Off: only completions and assistant turns have labels."""
    train_on: Literal["all", "last"] = "all"
    """Which answers of a conversation are learnt: every one, or the last."""
    sequence_len: int = 2048
    """Capacity of a bin and longest row, in tokens."""
    overlong: Overlong = "error"
    """What happens to rows above `sequence_len`: refuse, cut the end off, cut into rows, or leave out
    (axolotl's way)."""

    # Batches
    sample_packing: bool = True
    """Pack rows into bins of `sequence_len`. Off: `micro_batch_size` rows are padded to the longest of
    them."""
    pad_to_sequence_len: bool = False
    """Pad every batch to `sequence_len` slots a bin. With `max_sequences_per_bin` shapes are static: those of
    all batches, the last of an epoch included, are equal, and so is the longest segment. Without it the
    number of boundaries differs, and a short batch is smaller."""
    max_sequences_per_bin: int | None = None
    """Most rows of a bin. None: as many as fit."""
    micro_batch_size: int = 1
    """Bins (or rows, without packing) a rank takes in one micro-step."""
    gradient_accumulation_steps: int = 1
    """Micro-steps of an optimizer step."""
    pack_method: Literal["auto", "stream", "best_fit_decreasing", "next_fit", "fewest"] = "auto"
    """How rows are grouped into bins; see `multipack.pack`."""
    balance: Literal["none", "micro_step", "step"] = "none"
    """How the bins of a step are dealt to ranks: as they come, by equal cost a micro-step, or by equal cost a
    step."""
    tail: Literal["split", "pad", "drop", "error"] = "split"
    """What happens to the sequences of the last, incomplete micro-step of an epoch; see
    `DistributedBatchSampler`."""
    prefetch_batches: int | None = None
    """Batches collated ahead. None: two for each thread."""

    # Length of the run
    num_epochs: int = 1
    """Passes over the training rows."""
    max_steps: int | None = None
    """Optimizer steps after which the run ends, should `num_epochs` not end it before."""

    # Adapters
    lora_dropout: float = 0.0
    """Dropout before the added matrices."""

    # Output
    output_dir: str = "runs/sft"
    logging_steps: int = 1
    """Steps between two lines of metrics."""
    eval_steps: int | float | None = None
    """Steps between two validations, or a share of the run below 1. None: after every epoch and at the end.
    Needs `val_set_size`."""
    save_steps: int | float | None = None
    """Steps between two checkpoints, or a share of the run below 1. None: at the end."""
    eval_on_start: bool = False
    """Also evaluate before the first step. Needs `val_set_size`."""
    profile_steps: int = 0
    """Optimizer steps, after the first three, of which each rank leaves a torch trace in `trace/`. 0:
    none."""
    log_rows: bool = False
    """Write the row ids of every step to `rows/rank-R.jsonl` in `output_dir`, to check that each came
    once."""

    def __post_init__(self) -> None:
        check_config(self)

    @property
    def sources(self) -> list[DatasetConfig]:
        """Where rows come from: `data`, else `datasets`, else the built-in source."""
        if self.data is not None:
            return [DatasetConfig(path=self.data)]
        return self.datasets or [DatasetConfig(path=BUILTIN)]


def warmup_of(warmup_steps: float, num_steps: int) -> int:
    """Warm-up steps, from a count or a share of the run's `num_steps` below 1 (0.1 of 101 steps: 10)."""
    return int(warmup_steps * num_steps) if warmup_steps < 1 else int(warmup_steps)


def every_steps(interval: float, num_steps: int) -> int:
    """Steps between two events, from a count of steps or a share of the run's `num_steps` below 1 (0.2 of 101
    steps: 20)."""
    return max(1, int(interval * num_steps)) if interval < 1 else int(interval)


def load_config(argv: Sequence[str] | None = None) -> TrainConfig:
    """Read `--config FILE.yml` and `--key value` pairs, which go over the file's.

    Raises:
        ValueError: an unknown key (the message names the nearest one), a value of a wrong type, one that the
            checks refuse, or a file of axolotl that asks for what is not here (the message names all such
            keys).
    """
    return read_config(
        TrainConfig,
        argv,
        translate=_from_axolotl,
        elsewhere=explained,
        instead={"data": "datasets"},
    )


def _from_axolotl(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The values of a file, translated where it has keys that only axolotl has."""
    if not is_axolotl(values, {key.name for key in fields(TrainConfig)}):
        return values
    return translate(values, name, TrainConfig, DatasetConfig)
