"""Scores of packed actions against one sequence at a time, and what belongs to whom."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_llama import packed, tiny_llama
from transformers import OPTConfig, OPTForCausalLM

from multipack.train.ppo import actor_critic
from multipack.train.ppo.actor_critic import ActorCritic, switch_dropout_off
from multipack.train.ppo.buffer import actions_of

LENGTHS = [(3, 4), (1, 6), (5, 1), (2, 0)]  # prompt, response


def sequences():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for prompt, response in LENGTHS:
        ids = torch.randint(2, 64, (prompt + response,), generator=generator).tolist()
        rows.append((ids, [-100] * prompt + ids[prompt:]))
    return rows


def tiny_opt(**overrides):
    config = {
        "vocab_size": 64,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return OPTForCausalLM._from_config(OPTConfig(**config | overrides), attn_implementation="multipack")


def networks(actor, critic=None, **more):
    model = ActorCritic(actor, critic=critic, reference=copy.deepcopy(actor), **more)
    with torch.no_grad():
        model.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    switch_dropout_off(model)
    return model.train()


def scores_one_by_one(model, trunk, temperature=1.0):
    """Each sequence by itself through a stock attention."""
    logprobs, entropy, values = [], [], []
    model.actor.set_attn_implementation("eager")
    trunk.set_attn_implementation("eager")
    for (ids, _), (prompt, response) in zip(sequences(), LENGTHS, strict=True):
        tokens = torch.tensor([ids])
        logs = (model.actor(tokens).logits[0].double() / temperature).log_softmax(-1)
        hidden = trunk(tokens).last_hidden_state[0]
        for t in range(prompt - 1, prompt + response - 1):
            logprobs.append(logs[t, ids[t + 1]])
            entropy.append(-(logs[t].exp() * logs[t]).sum())
            values.append(model.value_head(hidden[t])[0])
    model.actor.set_attn_implementation("multipack")
    trunk.set_attn_implementation("multipack")
    return [torch.stack(column).float() for column in (logprobs, entropy, values)]


@pytest.mark.parametrize(
    "make_actor", [tiny_llama, tiny_opt, lambda: tiny_opt(word_embed_proj_dim=16, do_layer_norm_before=False)]
)
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_packed_scores_equal_single_sequences(make_actor, critic):
    actor = make_actor()
    trunk = actor.base_model
    if critic == "separate":
        trunk = copy.deepcopy(trunk)
        with torch.no_grad():
            for parameter in trunk.parameters():
                parameter += 0.01
    model = networks(actor, trunk if critic == "separate" else None, temperature=0.7)
    scores = model(*actions_of(packed(sequences())))
    with torch.no_grad():
        right = scores_one_by_one(model, trunk, temperature=0.7)
    for mine, theirs in zip(scores, right, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)
        assert not mine._is_view()


def test_supervised_tokens_have_temperature_1():
    model = networks(tiny_llama(), temperature=0.7)
    actions = actions_of(packed(sequences()))
    plain = networks(tiny_llama())(*actions).logprobs
    assert torch.equal(model(*actions, temperature=1.0).logprobs, plain)
    assert not torch.allclose(model(*actions).logprobs, plain)


def test_reference_stays_where_training_began():
    model = networks(tiny_llama())
    actions = actions_of(packed(sequences()))
    before = model(*actions).logprobs
    assert torch.equal(model.reference_logprobs(*actions), before)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before.sum().backward()
    optimizer.step()
    assert not torch.equal(model(*actions).logprobs, before)
    assert torch.equal(model.reference_logprobs(*actions), before)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_without_its_adapter_the_actor_is_the_reference():
    base = tiny_llama()
    actor = get_peft_model(
        copy.deepcopy(base), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    model = ActorCritic(actor)
    actions = actions_of(packed(sequences()))
    plain = networks(base)(*actions).logprobs
    assert not torch.allclose(model(*actions).logprobs, plain)
    torch.testing.assert_close(model.reference_logprobs(*actions), plain)
    assert not torch.allclose(model(*actions).logprobs, plain)  # and the adapter is back
    trained = {
        name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad and "lora" in name
    }
    assert trained == {"lora_A", "lora_B"}


def test_an_actor_without_reference_is_refused():
    with pytest.raises(ValueError, match="pass a frozen copy"):
        ActorCritic(tiny_llama())


def test_chunked_logits_give_the_same_scores_and_gradients(monkeypatch):
    def gradients():
        model = networks(tiny_llama())
        scores = model(*actions_of(packed(sequences())))
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        return scores, [p.grad for p in model.actor.parameters()]

    whole, right = gradients()
    monkeypatch.setattr(actor_critic, "_LOGITS_AT_ONCE", 64 * 4)  # four rows at once
    chunked, mine = gradients()
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(mine, right)


def test_dropout_is_off_wherever_it_hides():
    actor = tiny_opt(dropout=0.5, attention_dropout=0.5, activation_dropout=0.5, layerdrop=0.5)
    model = networks(actor)
    actions = actions_of(packed(sequences()))
    assert torch.equal(model(*actions).logprobs, model(*actions).logprobs)


def test_only_the_actor_is_exported(tmp_path):
    model = networks(tiny_llama())
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    loaded = type(model.actor).from_pretrained(tmp_path)
    for mine, right in zip(loaded.parameters(), model.actor.parameters(), strict=True):
        assert torch.equal(mine, right)
