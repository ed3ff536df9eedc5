"""Sampling by named numbers, against one sequence at a time without a cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_llama import tiny_llama
from transformers import GenerationConfig, LlamaForCausalLM

from multipack.train.ppo.generate import UniformSampling, generate_responses, left_padded, sequence_uniforms

EOS, PAD = 1, 0
SETTINGS = {"eos_token_id": EOS, "pad_token_id": PAD}


@pytest.fixture(scope="module")
def policy():
    return tiny_llama(attention="sdpa", initializer_range=0.5).eval()


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 64, length) for length in lengths]


def sampled_alone(policy, prompt, uniforms, temperature):
    """The whole sequence again for every token; the token whose mass covers the number."""
    ids = prompt.tolist()
    for uniform in uniforms:
        logits = policy(torch.tensor([ids])).logits[0, -1].double()
        mass = torch.softmax(logits / temperature, -1).cumsum(-1)
        ids.append(int((mass <= uniform).sum()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_batches_with_cache_and_left_padding_equal_single_sequences(temperature):
    policy = with_end_token_bias(3.0)
    prompts = prompts_of([3, 9, 1, 5, 7, 2])
    uniforms = sequence_uniforms(0, 0, range(6), 12)
    right = [
        sampled_alone(policy, prompt, row, temperature) for prompt, row in zip(prompts, uniforms, strict=True)
    ]
    for batch_size in (None, 4, 1):
        answered = generate_responses(
            policy, prompts, uniforms, temperature=temperature, batch_size=batch_size, **SETTINGS
        )
        assert [ids.tolist() for ids in answered.token_ids] == right
        for prompt, ids, logprobs in zip(prompts, right, answered.logprobs, strict=True):
            whole = torch.tensor([[*prompt.tolist(), *ids]])
            every = torch.log_softmax(policy(whole).logits[0] / temperature, -1)[len(prompt) - 1 : -1]
            expected = every.gather(1, torch.tensor(ids)[:, None])[:, 0]
            np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-5)
    assert answered.finished.tolist() == [ids[-1] == EOS for ids in right]
    assert len({len(ids) for ids in right}) > 1


def with_end_token_bias(bias):
    """A policy with a fixed preference for or against the end token."""

    class Biased(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.logits[..., EOS] += bias
            return outputs

    biased = tiny_llama(attention="sdpa", initializer_range=0.5).eval()
    biased.__class__ = Biased
    return biased


def test_all_responses_may_end_at_once():
    answered = generate_responses(
        with_end_token_bias(1e4), prompts_of([2, 4]), sequence_uniforms(0, 0, [0, 1], 8), **SETTINGS
    )
    assert [ids.tolist() for ids in answered.token_ids] == [[EOS], [EOS]]
    assert answered.finished.all()


def test_responses_are_cut_at_the_limit():
    answered = generate_responses(
        with_end_token_bias(-1e4), prompts_of([2, 4]), sequence_uniforms(0, 0, [0, 1], 8), **SETTINGS
    )
    assert [len(ids) for ids in answered.token_ids] == [8, 8]
    assert not answered.finished.any()


def test_a_rank_may_have_no_prompts(policy):
    answered = generate_responses(policy, [], sequence_uniforms(0, 0, [], 8), **SETTINGS)
    assert answered.token_ids == []
    assert answered.finished.shape == (0,)


def test_numbers_belong_to_their_names():
    numbers = sequence_uniforms(5, 2, [7, 3], 4)
    assert (sequence_uniforms(5, 2, [3], 4)[0] == numbers[1]).all()
    for other in ((6, 2, [7]), (5, 3, [7]), (5, 2, [8])):
        assert (sequence_uniforms(*other, 4)[0] != numbers[0]).all()
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_sampling_follows_the_distribution():
    # 4 tokens of chance .5, .25, .25 and none; numbers on a grid hit each in proportion.
    uniforms = (torch.arange(1000, dtype=torch.float64)[:, None] + 0.5) / 1000
    logits = torch.tensor([0.5, 0.25, 0.25, 0.0]).log().expand(1000, 4)
    chosen = UniformSampling(uniforms, 0, 1.0)(torch.zeros(1000, 0, dtype=torch.long), logits).argmax(-1)
    assert torch.bincount(chosen, minlength=4).tolist() == [500, 250, 250, 0]


def test_prompts_end_together():
    input_ids, mask = left_padded(prompts_of([1, 3]), 60)
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert input_ids[0, :2].tolist() == [60, 60]


def test_habits_of_the_model_do_not_change_the_distribution(policy):
    prompts, uniforms = prompts_of([4, 6]), sequence_uniforms(1, 0, [0, 1], 10)
    right = generate_responses(policy, prompts, uniforms, **SETTINGS)
    before = policy.generation_config
    policy.generation_config = GenerationConfig(repetition_penalty=5.0, no_repeat_ngram_size=1, min_length=9)
    try:
        answered = generate_responses(policy, prompts, uniforms, **SETTINGS)
        assert policy.generation_config.repetition_penalty == 5.0
    finally:
        policy.generation_config = before
    assert [ids.tolist() for ids in answered.token_ids] == [ids.tolist() for ids in right.token_ids]


def test_global_random_state_is_left_alone(policy):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    generate_responses(policy, prompts_of([4]), sequence_uniforms(0, 0, [0], 4), **SETTINGS)
    assert torch.equal(torch.get_rng_state(), before)
