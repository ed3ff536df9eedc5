"""The networks of PPO as one module, so that one engine spreads, trains and saves them.

Actor, critic and frozen reference score action tokens by one path: a packed forward, then the output layer at
the positions that predict an action. Old and new log-probabilities both come from it, which is why their
ratio starts at 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multipack.integrations.attention import stock_attention
from multipack.integrations.verify import verify_packing
from multipack.train.ppo.generate import Responses, generate_responses

_LOGITS_AT_ONCE = 1 << 28
"""Logits widened to float32 together: 1 GB, whatever the vocabulary and the batch."""


class Scores(NamedTuple):
    """What the networks say of the action tokens of a micro-batch, float32, shape [action_tokens]."""

    logprobs: Tensor
    entropy: Tensor
    """Of the distribution the token was drawn from, nats."""
    values: Tensor
    """Expected return before the token."""


class ActorCritic(nn.Module):
    """Policy, value head and reference.

    Args:
        actor: a transformers causal language model, or a peft model around one.
        critic: a trunk of its own for the values; None puts the value head on the actor's last hidden states.
        reference: the frozen policy that the KL divergence is measured from; None where `actor` is a peft
            model, whose weights without the adapter are the reference.
        temperature: divides the logits of every distribution, as in sampling.
    """

    def __init__(
        self, actor: Any, *, critic: Any = None, reference: Any = None, temperature: float = 1.0
    ) -> None:
        super().__init__()
        self.actor = actor
        self.critic = critic
        self.reference = reference
        self.temperature = temperature
        self.hidden_size: int = actor.get_output_embeddings().weight.shape[1]
        self.value_head = nn.Linear(self.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        if reference is None and not hasattr(actor, "disable_adapter"):
            raise ValueError(
                "Without an adapter the actor cannot be its own reference: pass a frozen copy of it."
            )
        if reference is not None:
            reference.requires_grad_(False)

    def forward(
        self,
        inputs: Mapping[str, Any],
        positions: Tensor,
        actions: Tensor,
        *,
        temperature: float | None = None,
        hold_trunk: bool = False,
    ) -> Scores:
        """Score the actions with the networks in training.

        Args:
            inputs: `model_inputs` of a packed batch of one row.
            positions: int64 [action_tokens], where each action is predicted from.
            actions: int64 [action_tokens], the tokens themselves.
            temperature: for tokens that were not sampled; None is that of sampling.
            hold_trunk: keep the gradient of the values from layers that the policy shares with them.
        """
        outputs = self.actor(**inputs, logits_to_keep=positions, output_hidden_states=self.critic is None)
        logprobs, entropy = _logprobs_and_entropy(outputs.logits[0], actions, temperature or self.temperature)
        trunk = outputs.hidden_states[-1] if self.critic is None else self.critic(**inputs).last_hidden_state
        if hold_trunk and self.critic is None:
            trunk = trunk.detach()
        values = self.value_head(trunk[0, positions])[:, 0].float()
        return Scores(logprobs, entropy, values.clone())  # FSDP's outputs must be no views

    @torch.no_grad()
    def reference_logprobs(self, inputs: Mapping[str, Any], positions: Tensor, actions: Tensor) -> Tensor:
        """Log-probabilities of the actions under the reference, float32 [action_tokens]; arguments as in
        `forward`."""
        policy = self.actor if self.reference is None else self.reference
        with self.actor.disable_adapter() if self.reference is None else contextlib.nullcontext():
            logits = policy(**inputs, logits_to_keep=positions).logits[0]
        return _logprobs_and_entropy(logits, actions, self.temperature)[0]

    def verify_packing(self, device: torch.device) -> None:
        """Refuse an actor that packing is wrong for. Parameters must be whole on this rank."""
        verify_packing(self.actor, device=device)

    def respond(
        self,
        prompts: Sequence[npt.NDArray[Any]],
        uniforms: npt.NDArray[np.float64],
        *,
        eos_token_id: int,
        pad_token_id: int,
        batch_size: int | None,
    ) -> Responses:
        """Sample responses from the actor; see `generate_responses`. Parameters must be whole on this
        rank."""
        actor = self.actor.get_base_model() if hasattr(self.actor, "get_base_model") else self.actor
        training = self.training
        self.eval()
        try:
            with stock_attention(actor):
                return generate_responses(
                    actor,
                    prompts,
                    uniforms,
                    eos_token_id=eos_token_id,
                    pad_token_id=pad_token_id,
                    temperature=self.temperature,
                    batch_size=batch_size,
                )
        finally:
            self.train(training)

    def save_pretrained(self, folder: Path, *, state_dict: Mapping[str, Tensor]) -> None:
        """Write the actor (with an adapter: the adapter alone) as transformers and peft load it.

        Args:
            state_dict: whole parameters of this module.
        """
        prefix = "actor."
        own = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
        self.actor.save_pretrained(folder, state_dict=own)


def switch_dropout_off(model: nn.Module) -> None:
    """Make every forward of the same weights the same: with dropout the ratio of PPO would not start at 1.

    transformers models keep some rates as plain attributes of their layers, copied from the configuration.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _logprobs_and_entropy(logits: Tensor, actions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Both of each row of `logits` [action_tokens, vocabulary], in float32 whatever the precision of the
    model."""
    rows = max(1, _LOGITS_AT_ONCE // logits.shape[-1])
    if len(actions) <= rows:
        return _score_rows(logits, actions, temperature)
    chunks = zip(torch.split(logits, rows), torch.split(actions, rows), strict=True)
    scored = [checkpoint(_score_rows, *chunk, temperature, use_reentrant=False) for chunk in chunks]
    return torch.cat([logprobs for logprobs, _ in scored]), torch.cat([entropy for _, entropy in scored])


def _score_rows(logits: Tensor, actions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax(logits.float() / temperature, -1)
    return every.gather(-1, actions[:, None]).sum(-1), -(every.exp() * every).sum(-1)
