"""What users have today, as callables that the benchmarks put beside ours. Each gives the same answer as
ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from transformers import DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

Collate = Callable[[Sequence[int]], dict[str, Any]]


def trl_collator() -> DataCollatorForLanguageModeling:
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)


def trl_collate(dataset: datasets.Dataset) -> Collate:
    """Rows of `datasets` as Python lists (or tensors, if so formatted) through trl's padding-free
    collator."""
    collator = trl_collator()
    return lambda ids: collator(dataset.__getitems__(ids))


def flattening_collate(dataset: datasets.Dataset) -> Collate:
    """Rows of `datasets` through transformers' DataCollatorWithFlattening."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return lambda ids: dict(collator(dataset.__getitems__(ids)))


def numpy_collate(dataset: datasets.Dataset) -> Collate:
    """A careful user's own collator: numpy views on the chunks of the table, one slice copy a row."""
    table = dataset.data.table
    chunks = table.column("input_ids").chunks
    first_rows = np.cumsum([0, *(len(chunk) for chunk in chunks)])
    views = {
        name: [(np.asarray(chunk.offsets), np.asarray(chunk.values)) for chunk in table.column(name).chunks]
        for name in ("input_ids", "labels")
    }

    def collate(ids: Sequence[int]) -> dict[str, Any]:
        parts: dict[str, list[Any]] = {"input_ids": [], "labels": []}
        for row in ids:
            chunk = int(np.searchsorted(first_rows, row, side="right")) - 1
            local = row - first_rows[chunk]
            for name, values_of_row in parts.items():
                offsets, values = views[name][chunk]
                values_of_row.append(values[offsets[local] : offsets[local + 1]])
        lengths = np.array([len(row) for row in parts["input_ids"]])
        boundaries = np.concatenate([[0], np.cumsum(lengths)])
        labels = np.concatenate(parts["labels"], dtype=np.int64)
        labels[boundaries[:-1]] = -100
        positions = np.arange(boundaries[-1]) - np.repeat(boundaries[:-1], lengths)
        numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        cu_seq_lens = torch.from_numpy(boundaries.astype(np.int32))
        return {
            "input_ids": torch.from_numpy(np.concatenate(parts["input_ids"], dtype=np.int64))[None],
            "labels": torch.from_numpy(labels)[None],
            "position_ids": torch.from_numpy(positions)[None],
            "seq_idx": torch.from_numpy(numbers)[None],
            "cu_seq_lens_q": cu_seq_lens,
            "cu_seq_lens_k": cu_seq_lens,
            "max_length_q": int(lengths.max()),
            "max_length_k": int(lengths.max()),
        }

    return collate
