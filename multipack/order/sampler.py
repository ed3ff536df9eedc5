"""The public samplers: the global order of packed bins, and one rank's share of an order.

The one rule: neither reads more than its inputs; `OrderSampler` says what they share.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import ArrayLike

from multipack.distributed import data_ranks
from multipack.frameworks import check_not_dealt_again
from multipack.order.balance import BalanceMode
from multipack.order.batch import BatchIndices, Place
from multipack.order.concat import Boundaries, ConcatPlan, check_documents, check_unlimited
from multipack.order.dealing import Dealing, Tail
from multipack.order.groups import Groups
from multipack.order.listed import ListedOrder
from multipack.order.order_sampler import OrderSampler
from multipack.order.orders import BinOrder, Order
from multipack.order.packing import PackMethod
from multipack.order.plan import EpochPlan
from multipack.order.saved import check_fingerprint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_OLD_BALANCE = {"sorted": "micro_step", "lpt": "step"}  # names in states saved before they were renamed

_logger = logging.getLogger(__name__)


class MultipackBatchSampler(OrderSampler):
    """Batches of packed sequences in the global order of a plan; knows nothing of ranks.

    Args:
        lengths: token counts of the rows, shape [num_rows], each in 1..capacity.
        capacity: token slots of a bin.
        bins_per_batch: bins that one rank collates at once.
        method: as for `EpochPlan`; or "concat", which lays rows end to end and cuts bins anywhere, see
            `ConcatPlan`. Lengths may then be above the capacity.
        boundaries: under "concat", what attention sees: each "document", or the "bin". For `balance` alone;
            the collator's makes it.
        shuffle, seed, window, shuffle_block, max_sequences_per_bin, together, align_to: as for `EpochPlan`.
        drop_last: leave out a last batch of fewer than `bins_per_batch` bins.

    Raises:
        TypeError: a number is no whole number.
        ValueError: there is no row or no batch, or a length is outside 1..capacity; see `EpochPlan`.
    """

    deals_to_ranks = False

    def __init__(
        self,
        lengths: ArrayLike,
        capacity: int,
        *,
        bins_per_batch: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        method: PackMethod | Literal["concat"] = "auto",
        boundaries: Boundaries = "document",
        drop_last: bool = False,
        max_sequences_per_bin: int | None = None,
        window: int | None = None,
        shuffle_block: int = 1,
        together: Groups | ArrayLike | None = None,
        align_to: int = 1,
    ) -> None:
        shared: dict[str, Any] = dict(seed=seed, shuffle=shuffle, window=window, shuffle_block=shuffle_block)
        plan: EpochPlan | ConcatPlan
        if method == "concat":
            check_unlimited(max_sequences_per_bin, together, align_to)
            plan = ConcatPlan(lengths, capacity, boundaries=boundaries, **shared)
        else:
            check_documents(boundaries)
            plan = EpochPlan(
                lengths,
                capacity,
                method=method,
                max_sequences_per_bin=max_sequences_per_bin,
                together=together,
                align_to=align_to,
                **shared,
            )
        if plan.num_rows == 0:
            raise ValueError(
                "there are no sequences to pack: every epoch would be empty and training would do nothing. "
                "Check the data set and what its over-long policy dropped."
            )
        order = BinOrder(plan, bins_per_batch, drop_last)
        if not order.has(0):
            raise ValueError(
                f"{len(plan)} bins do not fill one batch of bins_per_batch={bins_per_batch}, and drop_last "
                f"leaves out the rest: every epoch would be empty. Use bins_per_batch <= {len(plan)}, or "
                "drop_last=False."
            )
        super().__init__(order, Dealing())
        self.bins_per_batch = order.bins_per_batch
        self.drop_last = order.drop_last

    @property
    def plan(self) -> EpochPlan | ConcatPlan:
        """The plan of the current epoch."""
        assert isinstance(self.order, BinOrder)
        return self.order.plan

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place; the next pass begins there.

        Raises:
            ValueError: the state is of another version or of other data (names what differs), or was saved
                inside a balanced optimizer step of several ranks.
        """
        check_fingerprint(state, self.fingerprint)
        if state.get("micro_steps", 0):
            raise ValueError(
                f"the state was saved {state['micro_steps']} micro-steps inside a balanced optimizer step of "
                f"{state['num_replicas']} ranks, and without ranks those batches are unknown: rows would be "
                "repeated. Load it into the DistributedBatchSampler that saved it, or save after a whole "
                "optimizer step."
            )
        super().load_state_dict(state)


