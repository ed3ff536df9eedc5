"""What a PPO run practises: prompts, and a reward for the responses.

Two tasks are built in: class tokens, which need no download and no language, and grade-school maths, whose answers can
be checked. Any other prompt file works with a reward function or reward model of the user's.
"""

from __future__ import annotations

import gzip
import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from multipack.train.ppo.reward import RewardFunction, Row

VOCABULARY = 64
"""Token ids of the class-token task: 0 pad, 1 end, 4..7 name a class, 24..31 fill, 32..63 are four classes of eight."""

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

    Prompts have 2 to 12 tokens, so that bins differ. Each response token of the right class earns 1 / max_new_tokens.
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

    A row has `input_ids`, or text in `prompt_field`, or chat `messages`; messages up to the last user turn are the prompt
    and go through the tokenizer's chat template. All other columns reach the reward.

    Raises:
        ValueError: a row without a prompt, or text without a tokenizer; the message names the line.
    """
    prompts = []
    for line, row in enumerate(read_rows(path), start=1):
        prompts.append(_with_tokens(row, tokenizer, prompt_field, f"{path}, line {line}"))
    return _text_task(prompts, tokenizer, reward)


def gsm8k_task(path: str, tokenizer: Any) -> Task:
    """Grade-school maths (Cobbe et al. 2021): a response earns 1 if its last number is the right one, else 0.

    Args:
        path: jsonl(.gz) with `messages` (question, worked answer) or `question` and `answer`; answers end in "#### 72".
        tokenizer: with a chat template the question is a user turn; without one it is "Question: ... Answer:".

    Raises:
        ValueError: an answer without "####", so that no response could be right.
    """
    prompts = []
    for line, row in enumerate(read_rows(path), start=1):
        where = f"{path}, line {line}"
        question, answer = _question_and_answer(row, where)
        prompt: Row = {"messages": [{"role": "user", "content": question}]}
        if getattr(tokenizer, "chat_template", None) is None:
            prompt = {"prompt": f"Question: {question}\nAnswer:"}
        prompts.append(
            {**_with_tokens(prompt, tokenizer, "prompt", where), "answer": _right_number(answer, where)}
        )
    return _text_task(prompts, tokenizer, answer_reward)


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
        ValueError: no such module or function, or it cannot be called.
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
    if not callable(function):
        raise ValueError(f"reward {name!r} is a {type(function).__name__}, which cannot be called.")  # noqa: TRY004
    return cast(RewardFunction, function)


def read_rows(path: str) -> list[Row]:
    """All rows of a jsonl or jsonl.gz file.

    Raises:
        ValueError: a line that is no JSON object; it is named.
    """
    opener = gzip.open if path.endswith(".gz") else open
    rows = []
    with opener(Path(path), "rt", encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {line} is no JSON: {error}.") from None
            if not isinstance(row, dict):
                raise ValueError(  # noqa: TRY004
                    f"{path}, line {line} is a {type(row).__name__}; a prompt must be an object."
                )
            rows.append(row)
    return rows


def _with_tokens(row: Row, tokenizer: Any, prompt_field: str, where: str) -> Row:
    if "input_ids" in row:
        return row
    if tokenizer is None:
        raise ValueError(f"{where} holds text, and there is no tokenizer: give one, or rows with input_ids.")
    if "messages" in row:
        turns = row["messages"]
        last_user = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=None)
        if last_user is None:
            raise ValueError(f"{where} has messages but no user turn, so there is nothing to answer.")
        text = tokenizer.apply_chat_template(
            turns[: last_user + 1], tokenize=False, add_generation_prompt=True
        )
        return {**row, "text": text, "input_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}
    if not isinstance(row.get(prompt_field), str):
        raise ValueError(f"{where} has no input_ids, no messages and no text in {prompt_field!r}: no prompt.")  # noqa: TRY004
    return {**row, "text": row[prompt_field], "input_ids": tokenizer(row[prompt_field])["input_ids"]}


def _text_task(prompts: list[Row], tokenizer: Any, reward: RewardFunction) -> Task:
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
    )


def _question_and_answer(row: Row, where: str) -> tuple[str, str]:
    if "messages" in row:
        turns = {turn["role"]: turn["content"] for turn in row["messages"]}
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
