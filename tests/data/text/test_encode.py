"""Which tokens a row becomes, and which of them are learnt."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import SHARED
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from multipack.data.text.encode import RowEncoder
from multipack.data.text.files import Block
from multipack.data.text.formats import RowFormat, choose_format
from multipack.data.text.labels import IGNORED, Encoded
from multipack.train.data.builtin import byte_tokenizer

MESSAGES = RowFormat("messages")
ALPACA = RowFormat("alpaca")
TEXT = RowFormat("text")

TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1 🙂"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2"},
]
CHATML = (
    "{% for message in messages %}{{ '<|user|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}{% endif %}"
)


def encode(
    columns: dict[str, list[Any]],
    row_format: RowFormat,
    tokenizer: PreTrainedTokenizerFast,
    *,
    first_row: int = 0,
    **options: Any,
) -> list[Encoded]:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    block = Block(Path("rows.jsonl"), first_row, rows)
    return RowEncoder(row_format, tokenizer, **options).encode(block)


def plain_template() -> PreTrainedTokenizerFast:
    """Tokenizer of bytes whose chat template has no marks."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


def learnt(row: Encoded, tokenizer: PreTrainedTokenizerFast) -> str:
    assert len(row.labels) == len(row.input_ids)
    assert all(label in (IGNORED, token) for label, token in zip(row.labels, row.input_ids, strict=True))
    return str(tokenizer.decode([label for label in row.labels if label != IGNORED]))


def test_alpaca_learns_the_answer_and_its_end() -> None:
    tokenizer = byte_tokenizer()
    rows = {"instruction": ["Add.", "Say hi."], "input": ["1, 2", ""], "output": ["3", "hi"]}
    with_input, without = encode(rows, ALPACA, tokenizer)
    assert tokenizer.decode(with_input.input_ids) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n3<|end|>"
    )
    assert tokenizer.decode(without.input_ids) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\nSay hi.\n\n### Response:\nhi<|end|>"
    )
    assert learnt(with_input, tokenizer) == "3<|end|>"
    assert learnt(without, tokenizer) == "hi<|end|>"


def test_alpaca_needs_no_input_column() -> None:
    tokenizer = byte_tokenizer()
    (row,) = encode({"instruction": ["x"], "output": ["y"]}, ALPACA, tokenizer)
    (same,) = encode({"instruction": ["x"], "input": [None], "output": ["y"]}, ALPACA, tokenizer)
    assert row == same
    assert "### Input" not in tokenizer.decode(row.input_ids)


def test_braces_in_a_cell_are_text() -> None:
    tokenizer = byte_tokenizer()
    (row,) = encode({"instruction": ["{input}"], "input": ["{0}"], "output": ["{}"]}, ALPACA, tokenizer)
    assert "### Instruction:\n{input}\n\n### Input:\n{0}\n" in tokenizer.decode(row.input_ids)
    assert learnt(row, tokenizer) == "{}<|end|>"


def test_a_text_is_learnt_whole_and_ended_once() -> None:
    tokenizer = byte_tokenizer()
    plain, ended, empty = encode({"text": ["ab", "ab<|end|>", ""]}, TEXT, tokenizer)
    assert plain == ended
    assert learnt(plain, tokenizer) == "ab<|end|>"
    assert learnt(empty, tokenizer) == "<|end|>"


@pytest.mark.parametrize("make", [byte_tokenizer, plain_template], ids=["marked", "unmarked"])
def test_messages_learn_assistant_turns_and_their_ends(make: Any) -> None:
    tokenizer = make()
    (row,) = encode({"messages": [TALK]}, MESSAGES, tokenizer)
    assert tokenizer.decode(row.input_ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert learnt(row, tokenizer) == "a1 🙂<|end|>a2<|end|>"  # not the line feed that follows the end


@pytest.mark.parametrize("make", [byte_tokenizer, plain_template], ids=["marked", "unmarked"])
def test_an_answer_may_be_empty_or_absent(make: Any) -> None:
    tokenizer = make()
    silent, asked = encode(
        {"messages": [[TALK[1], {"role": "assistant", "content": ""}], [TALK[1]]]}, MESSAGES, tokenizer
    )
    assert learnt(silent, tokenizer) == "<|end|>"
    assert learnt(asked, tokenizer) == ""


@pytest.mark.parametrize("row_format", [MESSAGES, ALPACA, TEXT], ids=lambda value: value.name)
def test_train_on_inputs_learns_every_token(row_format: RowFormat) -> None:
    whole = {"messages": [TALK], "instruction": ["i"], "output": ["o"], "text": ["t"]}
    rows = {name: whole[name] for name in row_format.columns}
    (row,) = encode(rows, row_format, byte_tokenizer(), train_on_inputs=True)
    (masked,) = encode(rows, row_format, byte_tokenizer())
    assert row.labels == row.input_ids == masked.input_ids


def test_an_empty_batch_is_no_rows() -> None:
    tokenizer = byte_tokenizer()
    assert encode({"messages": []}, MESSAGES, tokenizer) == []
    assert encode({"instruction": [], "output": []}, ALPACA, tokenizer) == []
    assert encode({"text": []}, TEXT, tokenizer) == []


def test_white_space_tokens_with_empty_offsets_stay_on_their_side() -> None:
    # A tokenizer that trims offsets gives the white space before an answer the empty range where the answer
    # starts.
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    (row,) = encode({"messages": [[TALK[1], {"role": "assistant", "content": "  a "}]]}, MESSAGES, tokenizer)
    assert learnt(row, tokenizer) == "  a <|end|>"


def test_a_special_token_inside_an_answer_does_not_end_it() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|user|>' + message['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|user|>' }}{% endif %}"
    )
    (row,) = encode(
        {"messages": [[TALK[1], {"role": "assistant", "content": "a<|end|>b"}, TALK[3]]]}, MESSAGES, tokenizer
    )
    assert learnt(row, tokenizer) == "a<|end|>b\n"


