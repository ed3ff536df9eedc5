"""Pack, deal, collate and prefetch token sequences for language-model training.

TokenDataset -> EpochPlan -> MultipackBatchSampler -> DistributedBatchSampler -> PackedCollator -> Prefetcher
-> trainer.
"""

try:
    from multipack import _core as _core
except ImportError as error:
    raise ImportError(
        f"The compiled part of multipack is missing ({error}). In a checkout, run `pip install -e .`; a "
        "package that was installed otherwise is found only from outside the checkout."
    ) from error

from multipack.data.block_mask import block_mask
from multipack.data.collate import PackedCollator, PaddedCollator
from multipack.data.context import context_slice
from multipack.data.dataset import TokenDataset
from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader
from multipack.loading.stats import LoaderStats
from multipack.loading.steps import optimizer_steps
from multipack.order.forecast import forecast
from multipack.order.micro_batches import split_micro_batches
from multipack.order.packing import pack
from multipack.order.plan import EpochPlan
from multipack.order.sampler import DistributedBatchSampler, MultipackBatchSampler
from multipack.order.stream import StreamPacker

__version__ = "0.1.0"

__all__ = [
    "DataLoader",
    "DistributedBatchSampler",
    "EpochPlan",
    "LoaderStats",
    "MultipackBatchSampler",
    "PackedCollator",
    "PaddedCollator",
    "StreamPacker",
    "TokenDataset",
    "block_mask",
    "context_slice",
    "forecast",
    "optimizer_steps",
    "pack",
    "packed_dataloader",
    "split_micro_batches",
]
