"""A seeded script that changes its import line keeps its random numbers: those of its rows, its collator and
its loop.

Each script runs beside torch's own loader and must give the same numbers, which are then the same in every
run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dropin_cases import Rows, both, plain
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Sampler

from multipack import DataLoader

# torch with one worker makes two batches ahead, so the loop's own numbers are compared as well.
WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2}]


def loop(loader: Any) -> list[Any]:
    """Batches, and a draw of the loop after each as a model with dropout makes it."""
    return [(plain(batch), torch.nn.functional.dropout(torch.ones(8)).tolist()) for batch in loader]


def seeded(make: Callable[[Any], Any], loader_class: Any) -> list[Any]:
    """Two epochs of a script that seeds everything, and where it leaves the three global generators."""
    torch.manual_seed(0)
    np.random.seed(1)
    random.seed(2)
    loader = make(loader_class)
    epochs = [loop(loader) for _ in range(2)]
    return [*epochs, torch.rand(1).item(), float(np.random.rand()), random.random()]


def random_row(index: int) -> torch.Tensor:
    return torch.rand(3) + index


def random_row_of_numpy(index: int) -> float:
    return index + float(np.random.rand())


def random_row_of_python(index: int) -> float:
    return index + random.random()


def masking(rows: list[int]) -> torch.Tensor:
    """Mask 15 % as collators for masked language models do."""
    batch = torch.tensor(rows)
    return torch.where(torch.bernoulli(torch.full(batch.shape, 0.15)).bool(), -100, batch)


class LazySampler(Sampler[int]):
    """Draws each id from the global generator as it is asked for it."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        for _ in range(40):
            yield int(torch.randint(20, ()))


class LazyBatches(Sampler[list[int]]):
    """Draws each batch from the global generator as it is asked for it."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(10):
            yield torch.randint(20, (3,)).tolist()


class RandomStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(20):
            yield torch.rand(2)


SCRIPTS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "rows augmented by torch": (lambda: Rows(random_row), dict),
    "rows augmented by numpy": (lambda: Rows(random_row_of_numpy), dict),
    "rows augmented by random": (lambda: Rows(random_row_of_python), dict),
    "a shuffle and augmented rows": (lambda: Rows(random_row), lambda: {"shuffle": True}),
    "a masking collator": (lambda: Rows(int), lambda: {"collate_fn": masking, "shuffle": True}),
    "a sampler that draws as it goes": (lambda: range(20), lambda: {"sampler": LazySampler()}),
    "a batch sampler that draws as it goes": (lambda: range(20), lambda: {"batch_sampler": LazyBatches()}),
    "a generator of the loader": (
        lambda: Rows(random_row),
        lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    ),
    "a random stream": (RandomStream, dict),
}


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_seeded_script_keeps_its_numbers(script: str, workers: dict[str, Any]) -> None:
    dataset, arguments = SCRIPTS[script]

    def make(loader_class: Any) -> Any:
        more = arguments()
        size = {} if "batch_sampler" in more else {"batch_size": 4}
        return loader_class(dataset(), **size, **more, **workers)

    ours, torchs = both(lambda loader_class: seeded(make, loader_class))
    assert ours == torchs


def test_transformers_masking_collator_draws_torchs_masks(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(200))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    collator = transformers.DataCollatorForLanguageModeling(
        transformers.BertTokenizerFast(vocab_file=str(tmp_path / "vocab.txt"))
    )
    rows = [{"input_ids": [2, *range(5, 60), 3]} for _ in range(40)]

    def labels(loader_class: Any) -> list[Any]:
        torch.manual_seed(0)
        return loop(batch["labels"] for batch in loader_class(rows, batch_size=4, collate_fn=collator))

    ours, torchs = both(labels)
    assert ours == torchs
    assert labels(DataLoader) == ours


def train(loader_class: Any) -> tuple[list[Any], list[Any]]:
    """Four epochs of a small model with dropout on masked rows; its batches and its weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(101, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 101))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = []
    for _ in range(4):
        for batch in loader_class(Rows(int, 60), batch_size=8, shuffle=True, collate_fn=masking):
            batches.append(batch.tolist())
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch.abs()), batch.abs()).backward()
            optimizer.step()
    return batches, [weights.tolist() for weights in model.parameters()]


def test_seeded_training_without_num_workers_is_equal_in_four_runs() -> None:
    runs = [train(DataLoader) for _ in range(4)]
    assert runs == [train(TorchDataLoader)] * 4


def test_a_reader_may_hand_out_the_same_buffer_each_time() -> None:
    class Reader(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            buffer = torch.empty(3, dtype=torch.long)
            for number in range(8):
                yield buffer.fill_(number)

    ours, torchs = both(lambda loader_class: [int(b[0]) for b in loader_class(Reader(), batch_size=None)])
    assert ours == torchs == list(range(8))


def test_a_collator_may_reuse_its_buffer() -> None:
    buffer = torch.empty(2, dtype=torch.long)

    def fill(rows: list[int]) -> torch.Tensor:
        return buffer.copy_(torch.tensor(rows))

    ours, torchs = both(lambda c: [b.tolist() for b in c(range(8), batch_size=2, collate_fn=fill)])
    assert ours == torchs == [[0, 1], [2, 3], [4, 5], [6, 7]]
