"""Translate a configuration file of axolotl into the keys of this trainer.

Every key of such a file is taken, if it means something here; named in one log line, if it changes nothing in
what is trained; or refused together with all others that would change it, each with its remedy. No key is
passed over. What the file leaves out means what it means in axolotl: no packing, 3 % warm-up, rows that are
too long are left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

logger = logging.getLogger(__name__)

_OFF: tuple[Any, ...] = (None, False, "", [], {}, 0)

_KERNEL = "a kernel that computes the same"
_ATTENTION = "attention is exact, inside each sequence, whatever computes it"
_MEMORY = "memory alone"
_TRACKER = "metrics go to metrics.jsonl and TensorBoard in output_dir"
_UPLOAD = "upload the exported folder with `hf upload`"
_SPEED = "speed alone"
_EXACT_EVALUATION = "validation counts every target token once, however it is batched"

UNCHANGED: dict[str, str] = {
    "attn_implementation": _ATTENTION,
    **dict.fromkeys(
        ("flash_attention", "xformers_attention", "sdp_attention", "flex_attention", "eager_attention"),
        _ATTENTION,
    ),
    **dict.fromkeys(
        ("flex_attn_compile_kwargs", "gemma4_hybrid_attn_impl", "fused_attn_kernel", "flash_optimum"),
        _ATTENTION,
    ),
    **dict.fromkeys(
        ("flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_qkv", "flash_attn_fuse_mlp"),
        _KERNEL,
    ),
    **dict.fromkeys(
        ("liger_rope", "liger_rms_norm", "liger_rms_norm_gated", "liger_layer_norm", "liger_glu_activation"),
        _KERNEL,
    ),
    **dict.fromkeys(
        (
            "liger_swiglu",
            "liger_cross_entropy",
            "liger_fused_linear_cross_entropy",
            "liger_use_token_scaling",
        ),
        _KERNEL,
    ),
    **dict.fromkeys(
        ("cut_cross_entropy", "unsloth_cross_entropy_loss", "unsloth_rope", "unsloth_rms_norm"), _KERNEL
    ),
    **dict.fromkeys(
        ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), _KERNEL
    ),
    **dict.fromkeys(("use_kernels", "use_scattermoe", "use_sonicmoe", "experts_implementation"), _KERNEL),
    **dict.fromkeys(
        ("gradient_checkpointing_kwargs", "activation_offloading", "low_cpu_mem_usage", "tiled_mlp"), _MEMORY
    ),
    **dict.fromkeys(
        (
            "use_wandb",
            "use_mlflow",
            "use_comet",
            "use_tensorboard",
            "use_trackio",
            "use_swanlab",
            "report_to",
        ),
        _TRACKER,
    ),
    **dict.fromkeys(("use_otel_metrics", "otel_metrics_host", "otel_metrics_port"), _TRACKER),
    **dict.fromkeys(
        ("hub_model_id", "hub_strategy", "push_to_hub", "push_dataset_to_hub", "hf_use_auth_token"), _UPLOAD
    ),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode", "dataloader_pin_memory"), _SPEED),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_prefetch_factor", "dataset_num_proc"), _SPEED),
    **dict.fromkeys(
        ("dataset_processes", "dataset_keep_in_memory", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"), _SPEED
    ),
    **dict.fromkeys(
        ("sample_packing_eff_est", "total_num_tokens", "total_supervised_tokens"),
        "the number of steps is exact",
    ),
    **dict.fromkeys(
        ("sample_packing_group_size", "sample_packing_bin_size", "multipack_real_batches"),
        "bins are planned in windows",
    ),
    **dict.fromkeys(("eval_sample_packing", "eval_batch_size"), _EXACT_EVALUATION),
    **dict.fromkeys(
        ("eval_table_size", "eval_table_max_new_tokens", "eval_max_new_tokens"), "only the loss is evaluated"
    ),
    **dict.fromkeys(("do_causal_lm_eval", "eval_causal_lm_metrics"), "only the loss is evaluated"),
    **dict.fromkeys(
        ("loss_watchdog_threshold", "loss_watchdog_patience"), "a run ends where its loss is not finite"
    ),
    **dict.fromkeys(
        ("save_safetensors", "save_only_model"), "models are exported as safetensors, checkpoints are whole"
    ),
    **dict.fromkeys(
        ("is_llama_derived_model", "is_mistral_derived_model", "is_falcon_derived_model"),
        "the model's configuration says it",
    ),
    **dict.fromkeys(
        ("strict", "debug", "device_map", "local_rank", "world_size"), "nothing depends on it here"
    ),
    **dict.fromkeys(
        ("experimental_skip_move_to_device", "ddp_find_unused_parameters", "ddp"),
        "the engine places parameters",
    ),
    **dict.fromkeys(
        ("fsdp_version", "fsdp_final_state_dict_type", "accelerator_config"), "the engine is torch's FSDP2"
    ),
    **dict.fromkeys(
        ("dp_shard_size", "dp_replicate_size"),
        "all ranks share the data, and zero_stage says what they shard",
    ),
    **dict.fromkeys(
        ("use_ray", "ray_num_workers", "ray_run_name", "resources_per_worker"),
        "start the ranks with torchrun",
    ),
    "shuffle_merged_datasets": "every epoch is shuffled by seed",
    "shuffle_before_merging_datasets": "every epoch is shuffled by seed",
    "skip_prepare_dataset": "the token cache is made when it is missing",
    "tokenizer_use_fast": "fast tokenizers are always used",
    "lora_fan_in_fan_out": "the layout is found from the layer's type",
    "resize_token_embeddings_to_32x": "embeddings are not padded",
    "eot_tokens": "the end of a turn is learnt wherever the template writes one",
    "base_model_ignore_patterns": "only the weights that transformers loads are read",
    "lora_on_cpu": _MEMORY,
    "quantize_moe_experts": "frozen experts are not rounded; " + _MEMORY,
    "expert_parallel_size": "experts are not spread over ranks; " + _MEMORY,
    "streaming": "data is tokenised once into dataset_prepared_path",
    "streaming_multipack_buffer_size": "bins are planned in windows",
    "torch_compile": _SPEED,
    "eta_min": "axolotl does not read it either",
    "expert_parallel_num_nvl_bytes": _SPEED,
    "expert_parallel_token_capacity": _SPEED,
}
"""Keys that leave what is trained as it is, and why."""

_UNCHANGED_PREFIXES = ("wandb_", "mlflow_", "comet_", "trackio_", "swanlab_", "gc_", "profiler_steps")
_UNCHANGED_PLUGINS = ("CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin", "SwanLabPlugin")

_PARALLEL = "start more data-parallel ranks, or lower sequence_len"
REMEDIES: dict[str, str] = {
    "rl": "use `ppo`, or axolotl",
    "fp16": "set bf16: true; float16 needs loss scaling, which this trainer does not support",
    "float16": "set bf16: true; float16 needs loss scaling, which this trainer does not support",
    "gptq": "use adapter: qlora with load_in_4bit: true",
    "group_by_length": "leave it out: packing fills bins from every length, and grouping biases the order",
    "s2_attention": "leave it out: shifted sparse attention is another model",
    "lora_model_dir": "put the adapter's checkpoint into resume_from_checkpoint",
    "peft_use_dora": "leave it out for plain LoRA",
    "peft_layers_to_transform": "name the layers in lora_target_modules",
    "peft_init_lora_weights": "leave it out: added matrices start as nothing",
    "peft": "leave it out for plain LoRA",
    "relora": "leave it out for plain LoRA",
    "base_model_config": "set base_model, and values in overrides_of_model_config",
    "cls_model_config": "leave it out; the configuration's class is found from base_model",
    "model_quantization_config": "give a folder of plain weights as base_model",
    "bnb_config_kwargs": "leave it out: 4-bit weights are NormalFloat with double quantisation",
    "qat": "train in bf16 and quantise afterwards",
    "fp8": "set bf16: true",
    "reinit_weights": "leave base_model out for random weights, with overrides_of_model_config",
    "llama4_linearized_experts": "give a folder whose experts are linear layers as base_model",
    "max_packed_sequence_len": "set sequence_len and sample_packing: true",
    "sample_packing_sequentially": "leave it out: bins are filled in shuffled order",
    "curriculum_sampling": "leave it out: every epoch is shuffled by seed",
    "min_sample_len": "filter short rows out of the data",
    "trim_length": "set excess_length_strategy: truncate",
    "pretraining_dataset": "put the data into datasets with type: completion",
    "test_datasets": "set val_set_size",
    "dataset_exact_deduplication": "remove repeated rows from the data",
    "dataset_shard_num": "take a part with split: 'train[:10%]'",
    "dataset_shard_idx": "take a part with split: 'train[:10%]'",
    "tokens": "put tokens into the tokenizer's own files",
    "added_tokens_overrides": "put tokens into the tokenizer's own files",
    "tokenizer_legacy": "put legacy into the tokenizer's own files",
    "tokenizer_use_mistral_common": "leave it out: the tokenizer of transformers is used",
    "default_system_message": "put the message into the data",
    "tensor_parallel_size": _PARALLEL,
    "context_parallel_size": _PARALLEL,
    "sequence_parallel_degree": _PARALLEL,
    "lr_quadratic_warmup": "leave it out: the learning rate rises linearly",
    "cosine_min_lr_ratio": "leave it out: cosine ends at 0",
    "cosine_constant_lr_ratio": "leave it out: cosine falls until the end",
    "lr_scheduler_kwargs": "leave it out: cosine and linear end at 0",
    "optim_args": "set adam_beta1, adam_beta2 and adam_epsilon",
    "loraplus_lr_ratio": "set learning_rate",
    "embedding_lr": "set learning_rate",
    "lr_groups": "set learning_rate",
    "neftune_noise_alpha": "leave it out",
    "early_stopping_patience": "set max_steps",
    "load_best_model_at_end": "leave it out: checkpoints of save_steps stay in output_dir",
    "dataloader_drop_last": "leave it out: no row is dropped at the end of an epoch",
    "use_eaft": "leave it out: the loss is the mean cross-entropy of the target tokens",
    "diffusion": "leave it out: the loss is that of the next token",
    "trainer_cls": "leave it out",
}
"""Keys that would change what is trained and are not here, and what to do instead."""

_OPTIMIZERS = {
    "adamw_hf": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw_32bit": "adamw_torch",
    "paged_adamw": "adamw_torch",
    "adamw_apex_fused": "adamw_torch_fused",
}
"""Names of the same update rule."""

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_OVERLONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}


def is_axolotl(values: Mapping[str, Any], keys: set[str]) -> bool:
    """Whether a file has a key of axolotl that is not one of this trainer's `keys`."""
    return any(key not in keys and _is_known(key) for key in values)


