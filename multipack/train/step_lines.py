"""Files of JSON lines, each with its `step`, that a resumed run goes on with."""

from __future__ import annotations

import json
from pathlib import Path


def keep_steps(path: Path, last: int) -> None:
    """Drop the lines of steps after `last`, which an attempt that is undone has left, and half a line of a
    killed process.

    0 drops all, whatever they are; a missing file becomes an empty one. A kill meanwhile leaves the file as
    it was.
    """
    text = path.read_text(encoding="utf-8") if last and path.exists() else ""
    whole = [line for line in text.split("\n")[:-1] if line]
    partial = path.with_suffix(".partial")
    partial.write_text(
        "".join(line + "\n" for line in whole if json.loads(line)["step"] <= last), encoding="utf-8"
    )
    partial.replace(path)
