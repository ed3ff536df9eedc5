"""From rows of text to token ids and labels.

A format is a function over a batch of rows: it knows its columns, writes the text as the model will see it, and says which tokens
are learnt. Prompts are tokenised apart from what follows them, or their ends are looked up in the text, so that a label never
falls on a token of the prompt. Nothing here touches files or ranks.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Format: TypeAlias = Literal["alpaca", "messages", "text"]
Columns: TypeAlias = Mapping[str, Sequence[Any]]
Span: TypeAlias = tuple[int, int]

IGNORED = -100
"""Label of a token that is not learnt, as in torch's cross-entropy."""

_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Encoded(NamedTuple):
    """One row: as many labels as tokens; a label is the token itself or IGNORED."""

    input_ids: list[int]
    labels: list[int]

    @property
    def num_targets(self) -> int:
        """Tokens that are learnt."""
        return len(self.labels) - self.labels.count(IGNORED)


class RowFormat(NamedTuple):
    """A format and the columns that it reads."""

    name: Format
    columns: tuple[str, ...]


def choose_format(
    wanted: str, columns: Sequence[str], *, field: str = "text", field_messages: str = "messages"
) -> RowFormat:
    """Settle on a format for a source.

    Args:
        wanted: "auto", or a format's name (axolotl's chat_template and completion included).
        columns: what the source has.
        field: column of the document.
        field_messages: column of the conversation.

    Raises:
        ValueError: a column is missing, or no format fits the columns; the message has those found and those wanted.
    """
    formats = {
        "messages": RowFormat("messages", (field_messages,)),
        "alpaca": RowFormat("alpaca", ("instruction", "output")),
        "text": RowFormat("text", (field,)),
    }
    found = ", ".join(columns) or "none"
    if wanted == "auto":
        for candidate in formats.values():
            if set(candidate.columns) <= set(columns):
                return candidate
        known = "; ".join(f"{name}: {', '.join(row_format.columns)}" for name, row_format in formats.items())
        raise ValueError(
            f"The columns ({found}) fit no format. Rename them to those of one format ({known}), or set its type and field."
        )
    row_format = formats[{"chat_template": "messages", "completion": "text"}.get(wanted, wanted)]
    missing = [column for column in row_format.columns if column not in columns]
    if missing:
        raise ValueError(
            f"type {wanted} reads the columns {', '.join(row_format.columns)}, and {', '.join(missing)} is missing: the source has {found}. "
            "Name the column with field or field_messages, or set another type."
        )
    return row_format


def encode(
    rows: Columns,
    row_format: RowFormat,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on_inputs: bool = False,
    first_row: int = 0,
) -> list[Encoded]:
    """Tokenise a batch of rows.

    Args:
        rows: columns of equal length, at least those of `row_format`.
        row_format: from `choose_format`.
        tokenizer: with an end-of-sequence token, and a chat template for messages.
        train_on_inputs: learn the prompts too.
        first_row: number of the first row in its source, for messages of errors.

    Raises:
        TypeError: a cell is no text or no conversation; the message names the row.
        ValueError: a message lacks its role or content, or the tokenizer lacks what the format needs.
    """
    if row_format.name == "messages":
        return _encode_messages(rows[row_format.columns[0]], tokenizer, train_on_inputs, first_row)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no end-of-sequence token, so no answer would end. Set special_tokens: eos_token."
        )
    texts = [_texts(rows[column], column, first_row) for column in row_format.columns]
    if row_format.name == "text":
        return [
            Encoded(ids, ids)
            for ids in (_ended(ids, tokenizer) for ids in _tokenize(texts[0], tokenizer, start=True))
        ]
    prompts = _alpaca_prompts(texts[0], rows.get("input"), first_row)
    starts = _tokenize(prompts, tokenizer, start=True)
    answers = [_ended(ids, tokenizer) for ids in _tokenize(texts[1], tokenizer, start=False)]
    return [
        Encoded(start + answer, (start if train_on_inputs else [IGNORED] * len(start)) + answer)
        for start, answer in zip(starts, answers, strict=True)
    ]


def _texts(cells: Sequence[Any], column: str, first_row: int) -> list[str]:
    for row, cell in enumerate(cells, first_row):
        if not isinstance(cell, str):
            raise TypeError(f"row {row}: {column} is {cell!r}, not text. Remove the row or fill the cell.")
    return list(cells)


