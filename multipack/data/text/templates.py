"""A chat template and what can be known of it: what it reads, how it opens an answer and how it ends one.

What is known comes from rendering short conversations, since a template is a program: only its output says
what it does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, meta, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from multipack.data.text.conversation import ASSISTANT, REASONING, Message

Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FAILURES = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError),
)
"""What a template can raise about a conversation that it was not written for."""
_ASKED, _ANSWERED = "Zwetschgenfrage", "Quittenantwort"
_PROBE: list[Message] = [
    {"role": "user", "content": _ASKED},
    {"role": ASSISTANT, "content": _ANSWERED},
]
_THINKING = ("enable_thinking", "thinking")
"""Switches that templates have for answers with or without thinking."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as the template writes it, and the characters that its generation marks enclose."""

    text: str
    marked: tuple[Span, ...] = ()


class ChatTemplate:
    """One chat template of a tokenizer.

    Args:
        tokenizer: gives its special tokens.
        source: the Jinja text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self.source = source
        self.marked = _GENERATION.search(source) is not None
        """It says by {% generation %} what the assistant writes."""
        self._tokens = dict(tokenizer.special_tokens_map)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= {token for token in self._tokens.values() if isinstance(token, str)}
        by_length = sorted((re.escape(token) for token in special if token), key=len, reverse=True)
        self.special = re.compile("|".join(by_length) or r"(?!)")
        """Matches a special token."""
        self._arguments_as_text = False

    def render(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        *,
        prompt: bool = False,
        **more: Any,
    ) -> Rendered:
        """Write the conversation, with the opening of an answer after it if `prompt`.

        Raises:
            ValueError: the template refuses it.
        """
        try:
            return self._render(messages, options, prompt, more)
        except TypeError:
            # Some templates join the arguments of a call to a text: they want JSON where others want a
            # mapping.
            if self._arguments_as_text or not any("tool_calls" in message for message in messages):
                raise
            self._arguments_as_text = True
            try:
                return self._render(messages, options, prompt, more)
            except TypeError:
                self._arguments_as_text = False
                raise

    def _render(
        self, messages: Sequence[Message], options: Mapping[str, Any], prompt: bool, more: Mapping[str, Any]
    ) -> Rendered:
        given = [self._as_wanted(message) for message in messages]
        return self._write(given, {**options, **more}, prompt)

    def _write(self, messages: list[Message], options: Mapping[str, Any], prompt: bool) -> Rendered:
        texts, marks = render_jinja_template(
            conversations=[messages],
            chat_template=self.source,
            return_assistant_tokens_mask=self.marked,
            add_generation_prompt=prompt,
            **self._tokens | dict(options),
        )
        return Rendered(texts[0], tuple(sorted(marks[0])) if marks else ())

    def _as_wanted(self, message: Message) -> Message:
        """The message with its content and its calls in the form that this template reads."""
        changed = dict(message)
        if self.wants_parts and isinstance(message.get("content"), str):
            changed["content"] = [{"type": "text", "text": message["content"]}]
        if "tool_calls" in message:
            changed["tool_calls"] = [_call(call, self._arguments_as_text) for call in message["tool_calls"]]
        return changed

    @cached_property
    def wants_parts(self) -> bool:
        """Contents must be lists of parts: given as texts they do not appear in what the template writes."""
        if self._shows(_PROBE):
            return False
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in _PROBE]
        return self._shows(parts)

    def _shows(self, messages: list[Message]) -> bool:
        try:
            text = self._write(messages, {}, False).text
        except _FAILURES:
            return False
        return _ASKED in text and _ANSWERED in text

    @cached_property
    def opening(self) -> str:
        """What it adds to a conversation so that the model answers; empty: nothing, or it cannot be found
        out."""
        try:
            without = self.render(_PROBE[:1], {}).text
            asked = self.render(_PROBE[:1], {}, prompt=True).text
        except _FAILURES:
            return ""
        return asked[self.common(without, asked) :]

    @cached_property
    def ending(self) -> str:
        """What it writes after an answer that nothing follows; empty: nothing, or it cannot be found out."""
        try:
            text = self.render(_PROBE, {}).text
        except _FAILURES:
            return ""
        return text.rpartition(_ANSWERED)[2]

    def common(self, a: str, b: str) -> int:
        """Characters that both texts begin with, special tokens counted whole."""
        length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for text in (a, b):
            for found in self.special.finditer(text, max(0, length - 256), length + 256):
                if found.start() < length < found.end():
                    return found.start()
        return length

    def switches(self) -> list[dict[str, bool]]:
        """Arguments that ask it for an answer without thinking or with it, of those that it reads."""
        return [{name: on} for name in _THINKING if name in self.variables for on in (False, True)]

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that it takes from its caller."""
        return frozenset(meta.find_undeclared_variables(self._tree))

    @cached_property
    def keys(self) -> frozenset[str]:
        """Names of keys and attributes that stand anywhere in it."""
        keys = {node.attr for node in self._tree.find_all(nodes.Getattr)}
        keys |= {node.value for node in self._tree.find_all(nodes.Const) if isinstance(node.value, str)}
        if keys & {*REASONING}:
            keys |= {*REASONING}  # transformers gives each of them under the names of the others
        return frozenset(keys)

    @cached_property
    def _tree(self) -> nodes.Template:
        tree: nodes.Template = _compile_jinja_template(self.source).environment.parse(self.source)
        return tree


def check_source(source: str) -> None:
    """Raise ValueError for a text that is no Jinja template."""
    try:
        _compile_jinja_template(source)
    except TemplateError as error:
        raise ValueError(f"the chat template is not Jinja: {error}") from None


FAILURES = _FAILURES


def _call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    """A call whose arguments are a mapping (what most templates read), or JSON text."""
    function = call.get("function")
    inner = function if isinstance(function, Mapping) else call
    arguments = inner.get("arguments")
    if as_text and isinstance(arguments, Mapping | list):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            opened = json.loads(arguments)
        except json.JSONDecodeError:
            opened = arguments  # a call by free text
        arguments = opened if isinstance(opened, dict) else arguments
    if "arguments" in inner:
        inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if isinstance(function, Mapping) else dict(inner)
