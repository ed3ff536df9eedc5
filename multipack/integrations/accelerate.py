"""accelerate: begin inside an epoch and keep the loader.

`Accelerator.prepare` takes our loaders as they are, since their batches are this rank's already. accelerate's
own `skip_first_batches` would put a plain torch loader in their place: the same batches, but made late, and
the last window of an epoch that `accumulate` does not fill would never be stepped.
"""

from __future__ import annotations

from typing import Any

import accelerate

from multipack.loading.loader import DataLoader
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Let the next pass over `loader` begin `num_batches` of this rank's batches later. No row is read to get
    there.

    Takes the place of accelerate's function of that name, and hands everything to it that is not a loader
    over our samplers. Call `loader.set_epoch` first if the epoch is not the one the loader is in.

    Returns:
        The loader itself; its `len` stays that of a whole epoch.

    Raises:
        ValueError: the epoch has fewer batches left.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or not isinstance(
        sampler, MultipackBatchSampler | DistributedBatchSampler
    ):
        return accelerate.skip_first_batches(loader, num_batches)
    sampler.skip(num_batches)
    return loader
