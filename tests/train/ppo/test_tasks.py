"""The built-in tasks and prompt files."""

from __future__ import annotations

import gzip
import json
import operator

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
        ('{"messages": ["hello"]}', "line 1: message 0 is 'hello'; a turn is"),
        ('{"messages": "hello"}', "line 1: messages is 'hello', not a list"),
        ('{"messages": [{"content": "x"}]}', "line 1: message 0 is {'content': 'x'}; a turn is"),
        ('{"messages": [{"role": "user", "content": 7}]}', r"content of message 0 \(user\) is 7, not text"),
        ('{"input_ids": "abc"}', "line 1: input_ids is 'abc', not a list of whole numbers"),
        ('{"input_ids": [1, 2.5]}', "not a list of whole numbers"),
        ('{"input_ids": [3, true]}', "not a list of whole numbers"),
        ('{"input_ids": [99999, 3]}', r"line 1: token id 99999 is outside the tokenizer's 0..\d+"),
        ('{"input_ids": [-1]}', "token id -1 is outside"),
    ],
)
def test_rows_without_a_prompt_are_named(tmp_path, row, message):
    path = tmp_path / "p.jsonl"
    path.write_text(row + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        prompt_file_task(str(path), byte_tokenizer(), lambda prompts, responses: [])
    assert "p.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_blank_lines_count_as_lines(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n\n{"prompt": "b"}\n{}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 5 has no input_ids"):
        prompt_file_task(str(path), byte_tokenizer(), lambda prompts, responses: [])
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n', encoding="utf-8")
    task = prompt_file_task(str(path), byte_tokenizer(), lambda prompts, responses: [])
    assert [task.place(row) for row in range(2)] == [f"{path}, line 1", f"{path}, line 3"]
    assert task.subset([1]).place(0) == f"{path}, line 3"


@pytest.mark.parametrize("damage", ["not UTF-8", "cut short"])
def test_a_damaged_file_is_named(tmp_path, damage):
    whole = gzip.compress(b'{"prompt": "a"}\n' * 9999)
    path = tmp_path / ("p.jsonl" if damage == "not UTF-8" else "p.jsonl.gz")
    path.write_bytes(b'{"prompt": "a"}\n\xff\xfe\n' if damage == "not UTF-8" else whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{path} cannot be read after line"):
        prompt_file_task(str(path), byte_tokenizer(), lambda prompts, responses: [])


def test_messages_need_a_chat_template(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    path = write_rows(tmp_path / "p.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    with pytest.raises(ValueError, match="line 1 has messages, and the tokenizer has no chat template"):
        prompt_file_task(path, tokenizer, lambda prompts, responses: [])


def test_what_the_template_refuses_is_named(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = write_rows(tmp_path / "p.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    with pytest.raises(ValueError, match="line 1: the chat template refuses the conversation: roles must"):
        prompt_file_task(path, tokenizer, lambda prompts, responses: [])


def test_a_reward_is_known_to_be_callable_before_it_is_called(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_one.py").write_text("def reward(completions): return []\n")
    (tmp_path / "broken.py").write_text("import json\nnot_there\n")
    with pytest.raises(
        ValueError, match=r"cannot be called with \(prompts, responses\): too many positional"
    ):
        load_reward("of_one:reward")
    with pytest.raises(ValueError, match=r"its module raises NameError: .*broken.py, line 2\)"):
        load_reward("broken:reward")


def test_answers_without_a_number_are_named(tmp_path):
    path = write_rows(tmp_path / "m.jsonl", [{"question": "2 + 2?", "answer": "four"}])
    with pytest.raises(ValueError, match="line 1 has no number after '####'"):
        gsm8k_task(path, byte_tokenizer())


def test_reward_functions_are_found_by_name():
    assert load_reward("operator:add") is operator.add
    for name, message in (
        ("json.dumps", "write module:function"),
        ("json:nothing", "cannot be loaded"),
        ("no_such_module:f", "PYTHONPATH"),
        ("json:__name__", "is a str, which cannot be called"),
    ):
        with pytest.raises(ValueError, match=message):
            load_reward(name)
