"""accelerate and Lightning rebuild loaders from their attributes: what they find is what the script gave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dropin_cases import Rows, plain
from loader_cases import keys, token_rows
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from multipack import DataLoader, PackedCollator, TokenDataset, packed_dataloader
from multipack.order.sampler import MultipackBatchSampler


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield accelerate.Accelerator(cpu=True)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


SOURCES: dict[str, Any] = {
    "shuffled rows": lambda: (Rows(lambda i: (i, os.getpid()), 8), {"batch_size": 2, "shuffle": True}),
    "a stream": lambda: (Numbers(), {"batch_size": 2}),
    "rows one by one": lambda: (range(6), {"batch_size": None}),
}


@pytest.mark.parametrize("workers", [None, 0, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_accelerate_rebuilds_with_the_scripts_number_of_workers(
    accelerator: Any, source: str, workers: int | None
) -> None:
    asked = {} if workers is None else {"num_workers": workers}

    def run(loader_class: Any) -> Any:
        torch.manual_seed(0)
        dataset, arguments = SOURCES[source]()
        prepared = accelerator.prepare(loader_class(dataset, **arguments, **asked))
        batches = plain([batch[0] if isinstance(batch, list) else batch for batch in prepared])
        return prepared.num_workers, prepared.prefetch_factor, batches

    assert run(DataLoader) == run(TorchDataLoader)


def test_rows_of_a_rebuilt_loader_are_made_where_torchs_are(accelerator: Any) -> None:
    made_here = []

    def note(index: int) -> int:
        made_here.append(index)
        return index

    list(accelerator.prepare(DataLoader(Rows(note, 8), batch_size=2)))
    assert sorted(made_here) == list(range(8))


def test_accelerate_rebuilds_over_our_own_parts_without_a_process(accelerator: Any) -> None:
    # The thread that our own parts get is no worker process of the script's: accelerate's loader makes
    # batches as they are asked for.
    rows = TokenDataset(token_rows())
    parts = {"batch_sampler": MultipackBatchSampler(rows.lengths, 256), "collate_fn": PackedCollator()}
    loader = DataLoader(rows, **parts)
    assert loader.num_workers == 0 or loader._is_accelerate_prepared
    expected = keys(
        TorchDataLoader(
            rows, batch_sampler=MultipackBatchSampler(rows.lengths, 256), collate_fn=PackedCollator()
        )
    )
    prepared = accelerator.prepare(loader)
    assert prepared.num_workers == 0
    assert keys(prepared) == expected


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_lightning_rebuilds_with_the_scripts_number_of_workers(workers: int | None) -> None:
    data = pytest.importorskip("lightning.pytorch.utilities.data")
    asked = {} if workers is None else {"num_workers": workers}

    def run(loader_class: Any) -> Any:
        loader = loader_class(range(8), batch_size=2, **asked)
        rebuilt = data._update_dataloader(loader, [3, 1, 2])
        assert type(rebuilt) is loader_class
        return rebuilt.num_workers, rebuilt.prefetch_factor, plain(list(rebuilt))

    assert run(DataLoader) == run(TorchDataLoader) == (workers or 0, 2 if workers else None, [[3, 1], [2]])


def test_lightnings_worker_seeding_is_harmless_over_packed_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    # seed_everything(workers=True) sets worker_init_fn on every loader; our own parts draw no random numbers
    # in rows.
    data = pytest.importorskip("lightning.fabric.utilities.data")
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    loader = packed_dataloader(token_rows(), 256, rank=0, num_replicas=1)
    expected = keys(packed_dataloader(token_rows(), 256, rank=0, num_replicas=1))
    data._auto_add_worker_init_fn(loader, rank=0)
    torch.manual_seed(42)
    before = torch.get_rng_state()
    assert keys(loader) == expected
    assert torch.equal(before, torch.get_rng_state())
