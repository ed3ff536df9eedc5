"""The bounds and contradictions of a training configuration, checked before anything is loaded."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multipack.train.config import DatasetConfig, TrainConfig

TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def check_dataset(source: DatasetConfig) -> None:
    """Raise ValueError for a source that names nothing."""
    for name in ("path", "split", "field", "field_messages"):
        if not getattr(source, name):
            raise ValueError(
                f"datasets: {name} is empty, so nothing can be read. Give a value or leave the key out."
            )


def check_config(config: TrainConfig) -> None:
    """Raise ValueError for the first value that is out of its bounds or contradicts another."""
    _check_ranges(config)
    _check_data(config)
    _check_batches(config)
    _check_optimizer(config)
    _check_engine(config)
    _check_adapter(config)


def _check_ranges(config: TrainConfig) -> None:
    for name in (
        "sequence_len",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "num_epochs",
        "logging_steps",
        "save_total_limit",
    ):
        _at_least(config, name, 1)
    for name in ("num_workers", "warmup_steps", "seed", "profile_steps"):
        _at_least(config, name, 0)
    if config.max_steps is not None:
        _at_least(config, "max_steps", 1)
    for name in ("weight_decay", "max_grad_norm", "val_set_size", "adam_epsilon"):
        _in_range(config, name, 0.0, math.inf)
    for name in ("adam_beta1", "adam_beta2", "lora_dropout"):
        _in_range(config, name, 0.0, 1.0)
    for name in ("output_dir", "dataset_prepared_path"):
        if not getattr(config, name):
            raise ValueError(f"{name} is empty, so what belongs there would have no place. Give a folder.")


def _at_least(config: TrainConfig, name: str, bound: int) -> None:
    value = getattr(config, name)
    if value < bound:
        raise ValueError(f"{name} is {value}; it must be at least {bound}.")


def _in_range(config: TrainConfig, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    if not low <= value < high:
        raise ValueError(f"{name} is {value}; it must be at least {low:g} and below {high:g}.")


def _check_data(config: TrainConfig) -> None:
    if config.data is not None and config.datasets:
        raise ValueError(
            f"data ({config.data}) and datasets ({len(config.datasets)} sources) are both given; remove one "
            "of them."
        )
    if config.val_set_size >= 1 and config.val_set_size != int(config.val_set_size):
        raise ValueError(
            f"val_set_size is {config.val_set_size}; give a share below 1 or a whole number of rows."
        )
    if config.prepare_timeout_s <= 0:
        raise ValueError(
            f"prepare_timeout_s is {config.prepare_timeout_s}; give the seconds a rank may wait, above 0."
        )
    if config.train_on == "last" and config.train_on_inputs:
        raise ValueError(
            "train_on is last and train_on_inputs is true: everything would be learnt. Set train_on_inputs "
            "to false."
        )
    unknown = sorted(set(config.special_tokens) - set(TOKENS))
    if unknown:
        raise ValueError(
            f"special_tokens has {', '.join(unknown)}; the tokens that can be set are {', '.join(TOKENS)}."
        )
    for name in ("eval_steps", "save_steps"):
        _check_interval(config, name)
    if config.warmup_steps:
        _check_interval(config, "warmup_steps")
    if config.eval_on_start and config.val_set_size == 0:
        raise ValueError(
            "eval_on_start is true but val_set_size is 0, so there is nothing to evaluate on. Set "
            "val_set_size, or remove eval_on_start."
        )
    if config.eval_steps is not None and config.val_set_size == 0:
        raise ValueError(
            f"eval_steps is {config.eval_steps} but val_set_size is 0, so there is nothing to evaluate on. "
            "Set val_set_size, or remove eval_steps."
        )


def _check_interval(config: TrainConfig, name: str) -> None:
    value = getattr(config, name)
    if value is None:
        return
    if not 0 < value < math.inf or (value >= 1 and value != int(value)):
        raise ValueError(
            f"{name} is {value}; give a share of the run below 1 or a whole number of steps, both above 0."
        )


def _check_batches(config: TrainConfig) -> None:
    if not config.sample_packing:
        for name, plain in (
            ("pad_to_sequence_len", False),
            ("max_sequences_per_bin", None),
            ("balance", "none"),
            ("pack_method", "auto"),
        ):
            if getattr(config, name) != plain:
                raise ValueError(
                    f"{name} is {getattr(config, name)} but sample_packing is false. It acts on bins: set "
                    "sample_packing to true."
                )
    if config.max_sequences_per_bin is not None:
        _at_least(config, "max_sequences_per_bin", 1)
    if config.prefetch_batches is not None and config.prefetch_batches < 1:
        raise ValueError(
            f"prefetch_batches is {config.prefetch_batches}; it must be at least 1. num_workers 0 turns "
            "prefetching off."
        )


def _check_optimizer(config: TrainConfig) -> None:
    _in_range(config, "learning_rate", 0.0, math.inf)
    if config.learning_rate == 0:
        raise ValueError("learning_rate is 0, so no step would change the model. Give a value above 0.")
    if config.lr_scheduler == "constant" and config.warmup_steps:
        raise ValueError(
            f"lr_scheduler constant has no warm-up but warmup_steps is {config.warmup_steps}. Use "
            "constant_with_warmup."
        )
    if config.max_steps is not None and config.warmup_steps > config.max_steps:
        raise ValueError(
            f"warmup_steps ({config.warmup_steps}) is above max_steps ({config.max_steps}): the learning "
            "rate would never arrive. Lower warmup_steps."
        )


def _check_engine(config: TrainConfig) -> None:
    if config.ddp_timeout <= 0:
        raise ValueError(f"ddp_timeout is {config.ddp_timeout}; give the seconds a rank may wait, above 0.")
    if config.deepspeed is not None and (config.zero_stage or config.offload):
        raise ValueError(
            f"deepspeed ({config.deepspeed}) and zero_stage {config.zero_stage} / offload {config.offload} "
            "are both given. The stage and the offloading of a DeepSpeed run stand in its JSON file: remove "
            "zero_stage and offload, or deepspeed."
        )
    if (
        config.optimizer in ("adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit")
        and config.zero_stage >= 2
    ):
        raise ValueError(
            f"optimizer {config.optimizer} with zero_stage {config.zero_stage}: its rounded state cannot be "
            "sharded. Set zero_stage to 0 or 1 or deepspeed to a file, or optimizer to adamw_torch."
        )
    if config.offload and config.zero_stage < 2:
        raise ValueError(
            f"offload is true with zero_stage {config.zero_stage}; only sharded parameters can wait in host "
            "memory. Set zero_stage to 2 or 3."
        )


def _check_adapter(config: TrainConfig) -> None:
    named = bool(config.lora_target_modules)
    for name in config.unfrozen_parameters:
        if "[" in name and name.rstrip().endswith("]") and "$[" in name:
            raise ValueError(
                f"unfrozen_parameters has {name}; a part of a parameter cannot be trained. Name it whole."
            )
        try:
            re.compile(name)
        except re.error as error:
            raise ValueError(
                f"unfrozen_parameters has {name}, which is no regular expression: {error}."
            ) from None
    if config.unfrozen_parameters and config.adapter is not None:
        raise ValueError(
            "unfrozen_parameters acts on a model without an adapter, whose own parameters are frozen. Set "
            "lora_modules_to_save, or adapter to nothing."
        )
    if config.adapter is None:
        if config.load_in_4bit or config.load_in_8bit or config.lora_target_linear or named:
            raise ValueError(
                "load_in_4bit, load_in_8bit and lora_target_* act on an adapter, and none is set. Set "
                "adapter to lora or qlora."
            )
        return
    _at_least(config, "lora_r", 1)
    _at_least(config, "lora_alpha", 1)
    if named == config.lora_target_linear and not (config.lora_target_parameters and not named):
        raise ValueError(
            f"lora_target_linear is {config.lora_target_linear} and lora_target_modules is "
            f"{config.lora_target_modules}: one of them has to say which layers are adapted. Set "
            "lora_target_linear to true, or name modules."
        )
    if (config.adapter == "qlora") != config.load_in_4bit:
        raise ValueError(
            f"adapter is {config.adapter} and load_in_4bit is {config.load_in_4bit}; qlora means 4-bit "
            "weights under the adapter. Set adapter: qlora with load_in_4bit: true, or adapter: lora with "
            "load_in_4bit: false."
        )
    if config.load_in_4bit and config.load_in_8bit:
        raise ValueError(
            "load_in_4bit and load_in_8bit are both true: weights have one precision. Set one of them to "
            "false."
        )
    if (config.load_in_4bit or config.load_in_8bit) and config.zero_stage >= 2:
        kind = (
            f"adapter qlora with zero_stage {config.zero_stage}: packed 4-bit"
            if config.load_in_4bit
            else f"load_in_8bit with zero_stage {config.zero_stage}: 8-bit"
        )
        raise ValueError(
            f"{kind} weights cannot be sharded by rows. Set zero_stage to 0 or 1; "
            "the adapter's own state is small."
        )
