"""Divergence estimates against exact divergences, and the controller by hand."""

from __future__ import annotations

import numpy as np
import pytest

from multipack.train.ppo.kl import KLController, k1, k3


def test_both_estimates_expect_the_exact_divergence():
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    exact = float((policy * np.log(policy / reference)).sum())
    logs = np.log(policy).astype(np.float32), np.log(reference).astype(np.float32)
    assert (policy * k1(*logs)).sum() == pytest.approx(exact, rel=1e-6)
    assert (policy * k3(*logs)).sum() == pytest.approx(exact, rel=1e-6)
    assert (k1(*logs) < 0).any()
    assert (k3(*logs) >= 0).all()


def test_k3_is_exact_near_zero():
    # d^2 / 2 for a small difference d; exp(d) - 1 - d in float32 would be 0 or noise.
    assert k3(np.float32([0.0]), np.float32([1e-4]))[0] == pytest.approx(0.5e-8, rel=1e-2)


def test_fixed_coefficient_stays():
    controller = KLController(0.1)
    controller.update(50.0, 64)
    assert controller.coefficient == 0.1


@pytest.mark.parametrize(
    ("divergence", "factor"),
    [
        (6.0, 1.0),
        (6.6, 1.001),
        (60.0, 1.002),
        (0.0, 0.998),
    ],  # errors 0, .1, clipped to .2 and -.2; 100 / 10000
)
def test_adaptive_coefficient_moves_by_the_clipped_error(divergence, factor):
    controller = KLController(0.5, target=6.0, horizon=10_000)
    controller.update(divergence, 100)
    assert controller.coefficient == pytest.approx(0.5 * factor)


@pytest.mark.parametrize("divergence", [float("nan"), float("inf")])
def test_broken_divergence_is_refused(divergence):
    with pytest.raises(ValueError, match="useless for good"):
        KLController(0.5, target=6.0).update(divergence, 1)
