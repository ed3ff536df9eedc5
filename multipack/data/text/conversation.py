"""Conversations of every dialect as one: messages of role and content, and which of them are learnt.

ShareGPT's from and value, OpenAI's content parts and weights, tools as JSON text, nulls that a table has for
absent keys: they are translated here or refused with the message they stand in. Nothing here knows templates
or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

ASSISTANT = "assistant"
REASONING = ("reasoning_content", "thinking", "reasoning")
_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "model": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}
"""What ShareGPT files call the roles that templates know."""
_FLAGS = ("weight", "loss_weight", "train", "training", "loss")
_DETAILS = ("train_detail", "training_detail")
_RESERVED = frozenset(
    {
        *("messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "return_assistant_tokens_mask", "tokenize"),
    }
)
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")


@dataclass(frozen=True)
class Conversation:
    """What a chat template is given, and the messages that are learnt from it."""

    messages: list[Message]
    learnt: frozenset[int]
    """Numbers of the messages that are learnt: assistant's, not switched off."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the template: tools, documents, and those of chat_template_kwargs."""
    all_learnt: bool = True
    """Every assistant message is learnt."""
    switched_off: bool = False
    """A message says that it is not to be learnt."""


def conversation_of(
    row: Mapping[str, Any],
    names: Mapping[str, str],
    ignored: frozenset[str],
    *,
    train_on: str = "all",
    first_learnt: int = 0,
) -> Conversation:
    """Read the conversation of a row.

    Args:
        row: `messages`, and maybe `tools`, `documents`, `chat_template_kwargs`, `system`.
        names: key of a message in the source -> role, content or another key.
        ignored: keys of messages to leave out.
        train_on: "all" assistant messages are learnt, or the "last".
        first_learnt: messages before this one are prompts.

    Raises:
        TypeError: something is of another type than its place asks for.
        ValueError: a message lacks its role or content, or says something that cannot be obeyed.
    """
    cell = _opened(row.get("messages"), "the conversation")
    if not isinstance(cell, list | tuple):
        raise TypeError(f"the conversation is {_short(cell)}, not a list of messages. Correct or remove it.")
    if not cell:
        raise ValueError("the conversation has no messages. Remove the row.")
    messages: list[Message] = []
    flags: list[bool | None] = []
    for turn, given in enumerate(cell):
        message, flag = _message(given, turn, names, ignored)
        messages.append(message)
        flags.append(flag)
    answers = [turn for turn, message in enumerate(messages) if message["role"] == ASSISTANT]
    kept = [turn for turn in answers if turn >= first_learnt and flags[turn] is not False]
    if train_on == "last":
        kept = [turn for turn in kept if turn == answers[-1]]
    learnt = frozenset(kept)
    options = _options(row)
    system = row.get("system")
    if system:
        if not isinstance(system, str):
            raise TypeError(f"system is {_short(system)}, not text. Correct or remove it.")
        if messages[0]["role"] in ("system", "developer"):
            raise ValueError(
                "the column system and the first message both give a system prompt. Keep one of them."
            )
        messages = [{"role": "system", "content": system}, *messages]
        learnt = frozenset(turn + 1 for turn in learnt)
    return Conversation(messages, learnt, options, len(kept) == len(answers), False in flags)