def translate(values: Mapping[str, Any], name: str, record: type[Any], source: type[Any]) -> dict[str, Any]:
    """The keys of this trainer that a file of axolotl means.

    Args:
        values: of the file.
        name: of the file, for messages.
        record: the configuration's dataclass.
        source: the dataclass of an entry of `datasets`.

    Raises:
        ValueError: the file asks for what is not here; the message has every such key with its remedy, one a
            line.
    """
    translation = _Translation(values, record, source)
    translation.run()
    if translation.refused:
        problems = "".join(f"\n  {key}: {remedy}" for key, remedy in translation.refused.items())
        raise ValueError(
            f"{name} is a file of axolotl, and {len(translation.refused)} of its keys would train something "
            f"else than this trainer does:{problems}"
        )
    said = [*translation.taken, *(f"{key} ({why})" for key, why in translation.unchanged.items())]
    logger.info("%s is read as a file of axolotl: %s.", name, "; ".join(said))
    return translation.ours


def explained(key: str) -> str | None:
    """What holds here in the place of a key of axolotl, for those who write it on the command line; None if
    it is unknown."""
    if key.startswith(_UNCHANGED_PREFIXES):
        return _TRACKER
    return (
        UNCHANGED.get(key) or REMEDIES.get(key) or ("it is translated in a file" if key in _TAKEN else None)
    )


