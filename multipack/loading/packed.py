"""Data set, samplers, collator and loader in one call."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.loading.loader import DataLoader
from multipack.loading.together import groups_of
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler


def packed_dataloader(source: Any, capacity: int, **options: Any) -> DataLoader[dict[str, Any]]:
    """Packed batches of this rank's share of `source`: data set, samplers, collator and loader in one call.

    Args:
        source: a TokenDataset, or anything that one reads.
        capacity: token slots of a bin; a batch has `bins_per_batch` of them.
        options: any argument of the parts, each of which goes to the part that takes it: of TokenDataset
            (`column`, `columns`, `max_length`, `overlong`, ...), of MultipackBatchSampler (`bins_per_batch`,
            `shuffle`, `seed`, `method`, `drop_last`, `window`, ...), of DistributedBatchSampler (`tail`,
            `accumulate`, `balance`, `hidden_size`, `rank`, `num_replicas`, ...), of PackedCollator (`layout`,
            `pad_to`, `align_to`, `return_indices`, ...), and of DataLoader (`num_workers`,
            `prefetch_batches`, `device`, `pin_memory`, ...).

    `together` may be the name of a column: rows with equal values share a bin, and `batch["group"]` numbers
    them; given as an array it holds a key for each row of the source. `max_length` is `capacity` where it is
    not given (None under method="concat", which cuts rows itself), and `num_workers` is 1. The loader's `len`
    is exact, and the same on every rank.

    Raises:
        TypeError: an option that no part takes; names the nearest one.
        ValueError: from those parts; or options that say how to read a source are given beside a
            TokenDataset.
    """
    data, sampler, dealing, collate, loader = _by_part(options)
    if isinstance(source, TokenDataset):
        if data:
            raise ValueError(
                f"{', '.join(sorted(data))} say how to read a source, but this TokenDataset is read already: "
                "give them to TokenDataset, or pass its source."
            )
        dataset = source
    else:
        bound = None if sampler.get("method") == "concat" else capacity
        dataset = TokenDataset(source, **{"max_length": bound} | data)
    if sampler.get("together") is not None:
        sampler["together"] = groups_of(dataset, sampler["together"])
    batch_sampler = MultipackBatchSampler(
        dataset.lengths, capacity, **{"shuffle_block": dataset.shuffle_block} | sampler
    )
    return DataLoader(
        dataset,
        batch_sampler=DistributedBatchSampler(batch_sampler, **dealing),
        collate_fn=PackedCollator(capacity=capacity, **collate),
        **{"num_workers": 1} | loader,
    )


def _by_part(options: dict[str, Any]) -> list[dict[str, Any]]:
    """The options of each part, in the order of `PARTS`; an option that two of ours take goes to both."""
    taken = [names_of(part) for part in PARTS]
    unknown = [name for name in options if not any(name in names for names in taken)]
    if unknown:
        known = sorted(set().union(*taken))
        nearest = difflib.get_close_matches(unknown[0], known, 1)
        raise TypeError(
            f"packed_dataloader takes no option {unknown[0]!r}"
            + (f"; did you mean {nearest[0]!r}?" if nearest else f": it takes {', '.join(known)}.")
        )
    return [{name: value for name, value in options.items() if name in names} for names in taken]


def names_of(part: Callable[..., Any]) -> frozenset[str]:
    """Options that a part of `packed_dataloader` takes."""
    names = frozenset(inspect.signature(part).parameters) - _MADE_HERE
    return names - _OF_THE_SAMPLER if part is DataLoader else names


PARTS: tuple[Callable[..., Any], ...] = (
    TokenDataset,
    MultipackBatchSampler,
    DistributedBatchSampler,
    PackedCollator,
    DataLoader,
)

_MADE_HERE = frozenset(
    {
        "source",
        "lengths",
        "capacity",
        "batch_sampler",
        "dataset",
        "collate_fn",
        "sampler",
        "batch_size",
        "generator",
    }
)
_OF_THE_SAMPLER = frozenset({"shuffle", "drop_last"})
