"""Pack, deal, collate and prefetch token sequences for language-model training.

TokenDataset -> EpochPlan -> MultipackBatchSampler -> DistributedBatchSampler -> PackedCollator -> Prefetcher -> trainer.
"""

try:
    from multipack import _core as _core
except ImportError as error:
    error.add_note(
        "The compiled part of multipack is missing. In a checkout, run `pip install -e .`; an installed package is only "
        "found from outside the checkout."
    ) if hasattr(error, "add_note") else None
    raise

from multipack.balance import batch_cost, deal
from multipack.packing import Packing, lower_bound, pack
from multipack.plan import EpochPlan, Forecast, forecast
from multipack.sampler import BatchIndices, DistributedBatchSampler, MultipackBatchSampler

__version__ = "0.1.0"

__all__ = [
    "BatchIndices",
    "DistributedBatchSampler",
    "EpochPlan",
    "Forecast",
    "MultipackBatchSampler",
    "Packing",
    "batch_cost",
    "deal",
    "forecast",
    "lower_bound",
    "pack",
]
