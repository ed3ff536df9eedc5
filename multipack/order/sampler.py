"""Deal batches to ranks.

Every rank computes the same dealing from the same numbers and takes its own share, so no rank ever talks to another and
all have the same number of batches.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from multipack.arguments import check_choice, whole_number
from multipack.distributed import check_rank_unchanged, rank_and_world_size
from multipack.loading.accelerate_view import check_not_dealt_again
from multipack.order.balance import BALANCE_MODES, BalanceMode, deal
from multipack.order.batches import Batches, ListedBatches
from multipack.order.epoch import STATE_VERSION, EpochSampler
from multipack.order.foreign import as_announced, check_foreign, order_follows_epoch
from multipack.order.global_sampler import MultipackBatchSampler
from multipack.order.tail import TAILS, BatchIndices, Tail, redeal

__all__ = ["BatchIndices", "DistributedBatchSampler", "MultipackBatchSampler"]

_logger = logging.getLogger(__name__)


class DistributedBatchSampler(EpochSampler):
    """This rank's share of the batches of any batch sampler: micro-step s gives rank r batch s * num_replicas + r.

    All ranks have the same number of batches, always, and none needs to ask another.

    Args:
        batch_sampler: a MultipackBatchSampler, or any batch sampler that yields the same order on every rank.
        num_replicas, rank: number of ranks and this one; None to take them from the process group or from torchrun.
        tail: what becomes of batches that do not fill a last micro-step. "split" re-deals their sequences so that every
            rank gets some, nothing dropped or repeated (only with fewer sequences than ranks are some repeated, and count
            for nothing); "pad" repeats batches that count for nothing; "drop" leaves them out; "error" refuses.
        accumulate: micro-steps of an optimizer step, inside which `balance` may deal.
        balance: "none", "micro_step" (FSDP, ZeRO-3) or "step" (DDP, ZeRO-1/2); see `multipack.order.balance.deal`.
        balance_window: optimizer steps over which batches of like cost are spread; above 1 changes which sequences a step
            holds.
        hidden_size: of the model, for the cost of attention.

    Raises:
        ValueError: a rank would get no batch, or ranks could not agree; names the numbers and what would work.
    """

    def __init__(
        self,
        batch_sampler: MultipackBatchSampler | Iterable[list[int]],
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        tail: Tail = "split",
        accumulate: int = 1,
        balance: BalanceMode = "none",
        balance_window: int = 1,
        hidden_size: int = 4096,
    ) -> None:
        super().__init__()
        check_choice("tail", tail, TAILS)
        check_choice("balance", balance, BALANCE_MODES)
        self._discovered = rank is None or num_replicas is None
        self.rank, self.num_replicas = rank_and_world_size(rank, num_replicas)
        self.batch_sampler = batch_sampler
        self.tail: Tail = tail
        self.accumulate = whole_number("accumulate", accumulate, 1)
        self.balance: BalanceMode = balance
        self.balance_window = whole_number("balance_window", balance_window, 1)
        self.hidden_size = whole_number("hidden_size", hidden_size, 1)
        if balance == "none" and self.balance_window > 1:
            raise ValueError(
                f"balance_window is {balance_window} but balance is 'none': choose 'micro_step' or 'step'."
            )
        self.drop_last = tail == "drop"
        if not isinstance(batch_sampler, MultipackBatchSampler):
            if isinstance(batch_sampler, DistributedBatchSampler):
                raise TypeError(
                    "the batch sampler is already dealt to ranks: each rank would get a share of its share."
                )
            check_foreign(batch_sampler, balance)
        self._check_not_empty()

    @property
    def capacity(self) -> int | None:
        """Token slots of a bin; None when the wrapped sampler does not pack."""
        return self.batch_sampler.capacity if isinstance(self.batch_sampler, MultipackBatchSampler) else None

    @property
    def is_resumable(self) -> bool:
        """Whether a position can be saved: the wrapped sampler must name its order by the epoch alone."""
        return isinstance(self.batch_sampler, MultipackBatchSampler) or order_follows_epoch(
            self.batch_sampler
        )

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._forward_epoch()

    def __iter__(self) -> Iterator[BatchIndices]:
        check_not_dealt_again(self, self.num_replicas)
        return super().__iter__()

    def __len__(self) -> int:
        return self._micro_steps(self._num_global())

    @property
    def remaining(self) -> int:
        start, micro_step = self._resume
        return self._micro_steps(self._num_global() - start) - micro_step

    @property
    def fingerprint(self) -> str:
        if isinstance(self.batch_sampler, MultipackBatchSampler):
            return self.batch_sampler.fingerprint
        inner = self.batch_sampler
        described = {"batch_sampler": type(inner).__qualname__, "num_batches": self._num_global()}
        for name in ("batch_size", "drop_last"):
            if (value := getattr(inner, name, None)) is not None:
                described[name] = value
        return json.dumps(described, sort_keys=True)

    def state_dict(self) -> dict[str, Any]:
        """Position in the data as plain integers and strings, the same on every rank.

        `batches` counts global batches before the optimizer step (or balance window) that is under way, `micro_steps` what
        was consumed of it. It loads on another number of ranks and with another `accumulate`.

        Raises:
            ValueError: the wrapped sampler draws its order from a random generator, so that no number names a position.
        """
        if not self.is_resumable:
            raise ValueError(
                f"{type(self.batch_sampler).__qualname__} draws its order from a random generator, so a position in it cannot "
                "be saved. Use MultipackBatchSampler, or a sampler with set_epoch."
            )
        start, micro_step = self._origin
        steps = micro_step + self._done
        group = self.num_replicas * self._group_steps
        start, steps = start + steps // self._group_steps * group, steps % self._group_steps
        if self.balance == "none":  # any micro-step is a position in the global order
            start, steps = start + steps * self.num_replicas, 0
        return {
            "version": STATE_VERSION,
            "epoch": self._epoch,
            "batches": start,
            "micro_steps": steps,
            "num_replicas": self.num_replicas,
            "accumulate": self.accumulate,
            "balance": self.balance,
            "balance_window": self.balance_window,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, of this or another number of ranks; the next pass begins there.

        Raises:
            ValueError: the state is of another version or of other data (names what differs), was saved inside a balanced
                optimizer step of other ranks, or leaves batches that tail="error" refuses.
        """
        self.check_fingerprint(state)
        dealing = ("num_replicas", "accumulate", "balance", "balance_window")
        if state.get("micro_steps", 0) and any(state[key] != getattr(self, key) for key in dealing):
            now = {key: getattr(self, key) for key in dealing}
            raise ValueError(
                f"the state was saved {state['micro_steps']} micro-steps inside a balanced optimizer step of "
                f"{ {key: state[key] for key in dealing} }, which {now} deals otherwise: rows would be repeated or lost. "
                "Save after a whole optimizer step, or load with the same dealing."
            )
        self._report_change_of_step(state)
        self.go_to(int(state["epoch"]), int(state["batches"]), int(state.get("micro_steps", 0)))
        self._check_tail(self._resume[0])

    def _report_change_of_step(self, state: dict[str, Any]) -> None:
        """Say, once for all ranks, that an optimizer step now holds more or fewer batches: the learning rate may not fit."""
        before = state.get("num_replicas", self.num_replicas), state.get("accumulate", self.accumulate)
        now = self.num_replicas, self.accumulate
        if self.rank == 0 and before[0] * before[1] != now[0] * now[1]:
            _logger.warning(
                "an optimizer step had %d batches (%d ranks x %d micro-steps) when the state was saved and has %d now "
                "(%d ranks x %d). No row is lost or repeated, but the learning rate was chosen for the other size.",
                *(before[0] * before[1], *before, now[0] * now[1], *now),
            )

    @property
    def _group_steps(self) -> int:
        """Micro-steps among which batches are dealt."""
        return self.accumulate * self.balance_window

    def _batches(self) -> Batches:
        inner = self.batch_sampler
        self._forward_epoch()
        return (
            inner.batches if isinstance(inner, MultipackBatchSampler) else ListedBatches(as_announced(inner))
        )

    def _forward_epoch(self) -> None:
        for target in (self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            set_epoch = getattr(target, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
                return

    def _num_global(self) -> int:
        """Batches of the whole epoch, over all ranks."""
        self._forward_epoch()
        assert isinstance(self.batch_sampler, Sized)
        return len(self.batch_sampler)

    def _micro_steps(self, num_batches: int) -> int:
        """Micro-steps that so many global batches give."""
        whole, rest = divmod(num_batches, self.num_replicas)
        return whole + (rest > 0 and self.tail != "drop")

    def _batches_from(self, start: int, micro_step: int) -> Iterator[BatchIndices]:
        if self._discovered:
            check_rank_unchanged(self.rank, self.num_replicas)
        self._check_tail(start)
        return self._deal_groups(self._batches(), start, micro_step)

    def _deal_groups(self, batches: Batches, start: int, micro_step: int) -> Iterator[BatchIndices]:
        group = self.num_replicas * self._group_steps
        while count := batches.count(start, group):
            yield from self._share(batches, start, count, micro_step)
            start += count
            micro_step = 0

    def _share(self, batches: Batches, start: int, count: int, micro_step: int) -> Iterator[BatchIndices]:
        """This rank's batches of the optimizer step that begins at `start`, from `micro_step` on."""
        if self.balance == "none":
            whole = count // self.num_replicas
            for step in range(micro_step, whole):
                yield batches.batch(start + step * self.num_replicas + self.rank)
            left = list(range(start + whole * self.num_replicas, start + count))
        else:
            costs = batches.costs(start, count, self.hidden_size)
            dealt = deal(
                costs, self.num_replicas, self.balance, accumulate=self.accumulate, window=self.balance_window
            )
            whole = len(dealt)
            for step in range(micro_step, whole):
                yield batches.batch(start + int(dealt[step, self.rank]))
            used = set(dealt.ravel().tolist())
            left = [start + i for i in range(count) if i not in used]
        if left and micro_step <= whole and self.tail != "drop":
            yield self._last(batches, [batches.batch(i) for i in left])

    def _last(self, batches: Batches, left: list[BatchIndices]) -> BatchIndices:
        """This rank's share of batches that do not fill a micro-step."""
        if self.tail == "split":
            return redeal(left, self.num_replicas, batches.length_of)[self.rank]
        if self.rank < len(left):
            return left[self.rank]
        return batches.early(self.rank - len(left)).as_repeat()

    def _has_more(self, start: int, micro_step: int, done: int) -> bool:
        steps = micro_step + done
        start += steps // self._group_steps * self.num_replicas * self._group_steps
        inner = self.batch_sampler
        if isinstance(inner, MultipackBatchSampler):
            self._forward_epoch()
            left = inner.batches.count(start, self.num_replicas * self._group_steps)
        else:
            left = self._num_global() - start
        return steps % self._group_steps < self._micro_steps(left)

    def _check_tail(self, start: int = 0) -> None:
        """Refuse, under "error", batches from `start` on that do not fill a last micro-step."""
        if self.tail == "error" and (left := (self._num_global() - start) % self.num_replicas):
            raise ValueError(
                f"{self._num_global() - start} batches cannot be dealt to {self.num_replicas} ranks evenly: {left} are left over, and tail is "
                f"'error'. Use tail='split', 'pad' or 'drop', or a number of ranks that divides them."
            )

    def _check_not_empty(self) -> None:
        """Refuse to deal nothing: a rank without a batch would train zero steps, and look as if all went well."""
        self._check_tail()
        needed = self.num_replicas if self.tail == "drop" else 1
        inner = self.batch_sampler
        if isinstance(inner, MultipackBatchSampler):
            if inner.batches.count(0, needed) == needed:
                return
            plan = inner.plan
            found = (
                f"{plan.num_rows} sequences of {plan.num_tokens} tokens make {len(plan)} bins of {plan.capacity} tokens, "
                f"{len(inner)} batches of {inner.bins_per_batch}"
            )
        else:
            if self._num_global() >= needed:
                return
            found = f"the batch sampler has {self._num_global()} batches"
        total = self._num_global()
        raise ValueError(
            f"{found}: too few to give {self.num_replicas} ranks (accumulate={self.accumulate}) a batch each with "
            f"tail={self.tail!r}, so every rank would train zero steps. Use at most {total} ranks, a smaller capacity or "
            "batch, or tail='split'."
            if total
            else f"{found}: there is nothing to train on. Check the data set and the batch size."
        )
