"""Yield the bins of a plan as batches, in the global order, which knows nothing of ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from numpy.typing import ArrayLike

from multipack.arguments import whole_number
from multipack.order.batches import PlanBatches
from multipack.order.epoch import STATE_VERSION, EpochSampler
from multipack.order.packing import PackMethod
from multipack.order.plan import EpochPlan
from multipack.order.tail import BatchIndices


class MultipackBatchSampler(EpochSampler):
    """Batches of packed sequences in the global order of a plan; knows nothing of ranks.

    Args:
        lengths: token counts of the rows, shape [num_rows], each in 1..capacity.
        capacity: token slots of a bin.
        bins_per_batch: bins that one rank collates at once.
        shuffle, seed, method, window, shuffle_block, max_sequences_per_bin: as for `EpochPlan`.
        drop_last: leave out a last batch of fewer than `bins_per_batch` bins.

    Raises:
        TypeError: a number is no whole number.
        ValueError: there is no row or no batch, or a length is outside 1..capacity; see `EpochPlan`.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        capacity: int,
        *,
        bins_per_batch: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        method: PackMethod = "auto",
        drop_last: bool = False,
        max_sequences_per_bin: int | None = None,
        window: int | None = None,
        shuffle_block: int = 1,
    ) -> None:
        super().__init__()
        plan = EpochPlan(
            lengths,
            capacity,
            seed=seed,
            shuffle=shuffle,
            method=method,
            window=window,
            shuffle_block=shuffle_block,
            max_sequences_per_bin=max_sequences_per_bin,
        )
        if plan.num_rows == 0:
            raise ValueError(
                "there are no sequences to pack: every epoch would be empty and training would do nothing. "
                "Check the data set and what its over-long policy dropped."
            )
        self.bins_per_batch = whole_number("bins_per_batch", bins_per_batch, 1)
        self.drop_last = bool(drop_last)
        self._batches = PlanBatches(plan, self.bins_per_batch, self.drop_last)
        if self._batches.count(0, 1) == 0:
            raise ValueError(
                f"{len(plan)} bins do not fill one batch of bins_per_batch={bins_per_batch}, and drop_last leaves out the "
                f"rest: every epoch would be empty. Use bins_per_batch <= {len(plan)}, or drop_last=False."
            )

    @property
    def capacity(self) -> int:
        """Token slots of a bin."""
        return self.plan.capacity

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch."""
        return self.batches.plan

    @property
    def batches(self) -> PlanBatches:
        """Random access to the batches of the current epoch."""
        if self._batches.plan.epoch != self._epoch:
            self._batches = self._batches.at_epoch(self._epoch)
        return self._batches

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def remaining(self) -> int:
        return len(self) - self._resume[0]

    @property
    def fingerprint(self) -> str:
        return json.dumps(
            {**self.plan.inputs(), "bins_per_batch": self.bins_per_batch, "drop_last": self.drop_last},
            sort_keys=True,
        )

    def state_dict(self) -> dict[str, Any]:
        """Position in the data: plain integers and strings."""
        return {
            "version": STATE_VERSION,
            "epoch": self._epoch,
            "batches": self._origin[0] + self._done,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; the next pass begins there.

        Raises:
            ValueError: the state is of another version or of other data (names what differs), or was saved inside a balanced
                optimizer step of several ranks.
        """
        self.check_fingerprint(state)
        if state.get("micro_steps", 0):
            raise ValueError(
                f"the state was saved {state['micro_steps']} micro-steps inside a balanced optimizer step of {state['num_replicas']} ranks, "
                "and without ranks nobody knows which batches those were: rows would be repeated. Load it into the "
                "DistributedBatchSampler that saved it, or save after a whole optimizer step."
            )
        self.go_to(int(state["epoch"]), int(state["batches"]), 0)

    def _batches_from(self, start: int, micro_step: int) -> Iterator[BatchIndices]:
        batches = self.batches  # of this epoch, also when they are taken in a later one
        existing = itertools.takewhile(lambda i: batches.count(i, 1) == 1, itertools.count(start))
        return map(batches.batch, existing)

    def _has_more(self, start: int, micro_step: int, done: int) -> bool:
        return self.batches.count(start + done, 1) == 1