def _is_known(key: str) -> bool:
    return key in UNCHANGED or key in REMEDIES or key in _TAKEN or key.startswith(_UNCHANGED_PREFIXES)


class _Translation:
    """One file on its way: each step takes keys out of `left` and leaves its outcome."""

    def __init__(self, values: Mapping[str, Any], record: type[Any], source: type[Any]) -> None:
        self.left = {key: value for key, value in values.items() if value is not None}
        self.ours: dict[str, Any] = {}
        self.taken: list[str] = []
        self.unchanged: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._keys = {field.name for field in fields(record)}
        self._source_keys = {field.name for field in fields(source)}
        self._optimizers = get_args(get_type_hints(record)["optimizer"])
        self._types = set(get_args(get_type_hints(source)["type"]))

    def run(self) -> None:
        """Take every key."""
        for step in _STEPS:
            step(self)
        for key, value in self.left.items():
            if key in self._keys:
                self.ours.setdefault(key, value)
            elif value in _OFF:
                continue
            elif key in UNCHANGED or key.startswith(_UNCHANGED_PREFIXES):
                self.unchanged[key] = UNCHANGED.get(key, _TRACKER)
            else:
                self.refused[key] = REMEDIES.get(
                    key, "is no key that is known here; leave it out if it changes nothing"
                )

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which is then done with."""
        return self.left.pop(key, default)

    def set(self, key: str, value: Any, said: str) -> None:
        """Give one of our keys a value, and say from what."""
        self.ours[key] = value
        self.taken.append(said)

    # Batches and length of the run

    def packing(self) -> None:
        on = bool(self.take("sample_packing"))
        self.set("sample_packing", on, "rows are packed" if on else "without sample_packing rows are padded")
        pad = self.take("pad_to_sequence_len")
        if pad and on:
            self.ours["pad_to_sequence_len"] = True
        elif pad:
            self.unchanged["pad_to_sequence_len"] = (
                "without packing, rows are padded to the longest of a batch"
            )

    def sizes(self) -> None:
        epochs = self.take("num_epochs", 1)
        if float(epochs) != int(epochs):
            self.refused["num_epochs"] = f"{epochs} is no whole number; set max_steps for a part of an epoch"
        self.ours["num_epochs"] = max(1, int(epochs))
        batch = self.take("batch_size")
        if batch and "gradient_accumulation_steps" not in self.left:
            micro = int(self.left.get("micro_batch_size", 1))
            if int(batch) % micro:
                self.refused["batch_size"] = (
                    f"{batch} is no multiple of micro_batch_size {micro}; set gradient_accumulation_steps"
                )
            else:
                steps = int(batch) // micro
                self.set(
                    "gradient_accumulation_steps",
                    steps,
                    f"batch_size {batch} as gradient_accumulation_steps {steps}",
                )
        elif batch:
            self.unchanged["batch_size"] = "gradient_accumulation_steps is given"

    def overlong(self) -> None:
        if "overlong" in self.left:
            return
        strategy = str(self.take("excess_length_strategy", "drop")).lower()
        types = {
            str(entry.get("type")) for entry in self.left.get("datasets") or [] if isinstance(entry, dict)
        }
        if types == {"completion"}:
            self.set("overlong", "split", "documents longer than sequence_len are cut into rows")
        elif "completion" in types:
            self.refused["datasets"] = (
                "type completion is cut into rows there and other types are not; train on one of them"
            )
        elif strategy not in _OVERLONG:
            self.refused["excess_length_strategy"] = "set drop, truncate or raise"
        else:
            self.set("overlong", _OVERLONG[strategy], f"rows longer than sequence_len: {_OVERLONG[strategy]}")

    # Optimizer

    def numbers(self) -> None:
        for key in (
            "learning_rate",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "max_grad_norm",
        ):
            value = self.left.get(key)
            if isinstance(value, str):  # YAML reads 2e-5 as text
                try:
                    self.left[key] = float(value)
                except ValueError:
                    self.refused[key] = f"{value!r} is no number"
        if self.left.get("adam_beta3") or self.left.get("adam_epsilon2"):
            self.refused["adam_beta3"] = "leave it out: AdamW has two moments"

    def optimizer(self) -> None:
        given = self.take("optimizer", "adamw_torch_fused")
        name = _OPTIMIZERS.get(str(given), str(given))
        if name not in self._optimizers:
            self.refused["optimizer"] = (
                f"{given} is another update rule; set adamw_torch_fused, adamw_bnb_8bit or sgd"
            )
        self.set("optimizer", name, f"optimizer {given} as {name}" if name != given else f"optimizer {name}")

    def warmup(self) -> None:
        scheduler = self.take("lr_scheduler", "cosine")
        if scheduler not in ("cosine", "linear", "constant", "constant_with_warmup"):
            self.refused["lr_scheduler"] = (
                f"{scheduler} is not here; set cosine, linear or constant_with_warmup"
            )
        self.ours["lr_scheduler"] = scheduler
        steps, ratio = self.take("warmup_steps"), self.take("warmup_ratio")
        if scheduler == "constant":
            self.ours["warmup_steps"] = 0
        elif steps is not None:
            self.ours["warmup_steps"] = steps
        elif ratio is not None:
            self.set("warmup_steps", float(ratio), f"warmup_ratio {ratio} as that share of the steps")
        else:
            self.set("warmup_steps", 0.03, "no warm-up given: 3 % of the steps (there at most 100)")

    # When to save and to evaluate

    def saving(self) -> None:
        per_epoch, strategy, steps = (
            self.take(key) for key in ("saves_per_epoch", "save_strategy", "save_steps")
        )
        share = _share(per_epoch, self.ours["num_epochs"])
        if strategy == "best":
            self.refused["save_strategy"] = "set steps: checkpoints of save_steps stay in output_dir"
        if steps:
            self.ours["save_steps"] = steps
        elif per_epoch and share is not None:
            self.set("save_steps", share, f"saves_per_epoch {per_epoch} as save_steps {share:.4g}")
        elif not per_epoch and strategy in (None, "epoch") and self.ours["num_epochs"] > 1:
            self.set("save_steps", 1 / self.ours["num_epochs"], "a checkpoint after each epoch")
        else:
            self.taken.append("one checkpoint at the end")

    def evaluating(self) -> None:
        per_epoch, steps = self.take("evals_per_epoch"), self.take("eval_steps")
        strategy = self.take("eval_strategy") or self.take("evaluation_strategy")
        self.take("evaluation_strategy")
        if not self.left.get("val_set_size"):
            for key, value in (("evals_per_epoch", per_epoch), ("eval_steps", steps)):
                if value:
                    self.unchanged[key] = "val_set_size is 0"
            return
        share = _share(per_epoch, self.ours["num_epochs"])
        if steps:
            self.ours["eval_steps"] = steps
        elif per_epoch and share is not None:
            self.set("eval_steps", share, f"evals_per_epoch {per_epoch} as eval_steps {share:.4g}")
        elif strategy == "no":
            self.unchanged["eval_strategy"] = "the validation rows are evaluated after every epoch"

    def resuming(self) -> None:
        if self.take("auto_resume_from_checkpoints") and "resume_from_checkpoint" not in self.left:
            folder = Path(str(self.left.get("output_dir", "")))
            if any(re.fullmatch(r"checkpoint-\d+", path.name) for path in folder.glob("checkpoint-*")):
                self.set("resume_from_checkpoint", "last", "auto_resume_from_checkpoints: from the newest")
            else:
                self.taken.append(f"auto_resume_from_checkpoints: {folder} has none")

    # Model, precision, engine

    def precision(self) -> None:
        bf16 = self.take("bf16", self.take("bfloat16"))
        self.take("bfloat16")
        if bf16 is not None and bf16 not in (True, False, "auto"):
            self.refused["bf16"] = f"{bf16} is not here; set true, false or auto"
        elif bf16 is not None:
            self.ours["bf16"] = bf16
        checkpointing = self.take("gradient_checkpointing")
        if isinstance(checkpointing, str):
            self.unchanged[f"gradient_checkpointing: {checkpointing}"] = (
                "activations are computed again instead, " + _MEMORY
            )
        self.ours["gradient_checkpointing"] = bool(checkpointing)

    def model(self) -> None:
        overrides = {**(self.take("overrides_of_model_config") or {}), **(self.take("model_config") or {})}
        if overrides.pop("output_router_logits", False):
            self.refused["model_config: output_router_logits"] = "leave it out: no balancing loss is added"
        if overrides:
            self.ours["overrides_of_model_config"] = overrides
        if self.left.get("base_model_config") == self.left.get("base_model"):
            self.take("base_model_config")
        if tokenizer := self.take("tokenizer_config"):
            self.set("tokenizer", tokenizer, f"tokenizer_config as tokenizer {tokenizer}")
        if self.left.get("bnb_config_kwargs") in (
            {"bnb_4bit_use_double_quant": True},
            {"bnb_4bit_quant_type": "nf4"},
        ):
            self.unchanged["bnb_config_kwargs"] = "so are 4-bit weights here"
            self.take("bnb_config_kwargs")
        plugins = self.take("plugins") or []
        for plugin in [plugins] if isinstance(plugins, str) else plugins:
            short = str(plugin).rpartition(".")[2]
            if short in _UNCHANGED_PLUGINS:
                self.unchanged[f"plugin {short}"] = _TRACKER if short == "SwanLabPlugin" else _KERNEL
            elif short == "ExpertParallelPlugin":
                pass  # expert_parallel_size says how much
            else:
                self.refused[f"plugins: {short}"] = "leave it out: plugins of axolotl cannot run here"
        if self.left.get("model_quantization_config") == "Mxfp4Config" and self.left.get(
            "model_quantization_config_kwargs"
        ) == {"dequantize": True}:
            self.take("model_quantization_config")
            self.take("model_quantization_config_kwargs")
            self.unchanged["model_quantization_config"] = "weights in MXFP4 are always dequantised"
        for key in ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"):
            if self.left.get(key) == 1:
                self.take(key)

    def tokens(self) -> None:
        given = {key: value for key, value in (self.take("special_tokens") or {}).items() if value}
        if isinstance(self.left.get("tokens"), dict):  # an older form of special_tokens
            given |= self.take("tokens")
        for key in sorted(set(given) - {"bos_token", "eos_token", "unk_token", "pad_token"}):
            self.refused[f"special_tokens: {key}"] = "put the token into the tokenizer's own files"
        self.ours["special_tokens"] = given

    def template(self) -> None:
        name, text = self.take("chat_template"), self.take("chat_template_jinja")
        if name in (None, "tokenizer_default"):
            return
        if name in ("chatml", "jinja"):
            self.set("chat_template", text if name == "jinja" else _CHATML, f"chat_template {name}")
        else:
            self.taken.append(f"chat_template {name} is the one that the tokenizer brings")

    def adapter(self) -> None:
        if self.left.get("adapter") in (None, ""):
            idle = [
                key
                for key in self.left
                if key.startswith(("lora_", "peft_")) or key in ("adapter", "qlora_sharded_model_loading")
            ]
            for key in idle:
                self.take(key)
            return
        if self.take("unfrozen_parameters"):
            self.unchanged["unfrozen_parameters"] = "with an adapter the model's own parameters are frozen"
        if self.take("peft_use_rslora"):
            self.set("lora_rank_stabilized", True, "peft_use_rslora as lora_rank_stabilized")
        modules, linear = self.left.get("lora_target_modules"), self.left.get("lora_target_linear")
        if modules and linear:
            self.take("lora_target_modules")
            outside = (
                [name for name in modules if name in ("lm_head", "embed_tokens")]
                if isinstance(modules, list)
                else [modules]
            )
            if outside:
                self.refused["lora_target_modules"] = (
                    f"{', '.join(outside)} beside lora_target_linear; set one of both keys"
                )
            self.taken.append("lora_target_linear covers lora_target_modules")

    def engine(self) -> None:
        config, listed = self.take("fsdp_config") or {}, self.take("fsdp")
        if config or listed:
            plain = {str(key).removeprefix("fsdp_"): value for key, value in dict(config).items()}
            sharding = str(plain.get("sharding_strategy", "")).upper()
            stage = 3
            if sharding == "NO_SHARD":
                stage = 0
            elif sharding == "SHARD_GRAD_OP" or plain.get("reshard_after_forward") is False:
                stage = 2
            self._set_stage(stage, "fsdp")
            if self.ours["zero_stage"] >= 2 and (plain.get("offload_params") or "offload" in (listed or ())):
                self.set("offload", True, "offload_params as offload")
        path = self.take("deepspeed")
        if not path:
            return
        stage_of = re.search(r"zero(\d)", str(path))
        if Path(str(path)).exists() or stage_of is None:
            self.ours["deepspeed"] = path
            return
        self._set_stage(int(stage_of[1]), f"{path}, which is not there,")
        if "offload" in str(path) and self.ours["zero_stage"] >= 2:
            self.set("offload", True, "its offloading as offload")

    def _set_stage(self, stage: int, of: str) -> None:
        """The stage of ZeRO, as far as what is rounded to 4 or 8 bits can be sharded; sharding changes memory
        alone."""
        whole = [key for key in ("load_in_4bit", "load_in_8bit") if self.left.get(key)]
        if self.ours["optimizer"] in ("adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit"):
            whole.append(f"optimizer {self.ours['optimizer']}")
        if stage >= 2 and whole:
            self.set(
                "zero_stage",
                1,
                f"{of} as zero_stage 1 (with {', '.join(whole)} each rank holds the weights whole)",
            )
        else:
            self.set("zero_stage", stage, f"{of} as zero_stage {stage}")

    # Data

    def sources(self) -> None:
        entries = self.take("datasets") or []
        self.ours["datasets"] = [
            self._source(dict(entry), f"datasets[{i}]") for i, entry in enumerate(entries)
        ]
        if self.left.get("train_on_inputs"):
            self.taken.append("train_on_inputs: prompts are learnt too")

    def _source(self, entry: dict[str, Any], where: str) -> dict[str, Any]:
        entry = {key: value for key, value in entry.items() if value is not None}
        ours: dict[str, Any] = {}
        given_type = entry.pop("type", "auto")
        if given_type in self._types:
            ours["type"] = given_type
        else:
            self.refused[f"{where}.type"] = (
                f"{given_type} is not here; convert the rows to messages or alpaca"
            )
        names = {**entry.pop("message_property_mappings", {})}
        for key, ours_name in (("message_field_role", "role"), ("message_field_content", "content")):
            if key in entry:
                names[ours_name] = entry.pop(key)
        renamed = {name: column for name, column in names.items() if name != column}
        if renamed:
            ours["fields"] = renamed
        if entry.get("field_thinking", entry.get("template_thinking_key")) == entry.get(
            "template_thinking_key"
        ):
            entry.pop("field_thinking", None)
            entry.pop("template_thinking_key", None)
        if entry.get("roles_to_train") in (
            ["assistant"],
            ["gpt"],
            ["assistant", "gpt"],
            ["gpt", "assistant"],
        ):
            entry.pop("roles_to_train")
        for key, plain in (
            ("train_on_eos", "turn"),
            ("train_on_eot", "turn"),
            ("message_field_training", "train"),
        ):
            if entry.get(key) == plain:
                entry.pop(key)
        for key, why in (("ds_type", "the file's suffix says it"), ("preprocess_shards", _MEMORY)):
            if entry.pop(key, None):
                self.unchanged[f"{where}.{key}"] = why
        for key, value in entry.items():
            if key in self._source_keys:
                ours[key] = value
            elif value not in _OFF:
                self.refused[f"{where}.{key}"] = _SOURCE_REMEDIES.get(
                    key, "is not here; write the rows out as they should be read"
                )
        return ours


_SOURCE_REMEDIES = {
    "data_files": "give the file as path",
    "drop_system_message": "remove the messages from the data",
    "shards": "take a part with split: 'train[:10%]'",
    "revision": "download that revision and give its folder as path",
    "roles_to_train": "only answers of the assistant are learnt; rename the roles, or set train_on_inputs",
    "roles": "rename the roles to system, user, assistant and tool",
}
_STEPS = (
    *(
        _Translation.packing,
        _Translation.sizes,
        _Translation.overlong,
        _Translation.numbers,
        _Translation.optimizer,
    ),
    *(
        _Translation.warmup,
        _Translation.saving,
        _Translation.evaluating,
        _Translation.resuming,
        _Translation.precision,
    ),
    *(
        _Translation.model,
        _Translation.tokens,
        _Translation.template,
        _Translation.adapter,
        _Translation.engine,
    ),
    _Translation.sources,
)
_TAKEN = {
    *(
        "warmup_ratio",
        "saves_per_epoch",
        "evals_per_epoch",
        "save_strategy",
        "eval_strategy",
        "evaluation_strategy",
    ),
    *("auto_resume_from_checkpoints", "batch_size", "excess_length_strategy", "bfloat16", "model_config"),
    *("tokenizer_config", "plugins", "chat_template_jinja", "fsdp", "fsdp_config", "adam_beta3"),
}
"""Keys that are translated."""


def _share(per_epoch: Any, num_epochs: int) -> float | None:
    """So many times an epoch as a share of the run; None for once in all, at its end."""
    if not per_epoch:
        return None
    share = 1.0 / (float(per_epoch) * num_epochs)
    return share if share < 1.0 else None
