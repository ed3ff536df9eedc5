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

from multipack.balance import batch_cost, deal
from multipack.collate import PackedCollator, PaddedCollator
from multipack.dataset import Selection, TokenDataset
from multipack.loader import DataLoader, packed_dataloader
from multipack.micro_batches import MicroBatch, split_micro_batches
from multipack.packing import Packing, lower_bound, pack
from multipack.plan import EpochPlan, Forecast, forecast
from multipack.prefetch import Prefetcher
from multipack.sampler import BatchIndices, DistributedBatchSampler, MultipackBatchSampler
from multipack.stats import LoaderStats
from multipack.stream import StreamPacker

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
