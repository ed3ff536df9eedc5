"""Rows and a tokenizer from the installed Python alone."""

from __future__ import annotations

import bisect
import heapq
import inspect
from pathlib import Path

import pytest

from multipack.train.data import builtin as builtin_data
from multipack.train.data.builtin import builtin_digest, builtin_rows, byte_tokenizer


@pytest.fixture(scope="module")
def rows() -> list[dict[str, list[dict[str, str]]]]:
    return builtin_rows(2048)


def num_bytes(row: dict[str, list[dict[str, str]]]) -> int:
    return sum(len(message["content"].encode()) for message in row["messages"])


def test_a_few_thousand_conversations_of_varied_length(rows: list[dict[str, list[dict[str, str]]]]) -> None:
    lengths = sorted(num_bytes(row) for row in rows)
    assert 2000 < len(rows) < 10_000
    assert lengths[len(lengths) // 20] < 150
    assert lengths[-len(lengths) // 20] > 1000
    assert lengths[-1] <= 2048 - 64  # what a chat template adds fits in 64 bytes
    assert {tuple(message["role"] for message in row["messages"]) for row in rows} == {("user", "assistant")}


def test_a_docstring_answers_its_signature(rows: list[dict[str, list[dict[str, str]]]]) -> None:
    prompt = f"Write the docstring of heapq.merge:\ndef merge{inspect.signature(heapq.merge)}:"
    answers = [row["messages"][1]["content"] for row in rows if row["messages"][0]["content"] == prompt]
    assert answers == [inspect.getdoc(heapq.merge)]


def test_a_source_answers_its_name(rows: list[dict[str, list[dict[str, str]]]]) -> None:
    answers = [
        row["messages"][1]["content"]
        for row in rows
        if row["messages"][0]["content"] == "Show the source of bisect.bisect_right."
    ]
    written = Path(bisect.__file__).read_text(encoding="utf-8")
    (answer,) = answers
    assert answer.startswith("def bisect_right(a, x, lo=0, hi=None, *, key=None):\n")
    assert answer.endswith("return lo")
    assert answer in written


def test_the_same_python_gives_the_same_rows(rows: list[dict[str, list[dict[str, str]]]]) -> None:
    assert builtin_rows(2048) == rows
    assert builtin_digest(2048) == builtin_digest(2048)
    assert builtin_digest(2048) != builtin_digest(1024)


def test_longer_rows_come_with_more_room() -> None:
    long = [num_bytes(row) for row in builtin_rows(16_384)]
    assert max(long) > 8192
    assert sum(length > 2048 for length in long) > 100


def test_no_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_data, "_sources", lambda: [Path(bisect.__file__)])
    with pytest.raises(ValueError, match=r"no row of at most 70 bytes. Raise sequence_len"):
        builtin_rows(70)


def test_the_tokenizer_is_one_token_a_byte() -> None:
    tokenizer = byte_tokenizer()
    for text in ("plain", "  two  spaces\n\ttab", "über 🙂", "\x00\x7f"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 262
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3


def test_the_chat_template_opens_and_closes_turns() -> None:
    tokenizer = byte_tokenizer()
    conversation = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert (
        tokenizer.apply_chat_template(conversation, tokenize=False)
        == "<|bos|><|user|>q<|end|><|assistant|>a<|end|>"
    )
    opened = tokenizer.apply_chat_template(conversation[:1], tokenize=False, add_generation_prompt=True)
    assert opened == "<|bos|><|user|>q<|end|><|assistant|>"
