"""Tokenise once, train often: a cache of token ids and labels as memory-mapped Arrow, one folder for each
source.

The folder's name is a digest of everything that its content depends on: the bytes of the data, the
tokenizer's files, the format and its options. A folder appears by one rename when it is complete, so a killed
run leaves nothing that another run would take for data. Whoever holds the lock beside it writes; the other
ranks wait for them and then read, with no process group needed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from filelock import FileLock, Timeout
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from multipack.data.dataset import TokenDataset
from multipack.data.text.encode import RowEncoder
from multipack.data.text.files import Block
from multipack.data.text.formats import choose_format
from multipack.data.text.labels import Encoded
from multipack.train.config import DatasetConfig, TrainConfig
from multipack.train.data.sources import source_blocks, source_digest
from multipack.train.data.tokenizer import load_tokenizer, tokenizer_digest

logger = logging.getLogger(__name__)

_LAYOUT = 2  # goes up when the same inputs give another content
_BATCH_ROWS = 256
_SCHEMA = pa.schema({"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32())})
_SHOW_AFTER_S = 3.0


class PreparedData(NamedTuple):
    """What a trainer reads: token columns `input_ids` and `labels`, both memory-mapped."""

    train: TokenDataset
    validation: TokenDataset | None
    tokenizer: PreTrainedTokenizerBase
    folders: tuple[Path, ...]
    largest_id: int = 0
    """Of all tokens."""

    def check_ids(self, num_embeddings: int) -> None:
        """Raise ValueError for a token that the model's embedding has no row for."""
        if self.largest_id >= num_embeddings:
            raise ValueError(
                f"the data have the token {self.largest_id} and the model has embeddings for "
                f"0..{num_embeddings - 1} only, so the first step would fail. Use the tokenizer that belongs "
                "to the model."
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        parts = [part for part in (self.train, self.validation) if part is not None]
        return max(int(part.lengths.max()) for part in parts)

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
    largest_id = max(int(_meta(folder)["largest_id"]) for folder in folders)
    return PreparedData(train, validation, tokenizer, folders, largest_id)


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
            f"{'validation' if count == 0 else 'training'}. Give a size between 1 and {num_rows - 1} rows, "
            "or 0 for no validation."
        )
    order = np.random.RandomState(seed).permutation(num_rows)  # numpy guarantees this generator's stream
    return np.sort(order[count:]), np.sort(order[:count])


def _tokens(rows: datasets.Dataset, config: TrainConfig, purpose: str) -> TokenDataset:
    """The rows as bins can hold them. Those that `sequence_len` leaves without a token to learn are counted
    and left out."""
    try:
        tokens = TokenDataset(
            rows, max_length=config.sequence_len, overlong=config.overlong, without_targets="drop"
        )
    except ValueError as error:
        raise ValueError(
            f"{purpose}: {error} Here max_length is the key sequence_len, and overlong is a key too."
        ) from error
    if len(tokens) == 0:
        raise ValueError(
            f"{purpose}: none of {len(rows)} rows is left with a token to learn ({tokens.report}). Raise "
            "sequence_len, or choose another overlong."
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
        "fields": source.fields,
        "ignore_fields": sorted(source.ignore_fields),
        "train_on_inputs": config.train_on_inputs,
        "train_on": config.train_on,
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
                f"{path} was held by another process for {timeout_s:.0f} s. If it still works, raise "
                "prepare_timeout_s or run `prepare` first."
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
    unfinished.mkdir(parents=True)
    try:
        counts = _write_rows(unfinished / "rows.arrow", source, config, tokenizer)
        size = (unfinished / "rows.arrow").stat().st_size
        meta = {"recipe": recipe, "source": source.path, **counts, "bytes": size}
        (unfinished / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        os.rename(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_rows(
    path: Path,
    source: DatasetConfig,
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, int]:
    """Write one Arrow stream; returns counts of rows, sequences, tokens and tokens that are learnt."""
    counts = {"rows": 0, "sequences": 0, "tokens": 0, "targets": 0, "without_targets": 0, "largest_id": 0}
    encoder: RowEncoder | None = None
    with path.open("wb") as stream, pa.ipc.new_stream(stream, _SCHEMA) as writer:
        for block in _shown(source_blocks(source, config.sequence_len, _BATCH_ROWS), source.path):
            encoder = encoder or _encoder(block, source, config, tokenizer)
            encoded = encoder.encode(block)
            writer.write_batch(_record_batch(encoded))
            targets = [row.num_targets for row in encoded]
            counts["rows"] += len(block.rows)
            counts["sequences"] += len(encoded)
            counts["tokens"] += sum(len(row.input_ids) for row in encoded)
            counts["targets"] += sum(targets)
            counts["without_targets"] += targets.count(0)
            largest = max((max(row.input_ids, default=0) for row in encoded), default=0)
            counts["largest_id"] = max(counts["largest_id"], largest)
        stream.flush()
        os.fsync(stream.fileno())
    if encoder is None:
        raise ValueError(f"{source.path} has no rows.")
    encoder.say_unread(source.path)
    if counts["targets"] == 0:
        raise ValueError(
            f"{source.path}: none of its {counts['rows']} rows has a token to learn. Check its format, or "
            "set train_on_inputs: true."
        )
    if counts["without_targets"]:
        logger.warning(
            "%s: %d of %d sequences have no token to learn",
            source.path,
            counts["without_targets"],
            counts["sequences"],
        )
    return counts


def _encoder(
    block: Block, source: DatasetConfig, config: TrainConfig, tokenizer: PreTrainedTokenizerBase
) -> RowEncoder:
    """Of a source that begins with these rows."""
    columns = list(dict.fromkeys(name for row in block.rows for name in row))
    try:
        row_format = choose_format(
            source.type,
            columns,
            field=source.field,
            field_messages=source.field_messages,
            fields=source.fields,
            ignored=source.ignore_fields,
        )
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from error
    return RowEncoder(row_format, tokenizer, train_on_inputs=config.train_on_inputs, train_on=config.train_on)


def _record_batch(rows: list[Encoded]) -> pa.RecordBatch:
    columns = [[row.input_ids for row in rows], [row.labels for row in rows]]
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA
    )


def _shown(blocks: Iterator[Block], name: str) -> Iterator[Block]:
    """The blocks, with a progress bar on long jobs."""
    with tqdm(desc=f"tokenise {name}", unit=" rows", delay=_SHOW_AFTER_S, dynamic_ncols=True) as bar:
        for block in blocks:
            yield block
            bar.update(len(block.rows))


def _check_complete(folder: Path) -> None:
    """A folder that was damaged after it was complete is an error, not data."""
    try:
        found, wanted = (folder / "rows.arrow").stat().st_size, _meta(folder)["bytes"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} is damaged ({error}). Delete it; it is made again.") from error
    if found != wanted:
        raise ValueError(
            f"{folder}/rows.arrow has {found} bytes, not {wanted}: it is damaged. Delete the folder; it is "
            "made again."
        )


def _meta(folder: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    return meta
