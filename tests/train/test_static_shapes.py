"""`pad_to_sequence_len` with `max_sequences_per_bin`: batches of one shape, in training and in validation,
tails included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from multipack.data.dataset import TokenDataset
from multipack.train.config import TrainConfig
from multipack.train.windows import training_loader, validation_loader, windows

LENGTHS = np.random.default_rng(0).integers(1, 17, 101)
CPU = torch.device("cpu")


def rows() -> TokenDataset:
    offsets = np.concatenate(([0], LENGTHS.cumsum()))
    return TokenDataset((np.ones(offsets[-1], np.int32), offsets))


def config(**more: Any) -> TrainConfig:
    return TrainConfig(sequence_len=32, micro_batch_size=3, num_epochs=2, pad_to_sequence_len=True, **more)


def batches(of: TrainConfig) -> list[dict[str, Any]]:
    training = training_loader(of, rows(), pad_token_id=0, hidden_size=8, device=CPU)
    validation = validation_loader(of, rows(), pad_token_id=0, device=CPU)
    return [batch for window in windows(training, of) for batch in window.batches] + list(validation)


def shapes(batch: dict[str, Any]) -> tuple[Any, ...]:
    tensors = tuple(
        sorted((name, tuple(v.shape)) for name, v in batch.items() if isinstance(v, torch.Tensor))
    )
    return *tensors, batch["max_length_q"]


@pytest.mark.parametrize("log_rows", [False, True])
def test_all_batches_have_one_shape_and_every_row_is_there(log_rows: bool) -> None:
    found = batches(config(max_sequences_per_bin=4, log_rows=log_rows))
    assert len({shapes(batch) for batch in found}) == 1
    (_, size) = next(pair for pair in shapes(found[0]) if pair[0] == "cu_seq_lens_q")
    assert (size, found[0]["max_length_q"]) == ((3 * (4 + 1) + 1,), 32)
    assert sum(batch["num_tokens"] for batch in found) == 3 * LENGTHS.sum()
    assert sum(batch["num_sequences"] for batch in found) == 3 * len(LENGTHS)


def test_without_a_limit_shapes_differ() -> None:
    assert len({shapes(batch) for batch in batches(config())}) > 1


def test_the_limit_alone_bounds_the_rows_of_a_bin() -> None:
    of = TrainConfig(sequence_len=32, micro_batch_size=1, max_sequences_per_bin=2)
    assert max(batch["num_sequences"] for batch in batches(of)) == 2
