"""Pack, deal, collate and prefetch token sequences for language-model training.

TokenDataset -> EpochPlan -> MultipackBatchSampler -> DistributedBatchSampler -> PackedCollator -> Prefetcher -> trainer.
"""

try:
    from multipack import _core as _core
except ImportError as error:
    raise ImportError(
        f"The compiled part of multipack is missing ({error}). In a checkout, run `pip install -e .`; a package that was "
        "installed otherwise is found only from outside the checkout."
    ) from error

from multipack.data.collate import PackedCollator, PaddedCollator
from multipack.data.dataset import Selection, TokenDataset
from multipack.loading.loader import DataLoader, packed_dataloader
from multipack.loading.prefetch import Prefetcher
from multipack.loading.stats import LoaderStats
from multipack.order.balance import batch_cost, deal
from multipack.order.micro_batches import MicroBatch, split_micro_batches
from multipack.order.packing import Packing, lower_bound, pack
from multipack.order.plan import EpochPlan, Forecast, forecast
from multipack.order.sampler import BatchIndices, DistributedBatchSampler, MultipackBatchSampler
from multipack.order.stream import StreamPacker

__version__ = "0.1.0"

__all__ = [
    "BatchIndices",
    "DataLoader",
    "DistributedBatchSampler",
    "EpochPlan",
    "Forecast",
    "LoaderStats",
    "MicroBatch",
    "MultipackBatchSampler",
    "PackedCollator",
    "Packing",
    "PaddedCollator",
    "Prefetcher",
    "Selection",
    "StreamPacker",
    "TokenDataset",
    "batch_cost",
    "deal",
    "forecast",
    "lower_bound",
    "pack",
    "packed_dataloader",
    "split_micro_batches",
]
