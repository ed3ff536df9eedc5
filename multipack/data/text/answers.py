"""Which characters of a conversation the assistant writes.

An answer is learnt after the very text that the model is given when it has to write it: the conversation up
to it, as the template writes that with the opening of an answer. Where a template writes an earlier answer
otherwise once messages follow (it drops thinking, it ends the last turn in its own way), one text cannot hold
all answers so; such an answer then gets a text of its own that ends with it. A conversation thus gives one
text or several, and each answer is learnt in one of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from multipack.data.text.conversation import ASSISTANT, Conversation, Message, texts_of
from multipack.data.text.templates import FAILURES, ChatTemplate, Rendered, Span


class Written(NamedTuple):
    """A text and the characters of it that are learnt: spans in order, none overlapping."""

    text: str
    spans: tuple[Span, ...]


class _Answer(NamedTuple):
    """An answer where it is the last message."""

    turn: int
    text: str
    """The conversation up to it, it included."""
    start: int
    """Where the model begins to write."""
    ends: tuple[int, ...]
    """Ends of the answer: after its first closing special token, its second, ...; or the end of the text."""


def written(conversation: Conversation, template: ChatTemplate) -> list[Written]:
    """The texts of a conversation; the first one is of the whole of it.

    Raises:
        ValueError: the template refuses the conversation, leaves out part of an answer, writes no end after
            it, or writes it otherwise than it asks for it. The message names the message and the remedy.
    """
    whole = _rendered(template, conversation, len(conversation.messages))
    if not conversation.learnt:
        return [Written(whole.text, ())]
    if template.marked:
        return _of_marks(conversation, template, whole)
    answers = [_answer(conversation, template, turn) for turn in sorted(conversation.learnt)]
    texts = []
    text = whole.text
    while answers:
        held = [answer for answer in answers if text.startswith(answer.text[: answer.ends[0]])]
        texts.append(Written(text, tuple((answer.start, _end(answer, text)) for answer in held)))
        answers = [answer for answer in answers if answer not in held]
        text = answers[-1].text if answers else ""
    return texts if len(texts) == 1 or texts[0].spans else texts[1:]


def _rendered(template: ChatTemplate, conversation: Conversation, until: int) -> Rendered:
    """The first `until` messages."""
    return _render(template, conversation, conversation.messages[:until])


def _render(
    template: ChatTemplate,
    conversation: Conversation,
    messages: Sequence[Message],
    *,
    prompt: bool = False,
    **more: bool,
) -> Rendered:
    try:
        return template.render(messages, conversation.options, prompt=prompt, **more)
    except FAILURES as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the chat template refuses the conversation: {reason}. Correct or remove it."
        ) from error


def _answer(conversation: Conversation, template: ChatTemplate, turn: int) -> _Answer:
    text = _rendered(template, conversation, turn + 1).text
    start = _start(conversation, template, turn, text)
    ends = _closings(template, text, start)
    _check_texts(conversation.messages[turn], turn, text[start:])
    if ends[0] == len(text) and _is_unended(conversation.messages[turn], template, text):
        raise ValueError(
            f"the chat template writes no end after message {turn}, so the model would not learn to stop. "
            "Set chat_template to one that ends answers, or train_on_inputs: true."
        )
    return _Answer(turn, text, start, ends)


def _start(conversation: Conversation, template: ChatTemplate, turn: int, text: str) -> int:
    """Where the model begins to write message `turn` of `text`."""
    before = conversation.messages[:turn]
    try:
        prompts = [_render(template, conversation, before, prompt=True).text]
    except ValueError:
        if turn:
            raise
        prompts = []
    if not (prompts and text.startswith(prompts[0])):
        prompts += [
            _render(template, conversation, before, prompt=True, **switch).text
            for switch in template.switches()
            if turn
        ]
    prompt = next((prompt for prompt in prompts if text.startswith(prompt)), None)
    if prompt is None and turn == 0:
        raise ValueError(
            "the assistant speaks first, and without an earlier message the template cannot show where its part begins. "
            "Put a message before it, use a template with {% generation %} marks, or train_on_inputs: true."
        )
    if prompt is None:
        at = template.common(text, prompts[0])
        raise ValueError(
            f"the chat template asks for message {turn} by {_shown(prompts[0][at:])} and then writes it as {_shown(text[at:])}, so a "
            "model would never see the answer where it has to give it. Set chat_template to one that agrees with itself (maybe one with "
            "{% generation %} marks), or train_on_inputs: true."
        )
    return _after_header(conversation, template, turn, text, prompt)


def _after_header(
    conversation: Conversation, template: ChatTemplate, turn: int, text: str, prompt: str
) -> int:
    """The end of the prompt; of a template that knows no opening of answers, the beginning of the answer's
    own text."""
    if template.opening or turn == 0:
        return len(prompt)
    content = conversation.messages[turn].get("content")
    shown = content.strip() if isinstance(content, str) else ""
    place = text.find(shown, len(prompt)) if shown else len(prompt)
    header = text[len(prompt) : max(place, len(prompt))]
    return place if header.strip() else len(prompt)


def _closings(template: ChatTemplate, text: str, start: int) -> tuple[int, ...]:
    """Ends of the special tokens that close `text`, of which only white space lies between and after them."""
    ends: list[int] = []
    last = start
    for found in template.special.finditer(text, start):
        if text[last : found.start()].strip():
            ends.clear()
        ends.append(found.end())
        last = found.end()
    if text[last:].strip() or not ends:
        return (len(text),)
    return tuple(ends)


def _is_unended(message: Message, template: ChatTemplate, text: str) -> bool:
    content = message.get("content")
    answer = content.rpartition("</think>")[2].strip() if isinstance(content, str) else ""
    return text.rstrip("\n ").endswith(answer) and not text.endswith("\n") if answer else not template.ending


def _end(answer: _Answer, text: str) -> int:
    """The last of its ends that this text shares."""
    return max(end for end in answer.ends if text.startswith(answer.text[:end]))


def _check_texts(message: Message, turn: int, found: str) -> None:
    for text in texts_of(message):
        if text not in found:
            raise ValueError(
                f"the chat template leaves out part of message {turn}, {_shown(text)}, which would not be "
                "learnt. Set chat_template to one that writes it, or remove that part."
            )


def _of_marks(conversation: Conversation, template: ChatTemplate, whole: Rendered) -> list[Written]:
    """Answers by the marks of the template, without what it also writes to ask for them, with the end that it
    writes after them."""
    messages = conversation.messages
    last = max(turn for turn, message in enumerate(messages) if message["role"] == ASSISTANT)
    if conversation.all_learnt and all(
        text in whole.text for turn in conversation.learnt for text in texts_of(messages[turn])
    ):
        spans = _trimmed(template, whole)
        _check_marks(conversation, sorted(conversation.learnt), whole.text, spans)
        return [Written(whole.text, spans)]
    texts: list[Written] = []
    held: list[Span] = []
    for turn in sorted(conversation.learnt):
        marks = _marks_of(conversation, template, whole, turn, last)
        if _holds(messages[turn], whole.text, marks):
            held += marks
            continue
        own = _rendered(template, conversation, turn + 1)
        marks = _marks_of(conversation, template, own, turn, turn)
        _check_marks(conversation, [turn], own.text, marks)
        texts.append(Written(own.text, tuple(marks)))
    return [Written(whole.text, tuple(held)), *texts] if held or not texts else texts


def _marks_of(
    conversation: Conversation, template: ChatTemplate, rendered: Rendered, turn: int, last: int
) -> list[Span]:
    """The marked characters of one message: those after what comes before it, up to what the next one
    adds."""
    begin = template.common(_rendered(template, conversation, turn).text, rendered.text) if turn else 0
    end = len(rendered.text)
    if turn < last:
        following = next(
            t for t in range(turn + 1, last + 1) if conversation.messages[t]["role"] == ASSISTANT
        )
        end = template.common(_rendered(template, conversation, following).text, rendered.text)
    return [span for span in _trimmed(template, rendered) if begin <= span[0] < end]


def _trimmed(template: ChatTemplate, rendered: Rendered) -> tuple[Span, ...]:
    spans = []
    for start, end in rendered.marked:
        start += _opened(template, rendered.text, start, end)
        end = _ended(template, rendered.text, start, end)
        if start < end:
            spans.append((start, end))
    return tuple(spans)


def _opened(template: ChatTemplate, text: str, start: int, end: int) -> int:
    """Characters at the beginning of a mark that the template also writes to ask for an answer: they are
    prompt."""
    opening = template.opening
    known = next(n for n in range(len(opening), -1, -1) if text[:start].endswith(opening[:n]))
    rest = opening[known:]
    if not rest:
        return 0
    if text.startswith(rest, start, end):
        return len(rest)
    shared = template.common(rest, text[start:end])
    return max((found.end() for found in template.special.finditer(rest, 0, shared)), default=0)


def _ended(template: ChatTemplate, text: str, start: int, end: int) -> int:
    """The end of a mark: without white space behind a special token, and with the token that ends answers
    where the mark leaves it out."""
    inside = start + len(text[start:end].rstrip())
    if any(found.end() == inside for found in template.special.finditer(text, start, inside)):
        return inside
    token = template.special.match(template.ending.lstrip())
    if token is None:
        return end
    follows = re.compile(r"\s*" + re.escape(token.group())).match(text, end)
    return end if follows is None else follows.end()


def _holds(message: Message, text: str, spans: Sequence[Span]) -> bool:
    marked = "".join(text[start:end] for start, end in spans)
    return bool(spans) and all(part in marked for part in texts_of(message))


def _check_marks(conversation: Conversation, turns: Sequence[int], text: str, spans: Sequence[Span]) -> None:
    for turn in turns:
        if not _holds(conversation.messages[turn], text, spans):
            raise ValueError(
                f"the {{% generation %}} marks of the chat template leave out part of message {turn}, which "
                "would not be learnt. Set chat_template to one that marks whole answers."
            )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
