"""Which format the rows of a source have, and what becomes of columns that it does not name.

One rule: a column is used, or it is said once that it is not read, or, where it decides what the row means,
it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from multipack.data.targets import MASKS

FormatName: TypeAlias = Literal[
    "tokens", "messages", "alpaca", "prompt_completion", "question_answer", "text"
]
FORMATS: tuple[str, ...] = get_args(FormatName)

_OTHER_NAMES: dict[str, FormatName] = {
    "chat_template": "messages",
    "sharegpt": "messages",
    "completion": "text",
}
"""Names that axolotl has for formats."""
TYPES: tuple[str, ...] = ("auto", *FORMATS, *_OTHER_NAMES)
"""What can be asked for as the type of a row."""
_NEEDED: dict[FormatName, tuple[str, ...]] = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "question_answer": ("question", "answer"),
    "text": ("text",),
}
"""In the order in which `auto` tries them: alpaca before text, since alpaca's own text column holds the
joined prompt."""
_CHAT = ("tools", "documents", "chat_template_kwargs", "system")
_WEIGHTS = ("weight", "loss_weight")
_PACKED = ("seq_lengths", "position_ids", "attention_mask")
_USED: dict[FormatName, tuple[str, ...]] = {
    "tokens": (
        *("labels", *MASKS, "attention_mask"),
        *("position_ids", "seq_lengths"),
    ),
    "messages": _CHAT,
    "alpaca": ("input",),
    "prompt_completion": _CHAT,
    "question_answer": _CHAT,
    "text": (),
}
_DECISIVE: dict[str, str] = {
    **dict.fromkeys(
        ("image", "images", "audio", "audios", "video", "videos", "pixel_values", "input_features"),
        "what it shows would be missing from the prompt",
    ),
    **dict.fromkeys(("tools", "functions"), "the model would learn calls of functions that it is not shown"),
    **dict.fromkeys(("documents", "context"), "the model would answer from what it is not shown"),
    **dict.fromkeys(("history", "system"), "the prompt would lack it"),
    **dict.fromkeys(("chosen", "rejected"), "preferences are not learnt by supervised training"),
    **dict.fromkeys(
        ("labels", *MASKS, "seq_lengths"),
        "it speaks of tokens, and the row is text",
    ),
    **dict.fromkeys(("chat_template", "chat_template_kwargs"), "the row would be written in another way"),
    **dict.fromkeys(("sample_weight",), "the row would count as any other"),
}
"""Columns that change what a row means, and what would happen without them."""


@dataclass(frozen=True)
class RowFormat:
    """A format, and where a source has its columns."""

    name: FormatName
    names: Mapping[str, str] = field(default_factory=dict)
    """Column or message key of the source -> the name that the format has for it, where they differ."""
    ignored: frozenset[str] = frozenset()
    """Columns and message keys of the source that are left out on purpose."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a row must have, as the source calls them."""
        theirs = {ours: name for name, ours in self.names.items()}
        return tuple(theirs.get(name, name) for name in _NEEDED[self.name])

    def renamed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row under the names of the format; what is ignored is gone, and a column whose name is taken
        goes by `its name (own)`."""
        taken = {ours for theirs, ours in self.names.items() if theirs in row}
        renamed = {}
        for name, value in row.items():
            if name not in self.ignored:
                renamed[self.names.get(name, f"{name} (own)" if name in taken else name)] = value
        return renamed

    def unread(self, row: Mapping[str, Any]) -> list[str]:
        """Columns of a renamed row that this format does not read.

        Raises:
            ValueError: one of them decides what the row means; names it and the remedy.
        """
        read = {*_NEEDED[self.name], *_USED[self.name], *_WEIGHTS}
        unread = []
        for name, value in row.items():
            if name in read:
                continue
            unread.append(name)
            if name in _DECISIVE and _says_something(value):
                raise ValueError(
                    f"the column {name} is not read by type {self.name}, and without it {_DECISIVE[name]}. "
                    "Remove it, name it in ignore_fields, or set the type that reads it."
                )
        return unread


def _says_something(value: Any) -> bool:
    return value is not None and not (isinstance(value, str | list | tuple | dict) and not value)


def matters_beside_tokens(columns: Iterable[str]) -> bool:
    """Whether rows of tokens with these columns may be several sequences, partly padding, or something to
    refuse."""
    plain = {"labels", *MASKS}
    return any(
        name in _PACKED or (name in _DECISIVE and name not in plain) or name in _WEIGHTS for name in columns
    )


def choose_format(
    wanted: str,
    columns: Sequence[str],
    *,
    field: str = "text",
    field_messages: str = "messages",
    fields: Mapping[str, str] | None = None,
    ignored: Sequence[str] = (),
) -> RowFormat:
    """Settle on a format for a source.

    Args:
        wanted: "auto", or a format's name (axolotl's chat_template, sharegpt and completion included).
        columns: what the source has.
        field: column of the document.
        field_messages: column of the conversation.
        fields: the name of the format -> the name of the source, for columns and keys of messages.
        ignored: columns and keys of messages to leave out.

    Raises:
        ValueError: a column is missing, or no format fits the columns; the message has those found and those
            wanted.
    """
    theirs = dict(fields or {})
    for ours, name in (("text", field), ("messages", field_messages)):
        if name != ours:
            theirs[ours] = name
    found = [column for column in columns if column not in ignored]
    names = {name: ours for ours, name in theirs.items()}
    if "messages" not in theirs and "messages" not in found and "conversations" in found:
        names["conversations"] = "messages"  # ShareGPT's name for it
    candidates = FORMATS if wanted == "auto" else (_OTHER_NAMES.get(wanted, wanted),)
    for name in candidates:
        row_format = RowFormat(_checked_name(name), names, frozenset(ignored))
        if set(row_format.columns) <= set(found):
            return row_format
    shown = ", ".join(found) or "none"
    if wanted == "auto":
        known = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in _NEEDED.items())
        raise ValueError(
            f"The columns ({shown}) fit no format. Rename them to those of one format ({known}), or set its "
            "type and fields."
        )
    missing = [column for column in row_format.columns if column not in found]
    raise ValueError(
        f"type {wanted} reads the columns {', '.join(row_format.columns)}, and {', '.join(missing)} is "
        f"missing: the source has {shown}. Name the column with fields, field or field_messages, or set "
        "another type."
    )


def _checked_name(name: str) -> FormatName:
    for known in _NEEDED:
        if name == known:
            return known
    raise ValueError(f"type {name} is no format. Use auto, {', '.join((*FORMATS, *_OTHER_NAMES))}.")