class DistributedBatchSampler(OrderSampler):
    """This rank's share of the batches of any batch sampler, as many on every rank, without communication.

    Six batches and a rest on two ranks, `accumulate=2`, `tail="split"`; the seventh batch holds rows 8 and 9:
    ```
    global order    0   1   2   3   4   5   {8, 9}
    rank 0          0       2       4       {8}
    rank 1              1       3       5   {9}
    micro-step      0       1       2       3
    optimizer step  0               1
    ```

    Args:
        batch_sampler: a MultipackBatchSampler, an order of rows or bins, or any batch sampler that yields the
            same order on every rank.
        num_replicas, rank: number of ranks and this one; None to take them from the process group or from
            torchrun.
        mesh, group: the data-parallel dimension(s) of a DeviceMesh, such as mesh["dp"], or the data-parallel
            process group, in the place of these numbers: ranks that compute one model replica together then
            get the same batches.
        tail: what becomes of batches that do not fill a last micro-step. "split" cuts them so that every rank
            gets some of their sequences, nothing dropped or repeated (only with fewer sequences than ranks
            are some repeated, and count for nothing); "pad" repeats batches that count for nothing; "drop"
            leaves them out and counts them; "error" refuses.
        accumulate: micro-steps of an optimizer step, inside which `balance` may deal.
        balance: "none"; "micro_step" gives the ranks batches of like cost in every micro-step (FSDP, ZeRO-3);
            "step" gives them like sums over an optimizer step (DDP, ZeRO-1/2). Neither changes which
            sequences a step holds.
        balance_window: optimizer steps over which batches of like cost are spread; above 1 changes which
            sequences a step holds.
        hidden_size: of the model, for the cost of attention.

    Raises:
        ValueError: a rank would get no batch, or ranks could not agree; names the numbers and what would
            work. Also where ranks share a model replica (tensor, context, sequence or pipeline parallel) and
            nothing says which share they take.
    """

    deals_to_ranks = True

    def __init__(
        self,
        batch_sampler: MultipackBatchSampler | Order | Iterable[list[int]],
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        tail: Tail = "split",
        accumulate: int = 1,
        balance: BalanceMode = "none",
        balance_window: int = 1,
        hidden_size: int = 4096,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.ranks = data_ranks(rank, num_replicas, mesh=mesh, group=group)
        self.rank, self.num_replicas = self.ranks.rank, self.ranks.num_replicas
        dealing = Dealing(
            num_replicas=self.num_replicas,
            rank=self.rank,
            tail=tail,
            accumulate=accumulate,
            balance=balance,
            balance_window=balance_window,
            hidden_size=hidden_size,
        )
        super().__init__(_order_of(batch_sampler), dealing)
        self.batch_sampler = batch_sampler
        self.tail, self.balance = dealing.tail, dealing.balance
        self.accumulate, self.balance_window = dealing.accumulate, dealing.balance_window
        self.drop_last = tail == "drop"
        dealing.check_not_empty(self.order)
        if balance != "none":
            self.order.costs(0, 1, dealing.hidden_size)  # refused where lengths are unknown

    @property
    def is_resumable(self) -> bool:
        """Whether a place can be saved: the wrapped sampler must name its order by the epoch alone."""
        return self._order.is_resumable

    def read(self, place: Place | None = None) -> Iterator[BatchIndices]:
        """This rank's batches of an epoch from `place` on, or those of the next pass. Looking at them moves
        nothing."""
        self.ranks.check_unchanged()
        return super().read(place)

    def __iter__(self) -> Iterator[BatchIndices]:
        check_not_dealt_again(self, self.num_replicas)
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer stands: plain integers and strings, the same on every rank.

        `batches` counts global batches before the optimizer step (or balance window) that is under way,
        `micro_steps` what was consumed of it. It loads on another number of ranks and with another
        `accumulate`.

        Raises:
            ValueError: the wrapped sampler draws its order from a random generator, so that no number names a
                place in it.
        """
        if not self.is_resumable:
            raise ValueError(
                f"{type(self.batch_sampler).__qualname__} draws its order from a random generator, so a "
                "place in it cannot be saved. Use MultipackBatchSampler, or a sampler with set_epoch."
            )
        return {**super().state_dict(), "micro_steps": self.cursor.mark.micro_steps, **self._dealt()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place, of this or another number of ranks; the next batch is the one that comes
        there.

        Raises:
            ValueError: the state is of another version or of other data (names what differs), was saved
                inside a balanced optimizer step of other ranks, or leaves batches that tail="error" refuses.
        """
        check_fingerprint(state, self.fingerprint)
        now = self._dealt()
        then = {
            key: _OLD_BALANCE.get(state.get(key, value), state.get(key, value)) for key, value in now.items()
        }
        if state.get("micro_steps", 0) and then != now:
            raise ValueError(
                f"the state was saved {state['micro_steps']} micro-steps inside a balanced optimizer step of "
                f"{then}, which {now} deals otherwise: rows would be repeated or lost. Save after a whole "
                "optimizer step, or load with the same dealing."
            )
        super().load_state_dict(state)
        place = self.cursor.mark
        self.dealing.check_tail(self._kept(place.epoch), place.batches)
        self._report_change_of_step(then)

    def _dealt(self) -> dict[str, Any]:
        return {
            "num_replicas": self.num_replicas,
            "accumulate": self.accumulate,
            "balance": self.balance,
            "balance_window": self.balance_window,
        }

    def _report_change_of_step(self, then: dict[str, Any]) -> None:
        """Say, once for all ranks, that an optimizer step now holds more or fewer batches: the learning rate
        may not fit."""
        before = then["num_replicas"] * then["accumulate"]
        now = self.num_replicas * self.accumulate
        if self.rank == 0 and before != now:
            _logger.warning(
                "an optimizer step had %d batches (%d ranks x %d micro-steps) when the state was saved and "
                "has %d now (%d ranks x %d). No row is lost or repeated, but the learning rate was chosen "
                "for the other size.",
                *(before, then["num_replicas"], then["accumulate"], now, self.num_replicas, self.accumulate),
            )


def _order_of(batch_sampler: Any) -> Order:
    if isinstance(batch_sampler, DistributedBatchSampler):
        raise TypeError(
            "the batch sampler is already dealt to ranks: each rank would get a share of its share."
        )
    if isinstance(batch_sampler, MultipackBatchSampler):
        if batch_sampler.skipped:
            raise ValueError(
                "the batch sampler skips steps of its own, which the sampler of ranks would not see: call "
                "skip_steps of the DistributedBatchSampler or of the loader."
            )
        return batch_sampler.order
    return batch_sampler if isinstance(batch_sampler, Order) else ListedOrder.checked(batch_sampler)
