"""The networks of a PPO run, built from its configuration."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PretrainedConfig

from multipack.train.model import build_model, model_config
from multipack.train.ppo.actor_critic import ActorCritic, switch_dropout_off
from multipack.train.ppo.config import PPOConfig

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
"""Small Llama for PPO: learns the class-token task in about a minute on two cores."""


def ppo_model_config(config: PPOConfig, vocabulary: int) -> PretrainedConfig:
    """The configuration of the actor; reads no weight.

    Raises:
        ValueError: the longest sequence has more tokens than the model has positions, or the tokenizer more
            than it has embeddings.
    """
    small = _TINY if config.base_model is None else {}
    overrides = {**small, **config.overrides_of_model_config}
    return model_config(
        config.supervised(overrides_of_model_config=overrides), vocabulary, config.longest_sequence
    )


def build_actor_critic(config: PPOConfig, of: PretrainedConfig, *, bf16: bool) -> ActorCritic:
    """Actor, critic and reference on the CPU, the same weights on every rank.

    Args:
        of: what `ppo_model_config` returned.
        bf16: whether the run computes in bfloat16.
    """
    actor = build_model(config.supervised(), of, bf16=bf16)
    # Copied before training, and neither is touched by it: the reference stays the policy the run began with.
    reference = copy.deepcopy(actor) if config.adapter is None else None
    critic = copy.deepcopy(_trunk(actor)) if config.critic == "separate" else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        model = ActorCritic(actor, critic=critic, reference=reference, temperature=config.temperature)
    switch_dropout_off(model)
    return model.train()


def _trunk(actor: Any) -> Any:
    """The layers below the output head, adapters included."""
    causal = actor.get_base_model() if hasattr(actor, "get_base_model") else actor
    return causal.base_model
