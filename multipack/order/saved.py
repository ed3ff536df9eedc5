"""Saved places: what a state must hold, and whether it is one of this data."""

from __future__ import annotations

import json
from typing import Any

STATE_VERSION = 1


def check_fingerprint(state: Any, fingerprint: str) -> None:
    """Refuse the state of other data.

    Raises:
        ValueError: it is no state, or differs; names in what.
    """
    if not isinstance(state, dict) or "version" not in state or "fingerprint" not in state:
        raise ValueError(f"this is not the state of a multipack sampler: {state!r:.80}.")
    if state["version"] != STATE_VERSION:
        raise ValueError(
            f"the state has version {state['version']}, this multipack reads version {STATE_VERSION}."
        )
    if state["fingerprint"] == fingerprint:
        return
    ours, theirs = json.loads(fingerprint), json.loads(state["fingerprint"])
    if (
        "permutation" in ours and "permutation" not in theirs
    ):  # saved when torch's BatchSampler gave the order of rows
        ours = {key: ours.get(key) for key in theirs}
        if ours == theirs:
            return
    differing = [
        f"{key} ({theirs.get(key)!r} in the state, {ours.get(key)!r} here)"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]
    raise ValueError(
        f"the state belongs to another order of the data: {', '.join(differing)}. Resuming would repeat or "
        "lose rows: build the sampler with the same inputs, or start without the state."
    )