def _alpaca_prompts(instructions: Sequence[str], inputs: Sequence[Any] | None, first_row: int) -> list[str]:
    if inputs is None:
        return [_WITHOUT_INPUT.format(instruction=instruction) for instruction in instructions]
    given = _texts(["" if cell is None else cell for cell in inputs], "input", first_row)
    return [
        _WITH_INPUT.format(instruction=instruction, input=text)
        if text
        else _WITHOUT_INPUT.format(instruction=instruction)
        for instruction, text in zip(instructions, given, strict=True)
    ]


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, start: bool) -> list[list[int]]:
    """Token ids; `start` adds what the tokenizer puts before a sequence, without an end."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=start, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return [row[:-1] if start and row and row[-1] == eos else row for row in ids]


def _ended(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [*ids, tokenizer.eos_token_id]


def _encode_messages(
    conversations: Sequence[Any], tokenizer: PreTrainedTokenizerBase, train_on_inputs: bool, first_row: int
) -> list[Encoded]:
    if not tokenizer.chat_template:
        raise ValueError(
            "The tokenizer has no chat template, which the messages format needs. Use the tokenizer of a chat model."
        )
    conversations = [_checked(conversation, row) for row, conversation in enumerate(conversations, first_row)]
    texts = [
        _rendered(conversation, tokenizer, row) for row, conversation in enumerate(conversations, first_row)
    ]
    if not texts:
        return []
    if train_on_inputs:
        tokens = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [Encoded(ids, ids) for ids in tokens]
    if isinstance(tokenizer.chat_template, str) and _GENERATION.search(tokenizer.chat_template):
        return _encode_marked(conversations, tokenizer)
    spans = [
        _assistant_spans(conversation, text, tokenizer, row)
        for row, (conversation, text) in enumerate(zip(conversations, texts, strict=True), first_row)
    ]
    return _encode_spans(texts, spans, tokenizer)


def _encode_marked(conversations: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """Labels where the chat template marks what the assistant writes."""
    tokens = tokenizer.apply_chat_template(
        list(conversations), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return [
        Encoded(ids, [token if learnt else IGNORED for token, learnt in zip(ids, mask, strict=True)])
        for ids, mask in zip(tokens["input_ids"], tokens["assistant_masks"], strict=True)
    ]


def _encode_spans(
    texts: list[str], spans: Sequence[Sequence[Span]], tokenizer: PreTrainedTokenizerBase
) -> list[Encoded]:
    """Labels on the tokens inside spans of characters."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell which characters a token covers, so assistant turns cannot be "
            "found. Use a fast tokenizer, a chat template with {% generation %} marks, or train_on_inputs: true."
        )
    tokens = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    rows = zip(tokens["input_ids"], tokens["offset_mapping"], texts, spans, strict=True)
    return [
        Encoded(ids, _labels_in(row_spans, ids, offsets, text, special))
        for ids, offsets, text, row_spans in rows
    ]


def _rendered(
    conversation: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    row: int,
    *,
    prompt_assistant: bool = False,
) -> str:
    """The conversation as the chat template writes it, with the opening of an assistant turn if asked."""
    try:
        text: str = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=prompt_assistant
        )
    except TemplateError as error:
        raise ValueError(
            f"row {row}: the chat template refuses the conversation: {error}. Correct or remove it."
        ) from error
    return text


def _checked(conversation: Any, row: int) -> list[dict[str, Any]]:
    """The messages without the nulls that a table has for keys which only other messages have."""
    if not isinstance(conversation, list | tuple):
        raise TypeError(
            f"row {row}: the conversation is {conversation!r}, not a list of messages. Correct or remove it."
        )
    if not conversation:
        raise ValueError(f"row {row}: the conversation has no messages. Remove the row.")
    for turn, message in enumerate(conversation):
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or "content" not in message
        ):
            raise ValueError(f"row {row}: message {turn} is {message!r}; it must have a role and a content.")
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in conversation
    ]


def _assistant_spans(
    conversation: Sequence[Any], text: str, tokenizer: PreTrainedTokenizerBase, row: int
) -> list[Span]:
    """Characters of the rendered `text` that the assistant writes, found by rendering the conversation up to each turn."""
    spans = []
    for turn, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        if turn == 0:
            raise ValueError(
                f"row {row}: the assistant speaks first, and without an earlier message the template cannot show where its part begins. "
                "Put a message before it, use a template with {% generation %} marks, or train_on_inputs: true."
            )
        before = _rendered(conversation[:turn], tokenizer, row, prompt_assistant=True)
        last = turn == len(conversation) - 1
        through = text if last else _rendered(conversation[: turn + 1], tokenizer, row)
        if not (through.startswith(before) and text.startswith(through)):
            raise ValueError(
                f"row {row}: the chat template writes message {turn} otherwise when other messages follow, so the assistant's part cannot be "
                "found. Use a template with {% generation %} marks, or train_on_inputs: true."
            )
        spans.append((len(before), len(through)))
    return spans


def _labels_in(
    spans: Sequence[Span], ids: Sequence[int], offsets: Sequence[Span], text: str, special: set[int]
) -> list[int]:
    """Labels for the tokens that start inside the spans.

    A span ends with its last special token, such as the end of the turn, when only white space follows: a model stops there.
    """
    # Byte-level tokenizers may trim a token's white space from its offsets, down to nothing: such a token counts by the character before.
    places = [start if end > start else start - 1 for start, end in offsets]
    labels = [IGNORED] * len(ids)
    for begin, end in spans:
        first, last = (bisect_left(places, place) for place in (begin, end))
        closing = max((token for token in range(first, last) if ids[token] in special), default=None)
        if closing is not None and not text[offsets[closing][1] : end].strip():
            last = closing + 1
        labels[first:last] = ids[first:last]
    return labels
