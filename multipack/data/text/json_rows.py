"""Rows of JSON: one object a line, or one array of objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def json_rows(path: Path, stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The rows of JSON lines (blank lines left out) or of an array; UTF-8, with a byte-order mark or without.

    Raises:
        ValueError: a line is not JSON, not an object or not UTF-8, or an object has a key twice; names file
            and line.
    """
    lines = enumerate(plain_lines(path, stream), 1)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        return
    if first[1].lstrip().startswith(b"["):
        yield from _array(path, first[1] + b"".join(line for _, line in lines))
        return
    for number, line in chain([first], lines):
        if line.strip():
            yield _row(path, number, line)


def plain_lines(path: Path, stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a text file without the byte-order mark of UTF-8.

    Raises:
        ValueError: the file is UTF-16.
    """
    for number, line in enumerate(stream):
        if number == 0:
            if line.startswith(_UTF16_MARKS):
                raise ValueError(f"{path} is UTF-16 text. Save it as UTF-8.")
            line = line.removeprefix(_UTF8_MARK)
        yield line


def decoded(path: Path, number: int, line: bytes) -> str:
    """A line as text.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, line {number} is not UTF-8 (byte {line[error.start]:#04x} at place {error.start}). "
            "Save it as UTF-8."
        ) from None


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    text = decoded(path, number, line)
    try:
        row = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number} is not JSON: {error.msg}.{_hint(path, text)}") from None
    except RecursionError:
        raise ValueError(f"{path}, line {number} is nested too deeply to be read.") from None
    except _Twice as error:
        raise ValueError(f"{path}, line {number} has the key {error} twice. Keep one of them.") from None
    if not isinstance(row, dict):
        raise ValueError(  # noqa: TRY004 (a file of the wrong kind, not an argument)
            f"{path}, line {number} is not an object: each line must be one row, as {{...}}."
        )
    return row


def _hint(path: Path, text: str) -> str:
    if ".json" in [suffix.lower() for suffix in path.suffixes[-2:]] and text.strip() == "{":
        return (
            " The file seems to be one object over several lines; give an array of rows, or one row a line."
        )
    return ""


def _array(path: Path, raw: bytes) -> list[dict[str, Any]]:
    text = decoded(path, 1, raw)
    try:
        rows: list[dict[str, Any]] = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno} is not JSON: {error.msg}.") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be read.") from None
    except _Twice as error:
        raise ValueError(f"{path} has a row with the key {error} twice. Keep one of them.") from None
    wrong = next((number for number, row in enumerate(rows) if not isinstance(row, dict)), None)
    if wrong is not None:
        raise ValueError(f"{path} is an array of something other than rows: row {wrong} must be {{...}}.")
    return rows


class _Twice(Exception):
    """An object has this key twice, of which JSON readers silently keep the last."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(repr(key))
            seen.add(key)
    return row
