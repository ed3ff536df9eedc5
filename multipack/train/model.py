"""The model of a run: loaded by name or made small and random, with packed attention and adapters.

What can be known from the model's configuration is checked by `model_config`, before any weight is read.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from multipack.integrations.attention import ATTENTION
from multipack.integrations.verify import verify_packing
from multipack.train.config import TrainConfig
from multipack.train.engine import Engine
from multipack.train.run_config import RunConfig


def model_config(config: RunConfig, vocabulary: int, longest: int) -> PretrainedConfig:
    """The configuration of `base_model`, or of a small Llama, with the run's overrides.

    Args:
        config: of the run.
        vocabulary: tokens of the tokenizer; a small Llama is made for so many.
        longest: tokens of the longest row. Positions restart in every row, so a bin may be longer than the
            model's.

    Raises:
        ValueError: no such model, rows can be longer than the model's positions, or the tokenizer has more
            tokens than the model has embeddings.
    """
    overrides = config.overrides_of_model_config
    if config.base_model is None:
        found: PretrainedConfig = LlamaConfig(**_small_llama(vocabulary, longest) | overrides)
    else:
        try:
            found = AutoConfig.from_pretrained(
                config.base_model,
                trust_remote_code=config.trust_remote_code,
                revision=config.revision_of_model,
                **overrides,
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"base_model {config.base_model} cannot be loaded; give a folder, or a name on the hub. "
                f"{error}"
            ) from error
    limit = getattr(found, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ValueError(
            f"the longest row has {longest} tokens but {config.base_model or 'the small Llama'} has {limit} "
            f"positions: its end would use positions it never learnt. Lower sequence_len to {limit} with "
            "overlong: truncate, split or drop, or raise max_position_embeddings in "
            "overrides_of_model_config."
        )
    if vocabulary > found.vocab_size:
        raise ValueError(
            f"the tokenizer has {vocabulary} tokens but {config.base_model or 'the small Llama'} has "
            f"embeddings for {found.vocab_size}: the others would have none. Use the model's own tokenizer, "
            "and special_tokens that it already has."
        )
    return found


def build_model(config: TrainConfig, of: PretrainedConfig, *, bf16: bool) -> Any:
    """The model in training mode, on the CPU, the same weights on every rank.

    Args:
        config: of the run.
        of: what `model_config` returned.
        bf16: whether the run computes in bfloat16; frozen weights are then kept in it, trained ones in
            float32.

    Raises:
        ValueError: transformers has no class `model_type`, or no module fits the names to adapt.
    """
    attention = ATTENTION if config.sample_packing else "sdpa"
    frozen = torch.bfloat16 if bf16 and config.adapter else torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        if config.base_model is None:
            model = transformers.AutoModelForCausalLM.from_config(
                of, attn_implementation=attention, dtype=frozen
            )
        else:
            model = _model_class(config.model_type).from_pretrained(
                config.base_model,
                config=of,
                attn_implementation=attention,
                dtype=frozen,
                trust_remote_code=config.trust_remote_code,
                quantization_config=_quantized(config, of, bf16),
                revision=config.revision_of_model,
            )
        if config.adapter:
            model = _with_adapter(model, config)
    if config.unfrozen_parameters:
        _freeze_others(model, config.unfrozen_parameters)
    if config.gradient_checkpointing:
        recompute_activations(model)
    return model.train()


def recompute_activations(model: Any) -> None:
    """Keep the inputs of each block only and compute the rest again in the backward pass."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:  # its name in older releases of transformers 5
        model.gradient_checkpointing_enable(options)


def verify_engine(engine: Engine, *, max_length: int) -> None:
    """Refuse to train a model on packed batches that packing is wrong for; see `verify_packing`. All ranks
    together.

    Raises:
        SystemExit: with the model and the remedy.
    """
    try:
        engine.infer(lambda model: verify_packing(model, max_length=max_length, device=engine.device))
    except ValueError as error:
        raise SystemExit(f"multipack.train: {error}") from error


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout while open; training mode afterwards."""
    model.eval()
    for module in model.modules():
        if type(module).__module__.startswith("bitsandbytes"):
            module.training = True  # else it repacks 4-bit weights on CPU into a form that has no gradient
    try:
        yield
    finally:
        model.train()


def _small_llama(vocabulary: int, longest: int) -> dict[str, Any]:
    """About 0.3 million parameters: learns the built-in data visibly within a minute on two cores."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": max(longest, 2048),
        "tie_word_embeddings": False,
    }


def _model_class(name: str) -> Any:
    found = getattr(transformers, name, None)
    if found is None:
        raise ValueError(
            f"model_type is {name}, which transformers {transformers.__version__} does not have. "
            "AutoModelForCausalLM finds the class."
        )
    return found


def _quantized(config: TrainConfig, of: PretrainedConfig, bf16: bool) -> Any:
    """How transformers reads the weights: rounded to 8 or 4 bits, or the MXFP4 of a file widened to numbers
    that can be trained."""
    if dict(getattr(of, "quantization_config", None) or {}).get("quant_method") == "mxfp4":
        return transformers.Mxfp4Config(dequantize=True)
    if config.load_in_8bit:
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    if not config.load_in_4bit:
        return None
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if bf16 else torch.float32,
    )


def _freeze_others(model: nn.Module, patterns: Sequence[str]) -> None:
    compiled = [re.compile(pattern.replace(".", r"\.")) for pattern in patterns]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(pattern.match(name) for pattern in compiled))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        names = ", ".join(name for name, _ in islice(model.named_parameters(), 3))
        raise ValueError(
            f"unfrozen_parameters {list(patterns)} match no parameter, so nothing would be trained. They are "
            f"called {names}, ..."
        )


def _with_adapter(model: Any, config: TrainConfig) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    lora = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        use_rslora=config.lora_rank_stabilized,
        modules_to_save=config.lora_modules_to_save,
        target_parameters=config.lora_target_parameters,
        target_modules="all-linear" if config.lora_target_linear else config.lora_target_modules,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft asks transformers by an old name
        warnings.filterwarnings("ignore", ".*gradient_checkpointing. is deprecated", FutureWarning)
        if config.load_in_4bit or config.load_in_8bit:
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        return get_peft_model(model, lora)
