"""Tokenise once, train often: a cache of token ids and labels as memory-mapped Arrow, one folder for each source.

The folder's name is a digest of everything that its content depends on: the bytes of the data, the tokenizer's files, the format
and its options. A folder appears by one rename when it is complete, so a killed run leaves nothing that another run would take
for data. Whoever holds the lock beside it writes; the other ranks wait for them and then read, with no process group needed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from filelock import FileLock, Timeout
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from multipack.data.dataset import TokenDataset
from multipack.train.config import DatasetConfig, TrainConfig
from multipack.train.data.formats import Encoded, choose_format, encode
from multipack.train.data.sources import open_source, source_digest
from multipack.train.data.tokenizer import load_tokenizer, tokenizer_digest

logger = logging.getLogger(__name__)

_LAYOUT = 1  # goes up when the same inputs give another content
_BATCH_ROWS = 256
_SCHEMA = pa.schema({"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32())})
_SHOW_AFTER_S = 3.0


class PreparedData(NamedTuple):
    """What a trainer reads: token columns `input_ids` and `labels`, both memory-mapped."""

    train: TokenDataset
    validation: TokenDataset | None
    tokenizer: PreTrainedTokenizerBase
    folders: tuple[Path, ...]

    def __str__(self) -> str:
        """One line: rows, tokens, the longest row, and where the tokens lie."""
        parts = [f"training {_size(self.train)}"]
        if self.validation is not None:
            parts.append(f"validation {_size(self.validation)}")
        return " | ".join([*parts, "tokens in " + ", ".join(str(folder) for folder in self.folders)])


def prepare_data(config: TrainConfig) -> PreparedData:
    """Tokenise the configured data, or find it tokenised, and split off the validation rows.

    Every rank calls this; those that come second wait up to `prepare_timeout_s` for the one that writes.

    Raises:
        ValueError: the data, its format or the split is impossible; the message names the source.
        TimeoutError: another process did not finish in time.
    """
    tokenizer = load_tokenizer(config)
    folders = tuple(_prepared(source, config, tokenizer) for source in config.sources)
    rows = datasets.concatenate_datasets(
        [datasets.Dataset.from_file(str(folder / "rows.arrow")) for folder in folders]
    )
    train_ids, validation_ids = split_rows(len(rows), config.val_set_size, config.seed)
    train = _tokens(rows.select(train_ids) if validation_ids.size else rows, config, "training")
    validation = _tokens(rows.select(validation_ids), config, "validation") if validation_ids.size else None
    return PreparedData(train, validation, tokenizer, folders)


def split_rows(
    num_rows: int, val_set_size: float, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Draw validation rows at random.

    Args:
        num_rows: rows in all.
        val_set_size: a share below 1 (rounded to whole rows) or a count; 0 draws none.
        seed: of the draw; the same seed and size draw the same rows on every machine.

    Returns:
        Row ids for training and for validation, both ascending: disjoint, together every row.

    Raises:
        ValueError: one of the two would be empty.
    """
    if val_set_size == 0:
        return np.arange(num_rows), np.empty(0, np.int64)
    count = round(val_set_size * num_rows) if val_set_size < 1 else int(val_set_size)
    if not 0 < count < num_rows:
        raise ValueError(
            f"val_set_size {val_set_size} takes {count} of {num_rows} rows, which leaves none for "
            f"{'validation' if count == 0 else 'training'}. Give a size between 1 and {num_rows - 1} rows, or 0 for no validation."
        )
    order = np.random.RandomState(seed).permutation(num_rows)  # numpy keeps this generator's stream for ever
    return np.sort(order[count:]), np.sort(order[:count])


def _tokens(rows: datasets.Dataset, config: TrainConfig, purpose: str) -> TokenDataset:
    try:
        tokens = TokenDataset(rows, max_length=config.sequence_len, overlong=config.overlong)
    except ValueError as error:
        raise ValueError(
            f"{purpose}: {error} Here max_length is the key sequence_len, and overlong is a key too."
        ) from error
    if len(tokens) == 0:
        raise ValueError(
            f"{purpose}: none of {len(rows)} rows is left ({tokens.report}). Raise sequence_len, or choose another overlong."
        )
    return tokens


def _size(tokens: TokenDataset) -> str:
    num_tokens = int(tokens.lengths.sum(dtype=np.int64))
    return f"{len(tokens):,} rows, {num_tokens:,} tokens, the longest {int(tokens.lengths.max()):,}"


