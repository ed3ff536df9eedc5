"""Offsets and numbers of elements that 32 bits cannot count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from multipack.data.collate import PackedCollator
from multipack.data.dataset import Selection, TokenDataset


def sparse_file(path: Path, dtype: str, size: int) -> np.memmap:
    """A file of zeros that takes no room on the disk."""
    with path.open("wb") as file:
        file.truncate(size * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype, "r+", shape=(size,))


@pytest.mark.report("huggingface/datasets#615")
def test_more_elements_than_32_bits_count() -> None:
    """The report's element type is null, whose elements are nulls and hence an error here; bits need little
    memory as well."""
    elements = 1_000_000_000
    bits = np.zeros(2 * elements // 8, np.uint8)
    bits[-1] = 0b10100000  # the last eight elements of each chunk: 0, 0, 0, 0, 0, 1, 0, 1
    values = pa.Array.from_buffers(pa.bool_(), 2 * elements, [None, pa.py_buffer(bits)], null_count=0)
    chunk = pa.ListArray.from_arrays(pa.array([0, elements, 2 * elements], pa.int32()), values)
    column = pa.chunked_array([chunk, chunk])
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        column.combine_chunks()
    dataset = TokenDataset(pa.table({"input_ids": column}))
    assert dataset.lengths.tolist() == [elements] * 4
    assert dataset.report.num_tokens == 4_000_000_000
    # The last tokens of row 3, which are elements 3,999,999,992 and on.
    tails = TokenDataset(pa.table({"input_ids": column}), max_length=elements - 8, overlong="split")
    batch = PackedCollator()(tails.__getitems__([7]))
    assert batch["input_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 0, 1]]


@pytest.mark.report("NVIDIA/Megatron-LM#1672")
def test_offsets_beyond_four_gigabytes(tmp_path: Path) -> None:
    # Row 1 begins at byte 2 * 2,000,000,000 = 4,000,000,000, which int32 would call -294,967,296.
    values = sparse_file(tmp_path / "tokens", "uint16", 2_000_000_005)
    values[-5:] = [1, 2, 3, 4, 65535]
    lengths = np.array([2_000_000_000, 5], np.int32)
    dataset = TokenDataset((values, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))))
    assert dataset.lengths.tolist() == [2_000_000_000, 5]
    assert dataset.report.num_tokens == 2_000_000_005
    assert dataset[1]["input_ids"].tolist() == [1, 2, 3, 4, 65535]
    assert PackedCollator()(dataset.__getitems__([1]))["input_ids"].tolist() == [[1, 2, 3, 4, 65535]]


@pytest.mark.report("vllm-project/vllm#16806")
def test_row_times_stride_beyond_int32(tmp_path: Path) -> None:
    # Row 598 of stride 3,600,000 begins at 2,152,800,000; int32 makes that -2,142,167,296.
    stride = 3_600_000
    values = sparse_file(tmp_path / "tokens", "uint8", 599 * stride)
    values[598 * stride : 598 * stride + 3] = [7, 8, 9]
    dataset = TokenDataset((values, np.arange(600) * stride), max_length=3, overlong="truncate")
    assert dataset[598]["input_ids"].tolist() == [7, 8, 9]
    # As many bins of that capacity as rows would need more slots than int32 boundaries can name: an error, no
    # wrap.
    selection = Selection(dataset, np.arange(599), range(600), repeated=False)
    with pytest.raises(ValueError, match=r"2156400000 slots in one batch are above 2\^31 - 1"):
        PackedCollator(layout="rows", capacity=stride)(selection)