def without_nulls(value: Any) -> Any:
    """The value without the keys that are null: a table has them for keys which only other rows have."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def _message(
    given: Any, turn: int, names: Mapping[str, str], ignored: frozenset[str]
) -> tuple[Message, bool | None]:
    if not isinstance(given, Mapping):
        raise TypeError(f"message {turn} is {_short(given)}, not a mapping of role and content. Correct it.")
    found = {names.get(key, key): item for key, item in given.items() if key not in ignored}
    message: Message = without_nulls(found)
    if "role" not in message and "from" in message:  # ShareGPT's names
        message["role"] = message.pop("from")
        if "value" in message and "content" not in message:
            message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"message {turn} is {_short(given)}; it must have a role and a content. Name its keys with "
            "fields."
        )
    if role == "function_call":
        raise ValueError(
            f"message {turn} has the role function_call. Write it as an assistant message with tool_calls."
        )
    message["role"] = _ROLES.get(role, role)
    flag = _flag(message, turn)
    for key in _MEDIA:
        if message.pop(key, None):
            raise ValueError(f"message {turn} has {key}, which are not read: only text is. Remove the row.")
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], turn)
        if not message["tool_calls"]:
            del message["tool_calls"]
    message["content"] = _content(message, turn, stated="content" in found)
    return {"role": message.pop("role"), "content": message.pop("content"), **message}, flag


def _content(message: Message, turn: int, *, stated: bool) -> str | list[Any] | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if stated or "tool_calls" in message or any(key in message for key in REASONING):
            return None
        raise ValueError(f"message {turn} has the role {message['role']} and no content. Correct it.")
    if not isinstance(content, list):
        raise TypeError(f"message {turn}: its content is {_short(content)}, not text. Correct it.")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise ValueError(
                f"message {turn}: its content has a part of type {kind!r}, and only parts of text are read. "
                "Remove the row."
            )
        texts.append(text)
    return "".join(texts)


def _flag(message: Message, turn: int) -> bool | None:
    """Whether the message says that it is learnt; None: it does not say."""
    for key in _DETAILS:
        if message.pop(key, None):
            raise ValueError(
                f"message {turn} has {key}, and parts of a message cannot be switched. Split the message."
            )
    said = {}
    for key in _FLAGS:
        if key in message:
            said[key] = switch(message.pop(key), f"message {turn}: {key}")
    if len(set(said.values())) > 1:
        raise ValueError(f"message {turn} has {said}, which contradict each other. Keep one of them.")
    flag = next(iter(said.values()), None)
    if flag and message["role"] != ASSISTANT:
        raise ValueError(
            f"message {turn} is to be learnt ({next(iter(said))}) and has the role {message['role']}: only "
            "assistant messages are. Remove the key."
        )
    return flag


def switch(value: Any, name: str) -> bool:
    """On or off as files write it: true, false, 1, 0.

    Raises:
        ValueError: a fraction, or no number at all.
    """
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise ValueError(f"{name} is {_short(value)}; it can be 0 or 1 (false or true), not a part. Correct it.")


def _calls(calls: Any, turn: int) -> list[Any]:
    calls = _opened(calls, f"message {turn}: tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise TypeError(
            f"message {turn}: its tool_calls are {_short(calls)}, not a list of calls. Correct it."
        )
    return list(calls)


def _options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the template beside the messages. Empty ones are none."""
    options: dict[str, Any] = {}
    for name in ("tools", "documents"):
        value = without_nulls(_opened(row.get(name), name))
        if not value:
            continue
        if not isinstance(value, list):
            raise TypeError(f"{name} is {_short(value)}, not a list. Correct or remove it.")
        value = [_opened(item, f"one of {name}") for item in value]
        if not all(isinstance(item, Mapping) for item in value):
            raise TypeError(f"{name} holds {_short(value)}; each must be a mapping. Correct or remove it.")
        options[name] = value
    more = without_nulls(_opened(row.get("chat_template_kwargs"), "chat_template_kwargs"))
    if more:
        if not isinstance(more, Mapping):
            raise TypeError(f"chat_template_kwargs is {_short(more)}, not a mapping. Correct or remove it.")
        reserved = _RESERVED & {*more}
        if reserved:
            raise ValueError(
                f"chat_template_kwargs has {', '.join(sorted(reserved))}, which is not its to set."
            )
        options |= more
    return options


def _opened(value: Any, name: str) -> Any:
    """What a text of JSON says; tables keep nested values as such texts. Anything else is as it is."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise TypeError(
            f"{name} is {_short(value)}, which is text but not JSON ({error.msg}). Correct it."
        ) from None


def _short(value: Any) -> str:
    """A value in an error: its beginning."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def texts_of(message: Message) -> Sequence[str]:
    """The texts of a message that must stand in what a template writes of it: thinking, answer, names of
    functions."""
    texts = []
    content = message.get("content")
    if isinstance(content, str):
        for part in content.split("</think>"):
            texts.append(part.replace("<think>", "").strip())
    reasoning = next((message[key] for key in REASONING if isinstance(message.get(key), str)), "")
    texts.append(reasoning.strip())
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            texts.append(function["name"])
    return [text for text in texts if text]
