"""What a PPO run practises: prompts, and a reward for the responses.

Two tasks are built in: class tokens, which need no download and no language, and grade-school maths, whose
answers can be checked. Any other prompt file works with a reward function or reward model of the user's.
"""

from __future__ import annotations

import gzip
import importlib
import inspect
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from multipack.train.ppo.reward import RewardFunction, Row, described

VOCABULARY = 64
"""Token ids of the class-token task: 0 pad, 1 end, 4..7 name a class, 24..31 fill, 32..63 are four classes of
eight."""

_PAD, _END, _FIRST_NAME, _FIRST_FILLER, _FIRST_MEMBER, _CLASSES, _CLASS_SIZE = 0, 1, 4, 24, 32, 4, 8
_LONGEST_PROMPT = 12


@dataclass(frozen=True)
class Task:
    """Prompts and how responses to them are judged."""

    prompts: list[Row]
    """One dict a prompt: `input_ids` and whatever else the reward looks at."""
    reward: RewardFunction
    eos_token_id: int
    pad_token_id: int
    tokenizer: Any = None
    """Of the tasks that are made of text."""
    path: str | None = None
    """File of the prompts, if they come from one."""
    lines: Sequence[int] = ()
    """Line of that file of each prompt."""

    def place(self, row: int) -> str:
        """Where a prompt comes from, for messages."""
        return f"{self.path}, line {self.lines[row]}" if self.path is not None else f"prompt {row}"

    def subset(self, rows: Sequence[int]) -> Task:
        """The same task with some of its prompts."""
        lines = [self.lines[row] for row in rows] if self.path is not None else ()
        return replace(self, prompts=self.prompt_rows(rows), lines=lines)

    def prompt_rows(self, rows: Sequence[int]) -> list[Row]:
        """What the reward sees of some prompts."""
        return [self.prompts[row] for row in rows]

    def response_rows(self, responses: Sequence[Sequence[int] | npt.NDArray[Any]]) -> list[Row]:
        """What the reward sees of their responses."""
        rows: list[Row] = [{"input_ids": list(map(int, ids))} for ids in responses]
        if self.tokenizer is not None:
            for row in rows:
                row["text"] = self.tokenizer.decode(row["input_ids"], skip_special_tokens=True)
        return rows


def class_token_task(num_prompts: int, seed: int, max_new_tokens: int) -> Task:
    """Answer with tokens of the class that the prompt's last token names; chance scores 0.125, perfection 1.

    Prompts have 2 to 12 tokens, so that bins differ. Each response token of the right class earns 1 /
    max_new_tokens.
    """
    rng = np.random.default_rng([seed, 0xC1A55])
    prompts = []
    for length in rng.integers(2, _LONGEST_PROMPT + 1, num_prompts):
        filler = rng.integers(_FIRST_FILLER, _FIRST_MEMBER, length - 1)
        name = _FIRST_NAME + rng.integers(_CLASSES)
        prompts.append({"input_ids": [*map(int, filler), int(name)]})

    def in_class_share(prompts: list[Row], responses: list[Row]) -> list[Any]:
        return [
            _members(response["input_ids"], prompt["input_ids"][-1] - _FIRST_NAME) / max_new_tokens
            for prompt, response in zip(prompts, responses, strict=True)
        ]

    return Task(prompts, in_class_share, eos_token_id=_END, pad_token_id=_PAD)


def _members(token_ids: Sequence[int], wanted_class: int) -> Any:
    """1 where a token belongs to the class, else 0."""
    return (np.asarray(token_ids) - _FIRST_MEMBER) // _CLASS_SIZE == wanted_class


def prompt_file_task(path: str, tokenizer: Any, reward: RewardFunction, prompt_field: str = "prompt") -> Task:
    """Prompts of a jsonl(.gz) file with a user's reward.

    A row has `input_ids`, or text in `prompt_field`, or chat `messages`; messages up to the last user turn
    are the prompt and go through the tokenizer's chat template. All other columns reach the reward.

    Raises:
        ValueError: a row without a prompt or with a malformed one, or a token id beyond the tokenizer's; the
            message names the line.
    """
    prompts, lines = [], []
    for line, row in read_rows(path):
        prompts.append(_with_tokens(row, tokenizer, prompt_field, f"{path}, line {line}"))
        lines.append(line)
    return _text_task(prompts, tokenizer, reward, path, lines)


def gsm8k_task(path: str, tokenizer: Any) -> Task:
    """Grade-school maths (Cobbe et al. 2021): a response earns 1 if its last number is the right one, else 0.

    Args:
        path: jsonl(.gz) with `messages` (question, worked answer) or `question` and `answer`; answers end in
            "#### 72".
        tokenizer: with a chat template the question is a user turn; without one it is "Question: ...
            Answer:".

    Raises:
        ValueError: an answer without "####", so that no response could be right.
    """
    prompts, lines = [], []
    for line, row in read_rows(path):
        where = f"{path}, line {line}"
        question, answer = _question_and_answer(row, where)
        prompt: Row = {"messages": [{"role": "user", "content": question}]}
        if getattr(tokenizer, "chat_template", None) is None:
            prompt = {"prompt": f"Question: {question}\nAnswer:"}
        prompts.append(
            {**_with_tokens(prompt, tokenizer, "prompt", where), "answer": _right_number(answer, where)}
        )
        lines.append(line)
    return _text_task(prompts, tokenizer, answer_reward, path, lines)


