"""The update phase on buffers with holes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_llama import tiny_llama

from multipack.train.engine import EngineOptions, build_engine
from multipack.train.optim import OptimizerSpec, learning_rate_schedule
from multipack.train.ppo.actor_critic import ActorCritic
from multipack.train.ppo.buffer import actions_of, micro_batches
from multipack.train.ppo.config import PPOConfig
from multipack.train.ppo.experience import learn_from
from multipack.train.ppo.generate import Responses
from multipack.train.ppo.phases import Phases
from multipack.train.ppo.rollouts import make_rollouts
from multipack.train.ppo.scoring import score
from multipack.train.ppo.update import UpdatePhase
from multipack.train.ppo.update_plan import plan_step
from multipack.train.process import process_group

CONFIG = PPOConfig(micro_batch_tokens=64, num_workers=0)


@pytest.fixture
def engine():
    with process_group() as device:
        actor = tiny_llama()
        model = ActorCritic(actor, reference=copy.deepcopy(actor))
        yield build_engine(model, OptimizerSpec(learning_rate=0.1, name="sgd"), EngineOptions(), device)


def experience_of(engine, response_lengths):
    rng = np.random.default_rng(0)
    n = len(response_lengths)
    rollouts = make_rollouts(
        0,
        range(n),
        [rng.integers(2, 64, 3) for _ in range(n)],
        Responses(
            [rng.integers(2, 64, length) for length in response_lengths],
            np.zeros(n, bool),
            [np.full(length, -4, np.float32) for length in response_lengths],
        ),
        rng.normal(size=sum(response_lengths)).astype(np.float32),
        np.zeros(n, np.float32),
    )
    scores = score(engine, rollouts, micro_batch_tokens=64, hidden_size=32, num_workers=0)
    return learn_from(rollouts, scores, kl_coef=0.0, discount=1.0, gae_lambda=0.95)


def updated(engine, experience, steps, schedule="constant", config=CONFIG):
    schedule = learning_rate_schedule(schedule, engine.optimizer, warmup_steps=0, num_steps=9)
    phase = UpdatePhase(engine, schedule, config, hidden_size=32, ratio_tolerance=1e-3)
    return phase(experience, [np.array(rows) for rows in steps], Phases())


def test_a_step_of_empty_responses_moves_nothing(engine):
    experience = experience_of(engine, [4, 0, 0, 3])
    before = {name: value.clone() for name, value in engine.full_parameters().items()}
    result = updated(engine, experience, [[1, 2]])
    assert (result.policy_loss, result.grad_norm) == (0.0, 0.0)
    for name, value in engine.full_parameters().items():
        assert torch.equal(value, before[name])


def test_first_step_has_the_losses_of_the_definition(engine):
    # With the weights that sampled: ratio 1, so the policy loss is minus the mean advantage, the value loss
    # half the mean squared error of the critic, and nothing is clipped.
    experience = experience_of(engine, [4, 0, 6, 3])
    rows = [0, 1, 2]
    of_rows = slice(0, 10)
    result = updated(engine, experience, [rows])
    advantages, returns = experience.advantages[of_rows], experience.returns[of_rows]
    values = experience.scores.values[of_rows]
    assert result.policy_loss == pytest.approx(-advantages.mean(), abs=1e-6)
    assert result.value_loss == pytest.approx(0.5 * ((values - returns) ** 2).mean(), abs=1e-6)
    assert result.update_entropy == pytest.approx(experience.scores.entropy[of_rows].mean(), abs=1e-5)
    assert (result.clip_share, result.value_clip_share) == (0.0, 0.0)
    assert result.step_divergence == pytest.approx(0.0, abs=1e-6)
    assert (result.num_sequences, result.num_tokens, result.num_optimizer_steps) == (3, 9 + 10, 1)
    assert result.grad_norm > 0
    assert math.isnan(result.ptx_loss)


def test_the_learning_rate_is_that_of_the_last_step(engine):
    # Linear from 0.1 over 9 steps: the third step is taken at 7/9 of it.
    result = updated(engine, experience_of(engine, [4, 3]), [[0, 1]] * 3, schedule="linear")
    assert result.learning_rate == pytest.approx(0.1 * 7 / 9)


def test_the_first_step_follows_the_weighted_objective(engine):
    # At ratio 1 nothing is clipped: the mean over actions of -advantage * ratio + 0.3 * half the squared
    # error - 0.2 * entropy.
    experience = experience_of(engine, [4, 6])
    plan = plan_step(
        experience.rollouts.lengths, np.arange(2), micro_batch_tokens=64, num_replicas=1, hidden_size=32
    )
    (batch,) = micro_batches(experience.dataset(), [plan], 0, 0, engine.device)
    actions = actions_of(batch)
    scores = engine.module(*actions)
    advantages, returns = (batch[name][0, actions.positions + 1] for name in ("advantages", "returns"))
    losses = -advantages * scores.logprobs + 0.15 * (scores.values - returns) ** 2 - 0.2 * scores.entropy
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(losses.mean(), list(trained.values()))
    right = {name: p.detach() - 0.1 * g for (name, p), g in zip(trained.items(), gradients, strict=True)}
    updated(engine, experience, [[0, 1]], config=replace(CONFIG, value_coef=0.3, entropy_coef=0.2))
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.detach(), right[name], atol=1e-6, rtol=0, msg=name)


def test_losses_are_means_and_the_norm_is_the_largest_of_the_steps(engine):
    experience = experience_of(engine, [4, 6])
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    first, second = (updated(engine, experience, [[row]]) for row in (0, 1))
    assert first.grad_norm != pytest.approx(second.grad_norm, rel=0.01)
    for steps in ([[0], [1]], [[1], [0]]):
        both = updated(engine, experience, steps)
        assert both.value_loss == pytest.approx((first.value_loss + second.value_loss) / 2)
        assert both.grad_norm == pytest.approx(max(first.grad_norm, second.grad_norm))


def test_a_better_action_becomes_likelier(engine):
    experience = experience_of(engine, [5, 5])
    updated(engine, experience, [[0, 1]] * 3)
    again = score(engine, experience.rollouts, micro_batch_tokens=64, hidden_size=32, num_workers=0)
    moved = again.logprobs - experience.scores.logprobs
    assert (moved * experience.advantages).sum() > 0


def test_stale_probabilities_are_found(engine):
    experience = experience_of(engine, [4, 3])
    updated(engine, experience, [[0, 1]])
    with pytest.raises(RuntimeError, match="before any weight has moved, above rounding"):
        updated(engine, experience, [[0, 1]])
