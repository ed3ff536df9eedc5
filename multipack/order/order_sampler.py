"""What every sampler is: an order, this rank's share of it, and where the consumer stands.

The one rule: reading is pure, and only a batch that was handed to the consumer moves the cursor, by the mark
it carries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from torch.utils.data import Sampler

from multipack.arguments import whole_number
from multipack.frameworks import EpochForwarder, refuse_rebuilding
from multipack.order.batch import BatchIndices, LeftOut, Place
from multipack.order.cursor import Cursor
from multipack.order.dealing import Dealing
from multipack.order.orders import Order
from multipack.order.saved import STATE_VERSION
from multipack.order.skipped import Skipped, SkippingOrder, as_state, both, from_state, joined

if TYPE_CHECKING:
    from typing_extensions import Self


class OrderSampler(Sampler[list[int]]):
    """What both samplers share: the batches of an order that one rank takes, and the place of their consumer.

    An epoch that was wholly consumed advances to the next one, so forgetting `set_epoch` repeats no data. A
    pass that was broken off begins again; a loaded place is used once, by the next pass.
    """

    batch_size = None
    drop_last: bool
    deals_to_ranks: ClassVar[bool]
    """Whether each rank gets a share of its own; see `frameworks`."""

    def __init__(self, order: Order, dealing: Dealing) -> None:
        self._order = order
        self._skipped: Skipped = {}
        self.dealing = dealing
        self.cursor: Cursor[Place] = Cursor(Place(), _epoch_start)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        refuse_rebuilding(cls, kwargs)
        return super().__new__(cls)

    @property
    def epoch(self) -> int:
        """Epoch of the next batch: names the order of the data."""
        return self.cursor.mark.epoch

    @property
    def order(self) -> Order:
        """The batches of the current epoch over all ranks, also those that `skip_steps` leaves out."""
        return self._order.at(self.epoch)

    @property
    def capacity(self) -> int | None:
        """Token slots of a bin; None where nothing is packed."""
        return self._order.capacity

    @property
    def sampler(self) -> EpochForwarder:
        """An object whose `set_epoch` reaches this sampler: frameworks look for it here."""
        return EpochForwarder(self)

    @property
    def fingerprint(self) -> str:
        """What the order of batches depends on besides epoch and ranks, as canonical JSON."""
        return self.order.fingerprint

    @property
    def remaining(self) -> int:
        """Batches that the next pass will yield."""
        start = self.cursor.start
        return self.dealing.remaining(self._kept(start.epoch), start)

    @property
    def left_out(self) -> LeftOut:
        """Sequences and tokens that the current epoch leaves out over all ranks, because of `drop_last` or
        tail="drop"."""
        return self.dealing.left_out(self._kept(self.epoch))

    def num_batches(self, epoch: int) -> int:
        """Exact number of this rank's batches in an epoch, which is the same on every rank."""
        return self.dealing.micro_steps(len(self._kept(epoch)))

    def __len__(self) -> int:
        return self.num_batches(self.epoch)

    def rows_of(self, step: int, epoch: int | None = None) -> list[list[BatchIndices]]:
        """Row ids of an optimizer step on all ranks. A pure look at the plan: nothing is read or moved.

        Steps are counted from the start of the epoch, with this sampler's ranks and `accumulate`. A run that
        changed those inside the epoch took other steps before the change. Steps that `skip_steps` leaves out
        keep their numbers.

        Args:
            step: optimizer step of the epoch, from 0.
            epoch: its number; None for the current one.

        Returns:
            Batches by micro-step and rank, `answer[micro_step][rank]`: lists of row ids that also name their
            bins, and whether they only repeat others.

        Raises:
            ValueError: the epoch has no such step, `tail` refuses it, or the wrapped sampler draws its order
                from a generator.
        """
        number = whole_number("step", step, 0)
        order = self._named(epoch)
        found = self.dealing.step(order, number)
        if not found:
            raise ValueError(
                f"epoch {order.epoch} has no step {number}: it has "
                f"{self.dealing.optimizer_steps(len(order))} optimizer steps, from 0."
            )
        return found

    def skip_steps(self, steps: Iterable[int], epoch: int | None = None) -> None:
        """Leave optimizer steps of an epoch out: their rows are not read. Call it on every rank.

        Steps are numbered as by `rows_of`, also when others are skipped already, so saying the same twice
        changes nothing. What is left out is kept in the state as global batches, so it stays out on any
        number of ranks. An open pass follows with its next batch; a pass that was broken off resumes where it
        stood.

        Args:
            steps: such as range(4, 7).
            epoch: its number; None for the current one.

        Raises:
            ValueError: the epoch has no such step, it was begun already, nothing of the epoch would be left,
                `balance_window` deals batches over more steps than these, or the wrapped sampler draws its
                order from a generator.
        """
        order = self._named(epoch)
        ranges = self.dealing.batches_of(order, {whole_number("step", step, 0) for step in steps})
        skipped = both(self._skipped, {order.epoch: joined(ranges)})
        mark = self.cursor.mark
        kept = SkippingOrder(order, skipped)
        place = self._moved(self._whole_place(), self._skipped, skipped)
        if not self.dealing.has_more(kept, place if order.epoch == mark.epoch else Place(order.epoch)):
            raise ValueError(
                f"nothing of epoch {order.epoch} would be left after skipping {len(ranges)} ranges of steps: "
                f"a pass would be empty. Skip fewer steps, or go on with set_epoch({order.epoch + 1})."
            )
        self._skipped = skipped
        if order.epoch == mark.epoch:
            self.cursor.go_to(place)

    @property
    def skipped(self) -> list[list[int]]:
        """What `skip_steps` leaves out: epoch, first global batch and the one behind the last, of each
        range."""
        return as_state(self._skipped)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; the epoch it already is in keeps its place, as after
        `load_state_dict`."""
        number = whole_number("epoch", epoch, 0)
        if number != self.epoch:
            self.cursor.restart_at(Place(number))

    def read(self, place: Place | None = None) -> Iterator[BatchIndices]:
        """Batches of an epoch from `place` on, or those of the next pass. Looking at them moves nothing."""
        start = self.cursor.start if place is None else place
        return self.dealing.read(self._kept(start.epoch), start)

    def __iter__(self) -> Iterator[BatchIndices]:
        number, place = self.cursor.begin()
        batches = self.read(place)
        while (batch := next(batches, None)) is not None:
            assert batch.after is not None
            self.cursor.took(number, batch.after)
            yield batch
            if self.cursor.was_interrupted(number):
                number, place = self.cursor.begin()
                batches = self.read(place)

    def skip(self, num_batches: int) -> None:
        """Let the next pass begin so many of this rank's batches later. No row is read to get there.

        Raises:
            ValueError: the epoch has fewer batches left.
        """
        if not 0 <= num_batches <= self.remaining:
            raise ValueError(
                f"cannot skip {num_batches} batches: epoch {self.epoch} has {self.remaining} left for this "
                "rank. Was the number saved with other data or another number of ranks? load_state_dict "
                "resumes on any number of ranks."
            )
        start = self.cursor.start
        self.cursor.go_to(self.dealing.after(self._kept(start.epoch), start, num_batches))

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer stands: plain integers and strings, the same on every rank.

        `batches` counts those that `skip_steps` leaves out too, and `skipped` is only there where it leaves
        out some.
        """
        place = self._whole_place()
        state = {
            "version": STATE_VERSION,
            "epoch": place.epoch,
            "batches": place.batches,
            "fingerprint": self.fingerprint,
        }
        return state | ({"skipped": self.skipped} if self._skipped else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place; the next batch is the one that comes there. Skipped are the steps of the state
        and those of before.

        Raises:
            ValueError: the state is of another version or of other data (names what differs), or was saved
                inside a balanced optimizer step that is dealt otherwise here.
        """
        place = Place(int(state["epoch"]), int(state["batches"]), int(state.get("micro_steps", 0)))
        then = from_state(state.get("skipped", ()))
        skipped = both(self._skipped, then)
        place = self._moved(place, then, skipped)
        self._skipped = skipped
        has_more = self.dealing.has_more(self._kept(place.epoch), place)
        self.cursor.go_to(place if has_more else Place(place.epoch + 1))

    def _named(self, epoch: int | None) -> Order:
        """The whole order of an epoch, where its number names it."""
        order = self._order.at(self.epoch if epoch is None else whole_number("epoch", epoch, 0))
        if not order.is_resumable:
            raise ValueError(
                f"{order}: its order is not named by the epoch alone, so the rows of a step are unknown "
                "before they are read. Use MultipackBatchSampler, or a sampler with set_epoch."
            )
        return order

    def _kept(self, epoch: int) -> SkippingOrder:
        """What is trained of an epoch. Marks count its batches."""
        return SkippingOrder(self._order.at(epoch), self._skipped)

    def _whole_place(self) -> Place:
        """The mark, in batches of the whole epoch."""
        mark = self.cursor.mark
        number = self._kept(mark.epoch).number_of(mark.batches) if mark.batches else 0
        return Place(mark.epoch, number, mark.micro_steps)

    def _moved(self, place: Place, then: Skipped, now: Skipped) -> Place:
        """A place in batches of the whole epoch that was reached with `then` left out, as a mark with `now`
        left out."""
        order = self._order.at(place.epoch)
        before, after = SkippingOrder(order, then), SkippingOrder(order, now)
        begun = place.batches
        if place.micro_steps:
            begun = before.number_of(before.kept_before(begun) + self.dealing.group - 1) + 1
        if before.kept_before(begun) != after.kept_before(begun):
            raise ValueError(
                f"cannot skip steps of epoch {place.epoch} that were begun already: its first {begun} global "
                "batches are trained or under way. Skip later steps, or load a state that was saved before "
                "them."
            )
        return Place(place.epoch, after.kept_before(place.batches), place.micro_steps)


def _epoch_start(place: Place) -> Place:
    return Place(place.epoch)
