"""Open what a configuration names as data: files, folders, the hub, or the built-in rows.

Each source has a digest of its bytes, found without parsing them, so that a cache of its tokens knows when it is out of date.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import datasets
import pyarrow as pa

from multipack.train.config import BUILTIN, DatasetConfig
from multipack.train.data.builtin import builtin_digest, builtin_rows

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
_BLOCK_BYTES = 1 << 20


def source_digest(source: DatasetConfig, longest: int) -> str:
    """SHA-256 of a source's bytes and of what is taken from them.

    Args:
        source: where the rows come from.
        longest: `max_bytes` of the built-in rows.

    Raises:
        ValueError: no such file, or a kind of file that cannot be read.
    """
    if source.path == BUILTIN:
        return builtin_digest(longest)
    path = Path(source.path)
    if path.is_file():
        _builder(path)
        files: Iterable[Path] = [path]
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        files = [Path(file["filename"]) for file in _from_hub(source).cache_files]
    digest = hashlib.sha256(f"{source.split} {source.name}".encode())
    for file in files:
        _add_bytes(digest, file)
    return digest.hexdigest()


def open_source(source: DatasetConfig, longest: int, scratch: Path) -> datasets.Dataset:
    """The rows of a source.

    Args:
        source: where the rows come from.
        longest: `max_bytes` of the built-in rows.
        scratch: folder for Arrow copies of text files; must outlive the rows.

    Raises:
        ValueError: no such file, a kind of file that cannot be read, a file that is damaged or ends early, or no such split.
    """
    if source.path == BUILTIN:
        return datasets.Dataset.from_list(builtin_rows(longest))
    path = Path(source.path)
    if not path.exists():
        return _from_hub(source)
    try:
        return _open_files(path, source, scratch)
    except (datasets.exceptions.DatasetGenerationError, pa.ArrowException, OSError, EOFError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno is not None:  # of the disk, not of the data
            raise cause from None
        raise ValueError(
            f"{source.path} cannot be read: {cause}. If it is damaged or ends early, copy or write it again."
        ) from error


def _open_files(path: Path, source: DatasetConfig, scratch: Path) -> datasets.Dataset:
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        return _split_of(datasets.load_from_disk(str(path)), source)
    if path.is_dir():
        return datasets.load_dataset(str(path), source.name, split=source.split, cache_dir=str(scratch))
    return datasets.load_dataset(
        _builder(path), data_files=str(path), split=source.split, cache_dir=str(scratch)
    )


def _builder(path: Path) -> str:
    """The reader of `datasets` for a file, by its suffix; `.gz` is looked through."""
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if suffix not in _BUILDERS:
        raise ValueError(
            f"{path} has the suffix {path.suffix!r}, which no reader is known for. Use {', '.join(_BUILDERS)} (also with .gz)."
        )
    return _BUILDERS[suffix]


def _from_hub(source: DatasetConfig) -> datasets.Dataset:
    path = Path(source.path)
    if path.is_absolute() or len(path.parts) > 2 or path.name.endswith((*_BUILDERS, ".gz")):
        raise ValueError(
            f"{source.path} does not exist. Give a file, a folder, or a name on the hub (owner/name)."
        )
    return datasets.load_dataset(source.path, source.name, split=source.split)


def _split_of(loaded: datasets.Dataset | datasets.DatasetDict, source: DatasetConfig) -> datasets.Dataset:
    if isinstance(loaded, datasets.DatasetDict):
        if source.split not in loaded:
            raise ValueError(
                f"{source.path} has no split {source.split!r}, only {', '.join(loaded)}. Set split to one of them."
            )
        return loaded[source.split]
    if source.split != "train":
        raise ValueError(
            f"{source.path} was saved without splits, so split {source.split!r} cannot be chosen. Leave split out."
        )
    return loaded


def _add_bytes(digest: hashlib._Hash, file: Path) -> None:
    digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
