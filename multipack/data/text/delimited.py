"""Rows of text files: comma- or tab-separated values under a line of names, and plain lines."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from multipack.data.text.json_rows import decoded, plain_lines

_LONGEST_CELL = 2**31 - 1


def delimited_rows(path: Path, stream: IO[bytes], delimiter: str) -> Iterator[dict[str, str]]:
    """The rows under the first line, which names the columns. Every cell is text; blank lines are left out.

    Raises:
        ValueError: a row has another number of cells, a name is missing or there twice, or quotes are not
            closed.
    """
    text = (decoded(path, number, line) for number, line in enumerate(plain_lines(path, stream), 1))
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    limit = csv.field_size_limit(_LONGEST_CELL)  # of the module; the default refuses documents above 128 KiB
    try:
        names: list[str] | None = None
        for cells in reader:
            if not cells:
                continue
            if names is None:
                names = _checked(path, cells)
            elif len(cells) != len(names):
                raise ValueError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells under {len(names)} names "
                    f"({', '.join(names)}). Quote cells that hold the separator."
                )
            else:
                yield dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num} is not a row: {error}.") from None
    finally:
        csv.field_size_limit(limit)


def _checked(path: Path, names: list[str]) -> list[str]:
    for number, name in enumerate(names):
        if not name.strip() or name in names[:number]:
            what = f"has the name {name!r} twice" if name.strip() else f"has no name for column {number}"
            raise ValueError(f"{path}: its first line {what}. It must name the columns, each once.")
    return names


def text_rows(path: Path, stream: IO[bytes]) -> Iterator[dict[str, str]]:
    """One row `{"text": line}` a line that is not blank.

    Raises:
        ValueError: a line is not UTF-8; names it.
    """
    for number, line in enumerate(plain_lines(path, stream), 1):
        text = decoded(path, number, line).rstrip("\r\n")
        if text.strip():
            yield {"text": text}
