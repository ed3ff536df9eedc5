"""Rows of Arrow data: parquet and Arrow files, and folders of `save_to_disk`.

A table has one set of keys for all structs of a column and fills the others with nulls; whoever reads rows
takes a null for an absent key, so that a row is the same in whatever kind of file it came.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_Decode = Callable[[Any], Any]


def parquet_rows(path: Path, size: int) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=size):
            yield from batch_rows(batch)


def arrow_rows(path: Path, size: int) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow stream or file."""
    with pa.memory_map(str(path)) as file:
        try:
            table = pa.ipc.open_stream(file).read_all()
        except pa.ArrowInvalid:
            table = pa.ipc.open_file(file).read_all()
        for batch in table.to_batches(max_chunksize=size):
            yield from batch_rows(batch)


def saved_rows(path: Path, size: int) -> Iterator[dict[str, Any]]:
    """The rows of a folder that `save_to_disk` wrote, in the order of its selection.

    Raises:
        ValueError: the package datasets is missing.
    """
    saved = open_saved(path)
    if saved is not None:
        yield from dataset_rows(saved, size)


def open_saved(path: Path) -> Any | None:
    """The `datasets.Dataset` of a folder; None for one without rows, which datasets writes and cannot read.

    Raises:
        ValueError: the package datasets is missing.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{path} needs the package datasets: pip install 'multipack[data]'.") from error
    if not json.loads((path / "state.json").read_text(encoding="utf-8"))["_data_files"]:
        return None
    return datasets.load_from_disk(str(path))


def dataset_rows(dataset: Any, size: int) -> Iterator[dict[str, Any]]:
    """The rows of a `datasets.Dataset` as its table holds them: no image is opened, no value is converted."""
    tables = dataset.with_format("arrow")
    for first in range(0, len(dataset), size):
        table = tables[first : first + size]
        for batch in table.to_batches():
            yield from batch_rows(batch)


def batch_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch. Values that are stored as JSON are what the JSON says."""
    batch.validate(full=True)  # offsets of a damaged file point anywhere
    names = batch.schema.names
    if len(set(names)) != len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise pa.ArrowInvalid(f"it has two columns named {twice!r}")
    columns = []
    for field in batch.schema:
        values = batch.column(field.name).to_pylist()
        decode = _decoder(field.type)
        columns.append(values if decode is None else [decode(value) for value in values])
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _decoder(kind: pa.DataType) -> _Decode | None:
    """Opens what is JSON somewhere inside values of this type; None: nothing is."""
    if isinstance(kind, pa.JsonType):
        return lambda value: json.loads(value) if isinstance(value, str) else value
    if pa.types.is_struct(kind):
        inside = {field.name: decode for field in kind if (decode := _decoder(field.type)) is not None}
        return (lambda value: _decoded_struct(value, inside)) if inside else None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        decode = _decoder(kind.value_type)
        return (
            None if decode is None else (lambda value: None if value is None else [decode(v) for v in value])
        )
    return None


def _decoded_struct(value: dict[str, Any] | None, inside: dict[str, _Decode]) -> dict[str, Any] | None:
    if value is None:
        return None
    return {key: inside[key](item) if key in inside else item for key, item in value.items()}