def answer_reward(prompts: list[Row], responses: list[Row]) -> list[float]:
    """1 where the last number of a response equals the prompt's `answer`, else 0."""
    return [
        float(last_number(response["text"]) == prompt["answer"])
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def last_number(text: str) -> str | None:
    """The last number in a text, written plainly: "costs $1,250.00." gives "1250"; None without a number."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    if not numbers:
        return None
    plain: str = numbers[-1].replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def load_reward(name: str) -> RewardFunction:
    """The callable called "module:function"; the module must be importable.

    Raises:
        ValueError: no such module or function, the module fails, or it cannot be called with prompts and
            responses.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise ValueError(f"reward is {name!r}; write module:function, such as my_rewards:politeness.")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"reward {name!r} cannot be loaded: {error}. Is the module on PYTHONPATH?"
        ) from error
    except Exception as error:
        raise ValueError(
            f"reward {name!r} cannot be loaded: its module raises {described(error)}. Correct it."
        ) from error
    if not callable(function):
        raise ValueError(f"reward {name!r} is a {type(function).__name__}, which cannot be called.")  # noqa: TRY004  (a wrong value of the key)
    try:
        inspect.signature(function).bind([], [])
    except TypeError as error:
        raise ValueError(
            f"reward {name!r} cannot be called with (prompts, responses): {error}. Both are lists, one entry "
            "a sequence."
        ) from error
    except ValueError:  # a callable of C has no signature to look at
        pass
    return cast(RewardFunction, function)


def read_rows(path: str) -> Iterator[tuple[int, Row]]:
    """Line number and row of each line of a jsonl or jsonl.gz file; blank lines are skipped.

    Raises:
        ValueError: a line that is no JSON object, or a file that is damaged; file and line are named.
    """
    opener = gzip.open if path.endswith(".gz") else open
    line = 0
    with opener(Path(path), "rt", encoding="utf-8") as file:
        try:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    yield line, _parsed(text, f"{path}, line {line}")
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{path} cannot be read after line {line}: {error}. Prompts are UTF-8 text, one JSON object "
                "a line."
            ) from error


def _parsed(text: str, where: str) -> Row:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}.") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}; a prompt must be an object.")  # noqa: TRY004  (of a file)
    return row


def _with_tokens(row: Row, tokenizer: Any, prompt_field: str, where: str) -> Row:
    if "input_ids" in row:
        _check_token_ids(row["input_ids"], len(tokenizer), where)
        return row
    if "messages" in row:
        text = _chat_prompt(row["messages"], tokenizer, where)
        return {**row, "text": text, "input_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}
    if not isinstance(row.get(prompt_field), str):
        raise ValueError(  # noqa: TRY004  (of a file)
            f"{where} has no input_ids, no messages and no text in {prompt_field!r}: no prompt. "
            "prompt_field names the column of the text."
        )
    return {**row, "text": row[prompt_field], "input_ids": tokenizer(row[prompt_field])["input_ids"]}


def _check_token_ids(ids: Any, vocabulary: int, where: str) -> None:
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(
            f"{where}: input_ids is {_short(ids)}, not a list of whole numbers. Give token ids, or text in "
            "another column."
        )
    wrong = [token for token in ids if not 0 <= token < vocabulary]
    if wrong:
        raise ValueError(
            f"{where}: token id {wrong[0]} is outside the tokenizer's 0..{vocabulary - 1}. Was the file made "
            "with another tokenizer? Give the prompt as text."
        )


def _chat_prompt(messages: Any, tokenizer: Any, where: str) -> str:
    """The conversation up to its last user turn, as the chat template writes it."""
    _check_messages(messages, where)
    last_user = max((i for i, turn in enumerate(messages) if turn["role"] == "user"), default=None)
    if last_user is None:
        raise ValueError(f"{where} has messages but no user turn, so there is nothing to answer.")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{where} has messages, and the tokenizer has no chat template to write them with. Use the "
            "tokenizer of a chat model, or prompts of text."
        )
    try:
        text: str = tokenizer.apply_chat_template(
            messages[: last_user + 1], tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise ValueError(
            f"{where}: the chat template refuses the conversation: {error}. Correct or remove it."
        ) from error
    return text


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list):
        raise ValueError(f"{where}: messages is {_short(messages)}, not a list of turns.")  # noqa: TRY004  (of a file)
    for number, turn in enumerate(messages):
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise ValueError(  # noqa: TRY004  (of a file)
                f'{where}: message {number} is {_short(turn)}; a turn is {{"role": ..., "content": ...}}.'
            )
        if not isinstance(turn.get("content"), str) and not turn.get("tool_calls"):
            raise ValueError(
                f"{where}: the content of message {number} ({turn['role']}) is "
                f"{_short(turn.get('content'))}, not text."
            )


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _text_task(
    prompts: list[Row], tokenizer: Any, reward: RewardFunction, path: str, lines: Sequence[int]
) -> Task:
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("The tokenizer has no end token, so no response could ever end: set its eos_token.")
    pad = tokenizer.pad_token_id
    return Task(
        prompts,
        reward,
        eos_token_id=end,
        pad_token_id=end if pad is None else pad,
        tokenizer=tokenizer,
        path=path,
        lines=lines,
    )


def _question_and_answer(row: Row, where: str) -> tuple[str, str]:
    if "messages" in row:
        _check_messages(row["messages"], where)
        turns = {turn["role"]: turn.get("content") for turn in row["messages"]}
        row = {"question": turns.get("user"), "answer": turns.get("assistant")}
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ValueError(f"{where} has no question and answer, neither as columns nor as messages.")  # noqa: TRY004
    return question, answer


def _right_number(answer: str, where: str) -> str:
    _, mark, final = answer.rpartition("####")
    number = last_number(final) if mark else None
    if number is None:
        raise ValueError(f"{where} has no number after '####', so that no response could be right.")
    return number