def _prepared(source: DatasetConfig, config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The complete folder of one source, written now if it is not there."""
    root = Path(config.dataset_prepared_path)
    recipe = {
        "layout": _LAYOUT,
        "data": source_digest(source, config.sequence_len),
        "tokenizer": tokenizer_digest(tokenizer),
        "type": source.type,
        "field": source.field,
        "field_messages": source.field_messages,
        "train_on_inputs": config.train_on_inputs,
    }
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:24]
    folder = root / key
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        with _sole_writer(root / f"{key}.lock", config.prepare_timeout_s):
            if not folder.exists():
                _write_folder(folder, recipe, source, config, tokenizer)
    _check_complete(folder)
    return folder


def _sole_writer(path: Path, timeout_s: float) -> FileLock:
    """Take the lock of a cache folder; the operating system frees it when its holder dies."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=min(_SHOW_AFTER_S, timeout_s))
    except Timeout:
        logger.info("another process is tokenising; waiting up to %.0f s for it", timeout_s)
        try:
            lock.acquire(timeout=timeout_s)
        except Timeout:
            raise TimeoutError(
                f"{path} was held by another process for {timeout_s:.0f} s. If it still works, raise prepare_timeout_s or run `prepare` first."
            ) from None
    return lock


def _write_folder(
    folder: Path,
    recipe: dict[str, object],
    source: DatasetConfig,
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Tokenise a source into a folder beside `folder` and rename it; the caller holds the lock."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    scratch = unfinished / "scratch"
    scratch.mkdir(parents=True)
    try:
        rows = open_source(source, config.sequence_len, scratch)
        counts = _write_rows(unfinished / "rows.arrow", rows, source, config, tokenizer)
        del rows
        shutil.rmtree(scratch)
        size = (unfinished / "rows.arrow").stat().st_size
        meta = {"recipe": recipe, "source": source.path, **counts, "bytes": size}
        (unfinished / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        os.rename(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_rows(
    path: Path,
    rows: datasets.Dataset,
    source: DatasetConfig,
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, int]:
    """Write one Arrow stream; returns counts of rows, tokens and tokens that are learnt."""
    counts = {"rows": 0, "tokens": 0, "targets": 0, "rows_without_targets": 0}
    try:
        row_format = choose_format(
            source.type, rows.column_names, field=source.field, field_messages=source.field_messages
        )
        with path.open("wb") as stream, pa.ipc.new_stream(stream, _SCHEMA) as writer:
            for first_row, batch in _batches(rows, source.path):
                encoded = encode(
                    batch, row_format, tokenizer, train_on_inputs=config.train_on_inputs, first_row=first_row
                )
                writer.write_batch(_record_batch(encoded))
                targets = [row.num_targets for row in encoded]
                counts["rows"] += len(encoded)
                counts["tokens"] += sum(len(row.input_ids) for row in encoded)
                counts["targets"] += sum(targets)
                counts["rows_without_targets"] += targets.count(0)
            stream.flush()
            os.fsync(stream.fileno())
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source.path}: {error}") from error
    if counts["targets"] == 0:
        raise ValueError(
            f"{source.path}: none of its {counts['rows']} rows has a token to learn. Check its format, or set "
            "train_on_inputs: true."
        )
    if counts["rows_without_targets"]:
        logger.warning(
            "%s: %d of %d rows have no token to learn; they cost compute only",
            source.path,
            counts["rows_without_targets"],
            counts["rows"],
        )
    return counts


def _record_batch(rows: list[Encoded]) -> pa.RecordBatch:
    columns = [[row.input_ids for row in rows], [row.labels for row in rows]]
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA
    )


def _batches(rows: datasets.Dataset, name: str) -> Iterator[tuple[int, dict[str, list[object]]]]:
    """First row and columns of one batch after another, with a progress bar on long jobs."""
    with tqdm(
        total=len(rows), desc=f"tokenise {name}", unit=" rows", delay=_SHOW_AFTER_S, dynamic_ncols=True
    ) as bar:
        for first_row in range(0, len(rows), _BATCH_ROWS):
            batch = rows[first_row : first_row + _BATCH_ROWS]
            yield first_row, batch
            bar.update(min(_BATCH_ROWS, len(rows) - first_row))


def _check_complete(folder: Path) -> None:
    """A folder that was damaged after it was complete is an error, not data."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        found, wanted = (folder / "rows.arrow").stat().st_size, meta["bytes"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} is damaged ({error}). Delete it; it is made again.") from error
    if found != wanted:
        raise ValueError(
            f"{folder}/rows.arrow has {found} bytes, not {wanted}: it is damaged. Delete the folder; it is made again."
        )