def test_nulls_of_keys_that_other_messages_have_are_not_seen() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ '[tool]' if 'tool' in message else message['content'] }}<|end|>{% endfor %}"
    talk = [
        {"role": "user", "content": "q", "tool": None},
        {"role": "assistant", "content": None, "tool": "t"},
    ]
    (row,) = encode({"messages": [talk]}, MESSAGES, tokenizer)
    assert tokenizer.decode(row.input_ids) == "q<|end|>[tool]<|end|>"
    assert learnt(row, tokenizer) == "[tool]<|end|>"


def test_an_assistant_may_speak_first_where_the_template_shows_its_part() -> None:
    for tokenizer in (byte_tokenizer(), plain_template()):
        (row,) = encode({"messages": [[TALK[2]]]}, MESSAGES, tokenizer)
        assert learnt(row, tokenizer) == "a1 🙂<|end|>"
    needy = plain_template()
    needy.chat_template = "{{ messages[0]['content'][0] }}" + CHATML
    with pytest.raises(ValueError, match="row 0: the assistant speaks first"):
        encode({"messages": [[TALK[2]]]}, MESSAGES, needy)


def test_what_the_template_refuses_names_the_row() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        ValueError, match="row 4: the chat template refuses the conversation: roles must alternate"
    ):
        encode({"messages": [TALK]}, MESSAGES, tokenizer, first_row=4)


@pytest.mark.parametrize(
    ("row_format", "rows", "message"),
    [
        (TEXT, {"text": ["a", None]}, "row 11: text is None, not text"),
        (ALPACA, {"instruction": ["a"], "output": [3]}, "row 10: output is 3, not text"),
        (ALPACA, {"instruction": ["a"], "input": [4], "output": ["b"]}, "row 10: input is 4, not text"),
        (MESSAGES, {"messages": [TALK, "hi"]}, "row 11: the conversation is 'hi'"),
        (MESSAGES, {"messages": [[]]}, "row 10: the conversation has no messages"),
        (MESSAGES, {"messages": [[{"from": "human"}]]}, "row 10: message 0 has the role user and no content"),
        (
            MESSAGES,
            {"messages": [[{"speaker": "a", "text": "b"}]]},
            "row 10: message 0 is .* must have a role",
        ),
        (MESSAGES, {"messages": [["hi"]]}, "row 10: message 0 is 'hi', not a mapping"),
    ],
)
def test_a_wrong_cell_names_its_file_and_row(row_format: RowFormat, rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^rows.jsonl: {message}"):
        encode(rows, row_format, byte_tokenizer(), first_row=10)


def test_a_tokenizer_without_template_or_end_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode({"messages": [TALK]}, MESSAGES, tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"no end-of-sequence token.*special_tokens"):
        encode({"text": ["a"]}, TEXT, tokenizer)


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (["messages", "task"], "messages"),
        (
            ["instruction", "input", "output", "text"],
            "alpaca",
        ),  # alpaca's own text column holds the joined prompt
        (["title", "text"], "text"),
    ],
)
def test_auto_finds_the_format(columns: list[str], name: str) -> None:
    assert choose_format("auto", columns).name == name


def test_names_of_axolotl_mean_ours() -> None:
    talk = choose_format("chat_template", ["talk"], field_messages="talk")
    assert (talk.name, talk.columns) == ("messages", ("talk",))
    body = choose_format("completion", ["body"], field="body")
    assert (body.name, body.columns) == ("text", ("body",))


def test_missing_columns_are_named_with_those_found() -> None:
    with pytest.raises(
        ValueError,
        match=r"reads the columns instruction, output, and output is missing: .* instruction, answer",
    ):
        choose_format("alpaca", ["instruction", "answer"])
    with pytest.raises(
        ValueError, match=r"columns .prompt, turns. fit no format.*alpaca: instruction, output"
    ):
        choose_format("auto", ["prompt", "turns"])


@pytest.mark.shared
@pytest.mark.parametrize("name", ["self_instruct_human", "oasst1_en_val_threads", "gsm8k_test"])
def test_learnt_tokens_equal_an_independent_count(name: str) -> None:
    # The arrays were counted from ChatML written out by hand, without the system turn of 21 tokens that the
    # template adds.
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "data/tokenizers/smollm2")
    with gzip.open(SHARED / f"data/text/{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        talks = [json.loads(line)["messages"] for line in lines]
    rows = encode({"messages": talks}, MESSAGES, tokenizer)
    lengths = np.load(SHARED / f"data/lengths/{name}.npy").astype(int)
    targets = np.load(SHARED / f"data/lengths/{name}__assistant.npy").astype(int)
    assert [len(row.input_ids) for row in rows] == (lengths + 21).tolist()
    assert [sum(label != IGNORED for label in row.labels) for row in rows] == targets.tolist()
