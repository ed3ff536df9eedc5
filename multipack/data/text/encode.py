"""From rows of any format to sequences of tokens and labels.

Prompts are tokenised apart from what follows them, or their ends are looked up in the text, so that a label
never falls on a token of the prompt. Whatever a row has that is not used is refused, or named once when the
source is read.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from multipack.data.text.answers import Written, written
from multipack.data.text.conversation import (
    ASSISTANT,
    REASONING,
    Conversation,
    conversation_of,
    switch,
)
from multipack.data.text.files import Block, Row
from multipack.data.text.formats import RowFormat
from multipack.data.text.labels import IGNORED, Encoded, encode_spans
from multipack.data.text.templates import ChatTemplate
from multipack.data.text.token_rows import encode_tokens

logger = logging.getLogger(__name__)

TrainOn = Literal["all", "last"]

_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_WEIGHTS = ("weight", "loss_weight")
_OF_ROLE = ("role", "content", "tool_calls", *REASONING)


class _Text(NamedTuple):
    """A row without turns."""

    prompt: str | None
    """Not learnt; None: everything is."""
    answer: str


class RowEncoder:
    """Makes tokens and labels of the rows of one source.

    Args:
        row_format: from `choose_format`.
        tokenizer: with an end-of-sequence token for texts, and a chat template for conversations; None where
            rows are tokens.
        train_on_inputs: learn the prompts too.
        train_on: of a conversation learn "all" answers or the "last".
    """

    def __init__(
        self,
        row_format: RowFormat,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        train_on_inputs: bool = False,
        train_on: TrainOn = "all",
    ) -> None:
        self._format = row_format
        self._given = tokenizer
        self._train_on_inputs = train_on_inputs
        self._train_on: TrainOn = train_on
        self._templates: dict[str, ChatTemplate] = {}
        self._unread_columns: dict[str, None] = {}
        self._unread_keys: dict[str, None] = {}
        self._unwritten_roles: dict[str, None] = {}
        self._repeated = Counter[str]()

    def encode(self, block: Block) -> list[Encoded]:
        """The sequences of a block of rows, in the order of the rows; mostly one a row.

        Raises:
            ValueError: a row cannot be read as its format says; the message names file and row.
        """
        made: list[Written | _Text | Encoded] = []
        weights: list[bool] = []
        for number, row in enumerate(block.rows, block.first_row):
            try:
                renamed = self._format.renamed(row)
                self._note_columns(renamed)
                sequences = self._sequences(renamed)
                weights += [_weight(renamed)] * len(sequences)
                made += sequences
            except (TypeError, ValueError) as error:
                raise ValueError(f"{block.path}: row {number}: {error}") from error
        conversations = iter(self._encode_written([one for one in made if isinstance(one, Written)]))
        texts = iter(self._encode_texts([one for one in made if isinstance(one, _Text)]))
        encoded = [
            one if isinstance(one, Encoded) else next(conversations if isinstance(one, Written) else texts)
            for one in made
        ]
        return [
            sequence if weight else Encoded(sequence.input_ids, [IGNORED] * len(sequence.labels))
            for sequence, weight in zip(encoded, weights, strict=True)
        ]

    def say_unread(self, name: str) -> None:
        """Log once what the rows so far have and what was not used of it."""
        if self._unread_columns:
            logger.warning("%s: columns not read: %s", name, ", ".join(self._unread_columns))
        if self._unread_keys:
            logger.warning(
                "%s: keys that the chat template does not read: %s", name, ", ".join(self._unread_keys)
            )
        if self._unwritten_roles:
            logger.warning(
                "%s: the chat template does not write what messages of the role %s say",
                name,
                ", ".join(self._unwritten_roles),
            )
        if self._repeated["rows"]:
            logger.warning(
                "%s: %d conversations became %d sequences, since the chat template writes earlier answers "
                "otherwise when messages follow; each answer is learnt once, after what the model sees when "
                "it gives it",
                name,
                self._repeated["rows"],
                self._repeated["sequences"],
            )

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self._given is None:
            raise ValueError(f"rows of type {self._format.name} are text, and no tokenizer is given.")
        return self._given

    def _note_columns(self, row: Row) -> None:
        self._unread_columns |= dict.fromkeys(self._format.unread(row))

    def _sequences(self, row: Row) -> list[Written | _Text | Encoded]:
        """What becomes of one row: text whose tokens are made later, many rows at once, or tokens."""
        name = self._format.name
        if name == "tokens":
            return [self._of_tokens(sequence) for sequence in encode_tokens(row)]
        if name == "messages":
            return [*self._of_conversation(row)]
        if name == "question_answer":
            question, answer = _text(row, "question"), _text(row, "answer")
            messages = [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]
            return [*self._of_conversation({**row, "messages": messages})]
        if name == "prompt_completion" and isinstance(row.get("prompt"), list | tuple):
            return [*self._of_prompt_messages(row)]
        self._check_end()
        if name == "text":
            return [_Text(None, _text(row, "text"))]
        if name == "alpaca":
            return [_Text(_alpaca_prompt(row), _text(row, "output"))]
        for extra in ("tools", "documents", "chat_template_kwargs", "system"):
            if row.get(extra):
                raise ValueError(
                    f"{extra} goes with a prompt of messages, and the prompt is text. Remove it, name it in "
                    "ignore_fields, or write messages."
                )
        return [_Text(_text(row, "prompt"), _text(row, "completion"))]

    def _of_tokens(self, sequence: Encoded) -> Encoded:
        if self._train_on_inputs:
            return Encoded(sequence.input_ids, list(sequence.input_ids))
        return sequence

    def _of_prompt_messages(self, row: Row) -> list[Written]:
        prompt, completion = row["prompt"], row.get("completion")
        if not isinstance(completion, list | tuple):
            raise TypeError(
                f"prompt is a list of messages and completion is {str(completion)[:80]!r}. Write both as "
                "messages, or both as text."
            )
        return self._of_conversation({**row, "messages": [*prompt, *completion]}, first_learnt=len(prompt))

    def _of_conversation(self, row: Row, first_learnt: int = 0) -> list[Written]:
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer has no chat template, which rows of type {self._format.name} need. Set "
                "chat_template, or use the tokenizer of a chat model."
            )
        conversation = conversation_of(
            row,
            self._format.names,
            self._format.ignored,
            train_on=self._train_on,
            first_learnt=first_learnt,
        )
        template = self._template(conversation)
        self._check_read(conversation, template)
        if self._train_on_inputs:
            if conversation.switched_off:
                raise ValueError(
                    "a message is switched off, and train_on_inputs learns every token. Set train_on_inputs "
                    "to false, or remove the key."
                )
            unlearnt = Conversation(conversation.messages, frozenset(), conversation.options)
            whole = written(unlearnt, template)[0].text
            _check_unicode(whole)
            return [Written(whole, ((0, len(whole)),))]
        texts = written(conversation, template)
        for text in texts:
            _check_unicode(text.text)
        self._note_roles(conversation, texts[0].text)
        if len(texts) > 1:
            self._repeated.update(rows=1, sequences=len(texts))
        return texts

    def _template(self, conversation: Conversation) -> ChatTemplate:
        source = self._tokenizer.get_chat_template(tools=conversation.options.get("tools"))
        if source not in self._templates:
            self._templates[source] = ChatTemplate(self._tokenizer, source)
        return self._templates[source]

    def _check_read(self, conversation: Conversation, template: ChatTemplate) -> None:
        for name in conversation.options:
            if name in template.variables:
                continue
            if name in ("tools", "documents"):
                raise ValueError(
                    f"the row has {name}, and the chat template does not write them. Set chat_template to "
                    "one that does, or name them in ignore_fields."
                )
            self._unread_keys[name] = None
        for turn, message in enumerate(conversation.messages):
            for key in message:
                if key == "tool_calls" and key not in template.keys:
                    raise ValueError(
                        f"message {turn} has {key}, and the chat template does not write them. Set "
                        "chat_template to one that does, or remove the row."
                    )
                if key not in _OF_ROLE and key not in template.keys:
                    self._unread_keys[key] = None

    def _note_roles(self, conversation: Conversation, text: str) -> None:
        for message in conversation.messages:
            content = message["content"]
            role = message["role"]
            if role != ASSISTANT and isinstance(content, str) and content.strip() not in text:
                self._unwritten_roles[role] = None

    def _encode_written(self, texts: Sequence[Written]) -> list[Encoded]:
        if not texts:
            return []
        if self._train_on_inputs:
            ids = self._ids([text.text for text in texts], special=False)
            return [Encoded(row, list(row)) for row in ids]
        return encode_spans(texts, self._tokenizer)

    def _encode_texts(self, texts: Sequence[_Text]) -> list[Encoded]:
        if not texts:
            return []
        if texts[0].prompt is None:
            ids = [self._ended(row) for row in self._started([text.answer for text in texts])]
            return [Encoded(row, list(row)) for row in ids]
        starts = self._started([text.prompt or "" for text in texts])
        ends = [self._ended(row) for row in self._ids([text.answer for text in texts], special=False)]
        return [
            Encoded(start + end, (start if self._train_on_inputs else [IGNORED] * len(start)) + end)
            for start, end in zip(starts, ends, strict=True)
        ]

    def _check_end(self) -> None:
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no end-of-sequence token, so no answer would end. Set special_tokens: "
                "eos_token."
            )

    def _ids(self, texts: list[str], *, special: bool) -> list[list[int]]:
        ids = self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        return [list(row) for row in ids]

    def _started(self, texts: list[str]) -> list[list[int]]:
        """Token ids with what the tokenizer puts before a sequence, once also where the text has it, and no
        end."""
        token, bos = self._tokenizer.bos_token, self._tokenizer.bos_token_id
        return [
            self._without_end(ids[1:] if token and text.startswith(token) and ids[:2] == [bos, bos] else ids)
            for text, ids in zip(texts, self._ids(texts, special=True), strict=True)
        ]

    def _without_end(self, ids: list[int]) -> list[int]:
        while ids and ids[-1] == self._tokenizer.eos_token_id:
            ids = ids[:-1]
        return ids

    def _ended(self, ids: list[int]) -> list[int]:
        return [*self._without_end(ids), self._tokenizer.eos_token_id]


def _weight(row: Mapping[str, Any]) -> bool:
    """Whether the row as a whole is learnt."""
    said = [switch(row[name], name) for name in _WEIGHTS if row.get(name) is not None]
    return all(said)


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise TypeError(f"{name} is {repr(value)[:80]}, not text. Remove the row or fill the cell.")
    _check_unicode(value)
    return value


def _alpaca_prompt(row: Row) -> str:
    instruction = _text(row, "instruction")
    given = row.get("input")
    if given is None or given == "":
        return _WITHOUT_INPUT.format(instruction=instruction)
    return _WITH_INPUT.format(instruction=instruction, input=_text(row, "input"))


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 10) : error.start]
        raise ValueError(
            f"a text holds half of a surrogate pair ({text[error.start]!r} after {near!r}), which is no "
            "character. Correct or remove the row."
        ) from None
