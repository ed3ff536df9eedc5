"""Let ranks with streams of different lengths take the same number of steps.

One small collective before each batch, over a process group of its own, so that it never mixes with the
trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from multipack.order.stream_rows import PackedRows, StreamTail


class Agreement:
    """All ranks must make one, at the same point of the program: making the group is a collective."""

    def __init__(self, timeout: float, members: tuple[int, ...] | None = None) -> None:
        """`timeout`: seconds to wait for the other ranks. `members`: global ranks that agree; None for all.

        Raises:
            ValueError: there is no process group yet.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "several ranks read streams of unknown length, so they must agree when to stop, but there "
                "is no process group. Call torch.distributed.init_process_group first."
            )
        self._timeout = timeout
        self._group = dist.new_group(
            None if members is None else list(members),
            backend="gloo",
            timeout=timedelta(seconds=timeout),
            use_local_synchronization=members is not None,  # the other ranks make groups of their own
        )

    # Invariant: before batch i of a pass every rank is in collective i, with (has a batch i, could repeat an
    # older one).
    def keep_step(
        self, batches: Iterator[PackedRows], tail: StreamTail, *, may_be_empty: bool
    ) -> Iterator[PackedRows]:
        """The same number of batches on every rank: `batches`, then repeats of the last one that count for
        nothing ("pad"), or no more than the shortest rank has ("drop"). `may_be_empty`: a resumed pass may
        find that all ranks had ended.

        Raises:
            ValueError: a rank has no batch at all.
            RuntimeError: another rank did not come within the timeout.
        """
        last: PackedRows | None = None
        while True:
            batch = next(batches, None)
            having, empty = self._count(batch is not None, batch is None and last is None)
            if empty and (having or not may_be_empty):
                raise ValueError(
                    f"{empty} of {dist.get_world_size(self._group)} ranks got no row from the stream: they "
                    "could not take a step. Use fewer ranks, or a source with more rows or shards."
                )
            if having == 0 or (tail == "drop" and having < dist.get_world_size(self._group)):
                return
            if batch is None:
                assert last is not None
                batch = replace(last, repeated=True)
            last = batch
            yield batch

    def _count(self, *flags: bool) -> list[int]:
        """How many ranks say yes to each."""
        counts = torch.tensor(flags, dtype=torch.int64)
        try:
            dist.all_reduce(counts, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"another rank did not ask for its next batch within {self._timeout:g} s, or has ended: "
                f"{error}. Every rank must read the stream as often; a slow source needs a larger timeout."
            ) from error
        return [int(count) for count in counts]
