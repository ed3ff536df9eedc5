"""The built-in tasks and prompt files."""

from __future__ import annotations

import gzip
import json

import pytest
from helpers import SHARED

from multipack.train.data.builtin import byte_tokenizer
from multipack.train.ppo.tasks import (
    VOCABULARY,
    answer_reward,
    class_token_task,
    gsm8k_task,
    last_number,
    load_reward,
    prompt_file_task,
)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_class_token_prompts():
    task = class_token_task(500, seed=3, max_new_tokens=16)
    prompts = [prompt["input_ids"] for prompt in task.prompts]
    assert {len(prompt) for prompt in prompts} == set(range(2, 13))
    assert {prompt[-1] for prompt in prompts} == {4, 5, 6, 7}
    assert all(24 <= token < 32 for prompt in prompts for token in prompt[:-1])
    again = class_token_task(500, seed=3, max_new_tokens=16)
    assert [prompt["input_ids"] for prompt in again.prompts] == prompts
    assert class_token_task(500, seed=4, max_new_tokens=16).prompts != task.prompts


def test_class_token_reward_by_hand():
    task = class_token_task(1, seed=0, max_new_tokens=4)
    prompts = [{"input_ids": [24, 6]}] * 2  # the third class: tokens 48..55
    rewards = task.reward(prompts, task.response_rows([[48, 47, 55, 56], [50, 1]]))
    assert [row.tolist() for row in rewards] == [[0.25, 0, 0.25, 0], [0.25, 0]]


def test_class_token_chance_and_perfection():
    task = class_token_task(40, seed=0, max_new_tokens=16)
    every_token = task.reward(task.prompts, task.response_rows([range(VOCABULARY)] * 40))
    assert [row.sum() * 16 / VOCABULARY for row in every_token] == [0.125] * 40
    perfect = [[32 + 8 * (prompt["input_ids"][-1] - 4)] * 16 for prompt in task.prompts]
    assert [row.sum() for row in task.reward(task.prompts, task.response_rows(perfect))] == [1.0] * 40


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it costs $1,250.00.", "1250"),
        ("1 + 2 = 3 apples", "3"),
        ("minus -4.50 degrees", "-4.5"),
        ("#### 72", "72"),
        ("10", "10"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_gsm8k_from_both_layouts(tmp_path):
    rows = [
        {"question": "How many?", "answer": "6*2=<<6*2=12>>12\n#### 12"},
        {
            "messages": [
                {"role": "user", "content": "And?"},
                {"role": "assistant", "content": "#### 1,000"},
            ]
        },
    ]
    tokenizer = byte_tokenizer()
    task = gsm8k_task(write_rows(tmp_path / "maths.jsonl", rows), tokenizer)
    assert [prompt["answer"] for prompt in task.prompts] == ["12", "1000"]
    assert tokenizer.decode(task.prompts[0]["input_ids"]) == "<|bos|><|user|>How many?<|end|><|assistant|>"
    responses = [tokenizer.encode("It is 12."), tokenizer.encode("1000 or 999")]
    answered = task.response_rows([[*ids, task.eos_token_id] for ids in responses])
    assert answered[0]["text"] == "It is 12."
    assert task.reward(task.prompts, answered) == [1.0, 0.0]


def test_gsm8k_without_chat_template(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    path = write_rows(tmp_path / "maths.jsonl", [{"question": "2 + 2?", "answer": "#### 4"}])
    task = gsm8k_task(path, tokenizer)
    assert tokenizer.decode(task.prompts[0]["input_ids"]) == "Question: 2 + 2?\nAnswer:"


@pytest.mark.shared
def test_gsm8k_real_file_answers_its_own_questions():
    task = gsm8k_task(str(SHARED / "data/text/gsm8k_test.jsonl.gz"), byte_tokenizer())
    assert len(task.prompts) == 1319
    with gzip.open(SHARED / "data/text/gsm8k_test.jsonl.gz", "rt", encoding="utf-8") as file:
        worked = [{"text": json.loads(line)["messages"][-1]["content"]} for line in file]
    assert answer_reward(task.prompts, worked) == [1.0] * 1319
    assert sum(answer_reward(task.prompts, worked[1:] + worked[:1])) < 100  # others' answers are wrong


def test_prompt_file_in_three_layouts(tmp_path):
    rows = [
        {"prompt": "Hi", "tone": "polite"},
        {"input_ids": [5, 6, 7]},
        {
            "messages": [
                {"role": "user", "content": "A"},
                {"role": "assistant", "content": "B"},
                {"role": "user", "content": "C"},
                {"role": "assistant", "content": "left out"},
            ]
        },
    ]
    tokenizer = byte_tokenizer()
    task = prompt_file_task(write_rows(tmp_path / "p.jsonl", rows), tokenizer, lambda prompts, responses: [])
    assert task.prompts[0]["tone"] == "polite"
    assert task.prompts[0]["input_ids"] == tokenizer("Hi")["input_ids"]
    assert task.prompts[1]["input_ids"] == [5, 6, 7]
    assert tokenizer.decode(task.prompts[2]["input_ids"]) == (
        "<|bos|><|user|>A<|end|><|assistant|>B<|end|><|user|>C<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 1 is no JSON"),
        ("[1, 2]", "line 1 is a list; a prompt must be an object"),
        ('{"question": "x"}', "no input_ids, no messages and no text in 'prompt'"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "messages but no user turn"),
    ],
)
def test_rows_without_a_prompt_are_named(tmp_path, row, message):
    path = tmp_path / "p.jsonl"
    path.write_text(row + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        prompt_file_task(str(path), byte_tokenizer(), lambda prompts, responses: [])


def test_answers_without_a_number_are_named(tmp_path):
    path = write_rows(tmp_path / "m.jsonl", [{"question": "2 + 2?", "answer": "four"}])
    with pytest.raises(ValueError, match="line 1 has no number after '####'"):
        gsm8k_task(path, byte_tokenizer())


def test_reward_functions_are_found_by_name():
    assert load_reward("json:dumps") is json.dumps
    for name, message in (
        ("json.dumps", "write module:function"),
        ("json:nothing", "cannot be loaded"),
        ("no_such_module:f", "PYTHONPATH"),
        ("json:__name__", "is a str, which cannot be called"),
    ):
        with pytest.raises(ValueError, match=message):
            load_reward(name)
