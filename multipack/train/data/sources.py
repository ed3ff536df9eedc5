"""Open what a configuration names as data: files, folders, the hub, or the built-in rows.

Each source has a digest of its bytes, found without parsing them, so that a cache of its tokens knows when it
is out of date.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from multipack.data.text.arrow_rows import dataset_rows
from multipack.data.text.files import SUFFIXES, Block, data_files, kind_of, read_blocks, say_unread_files
from multipack.train.config import BUILTIN, DatasetConfig
from multipack.train.data.builtin import builtin_digest, builtin_rows

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
    digest = hashlib.sha256(f"{source.split} {source.name}".encode())
    files: Iterable[Path]
    if not path.exists():
        files = [Path(file["filename"]) for file in _from_hub(source).cache_files]
    else:
        files = [file for found in _files(source) for file in _files_in(found)]
    for file in files:
        _add_bytes(digest, file)
    return digest.hexdigest()


def source_blocks(source: DatasetConfig, longest: int, size: int) -> Iterator[Block]:
    """The rows of a source, `size` at a time, with the file that they stand in.

    Args:
        source: where the rows come from.
        longest: `max_bytes` of the built-in rows.
        size: most rows of a block; a block never spans two files.

    Raises:
        ValueError: no such file, a kind of file that cannot be read, a file that is damaged or ends early, or
            no such split.
    """
    if source.path == BUILTIN:
        yield from _blocks(Path(BUILTIN), iter(builtin_rows(longest)), size)
    elif not Path(source.path).exists():
        yield from _blocks(Path(source.path), dataset_rows(_from_hub(source), size), size)
    else:
        yield from _sliced(source, size)


def num_rows(source: DatasetConfig) -> int | None:
    """Rows of a source, where that is known without reading it."""
    if source.path == BUILTIN or Path(source.path).exists():
        return None
    return len(_from_hub(source))


def _blocks(name: Path, rows: Iterator[dict[str, Any]], size: int) -> Iterator[Block]:
    first_row = 0
    while block := list(islice(rows, size)):
        yield Block(name, first_row, block)
        first_row += len(block)


def _is_plain(split: str) -> bool:
    return not any(letter in split for letter in "[]+:%")


def _files(source: DatasetConfig) -> list[Path]:
    if source.name is not None:
        raise ValueError(
            f"{source.path} is on disk, and name ({source.name}) chooses a configuration of a data set on "
            "the hub. Leave name out, or give the folder of that configuration as path."
        )
    names = [source.split] if _is_plain(source.split) else _names_in(source)
    return [file for name in names for file in data_files(Path(source.path), name)]


def _names_in(source: DatasetConfig) -> list[str]:
    """Names of splits in a specification such as train[:10%]+test."""
    return list(dict.fromkeys(part.partition("[")[0].strip() for part in source.split.split("+")))


def _sliced(source: DatasetConfig, size: int) -> Iterator[Block]:
    if _is_plain(source.split):
        say_unread_files(Path(source.path), source.split)
        for file in _files(source):
            yield from read_blocks(file, size=size)
        return
    path = Path(source.path)
    _files(source)
    counts = {
        name: sum(len(block.rows) for file in data_files(path, name) for block in read_blocks(file))
        for name in _names_in(source)
    }
    try:
        parts = datasets.ReadInstruction.from_spec(source.split).to_absolute(counts)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"{source.path}: split {source.split!r} cannot be taken: {error}") from error
    for part in parts:
        first, last = part.from_ or 0, counts[part.splitname] if part.to is None else part.to
        yield from _between(data_files(path, part.splitname), first, last, size)


def _between(files: list[Path], first: int, last: int, size: int) -> Iterator[Block]:
    """Rows first..last-1 of files that follow each other."""
    done = 0
    for file in files:
        for block in read_blocks(file, size=size):
            begin, end = max(first - done, 0), min(last - done, len(block.rows))
            if begin < end:
                yield Block(block.path, block.first_row + begin, block.rows[begin:end])
            done += len(block.rows)
            if done >= last:
                return


def _files_in(found: Path) -> list[Path]:
    """The files whose bytes a source consists of."""
    if found.is_file():
        return [found]
    return sorted(file for file in found.rglob("*") if file.is_file())


def _from_hub(source: DatasetConfig) -> datasets.Dataset:
    path = Path(source.path)
    if path.is_absolute() or len(path.parts) > 2 or kind_of(path) is not None:
        raise ValueError(
            f"{source.path} does not exist. Give a file ({', '.join(SUFFIXES)}), a folder, or a name on the "
            "hub (owner/name)."
        )
    return datasets.load_dataset(source.path, source.name, split=source.split)


def _add_bytes(digest: hashlib._Hash, file: Path) -> None:
    digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
