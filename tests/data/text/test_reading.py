# ruff: noqa: RUF001 (letters of templates, and Greek ones that stand for special tokens)
"""Small files of every kind: their tokens and labels worked out by hand, and the same for training and for
`multipack inspect`."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from multipack.cli import main
from multipack.cli.scan import Reading, scan, tokenizer_of
from multipack.data.text.encode import RowEncoder
from multipack.data.text.files import read_blocks
from multipack.data.text.formats import choose_format
from multipack.train.config import DatasetConfig, TrainConfig
from multipack.train.data.builtin import byte_tokenizer
from multipack.train.data.prepare import prepare_data

SPECIAL = {"β": 257, "ε": 258, "σ": 259, "υ": 260, "α": 261}
"""Tokens <|bos|>, <|end|>, <|system|>, <|user|>, <|assistant|> of the tokenizer of bytes."""


def byte_id(byte: int) -> int:
    """Place of a byte in the sorted alphabet of byte-level BPE: printable Latin-1 first, the others
    behind."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [other for other in range(256) if other not in printable]
    return printable.index(byte) if byte in printable else len(printable) + others.index(byte)


def by_hand(text: str) -> tuple[list[int], list[int]]:
    """Tokens and labels of a text in which Greek letters are special tokens and «» enclose what is learnt."""
    ids, labels, on = [], [], False
    for letter in text:
        if letter in "«»":
            on = letter == "«"
            continue
        tokens = [SPECIAL[letter]] if letter in SPECIAL else [byte_id(byte) for byte in letter.encode()]
        ids += tokens
        labels += tokens if on else [-100] * len(tokens)
    return ids, labels


def test_the_alphabet_is_as_worked_out() -> None:
    # "!" is the first printable byte, "a" the 65th; 188 are printable, then come the bytes 0 to 32.
    assert [byte_id(ord(letter)) for letter in "!a\n "] == [0, 64, 198, 220]
    assert byte_tokenizer()("a b")["input_ids"] == [64, 220, 65]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zst(raw: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return bytes(sink.getvalue())


def talk(*turns: str, **more: Any) -> dict[str, Any]:
    """Messages by turns: u and a in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)], **more}


def flagged(**flag: Any) -> dict[str, Any]:
    row = talk("p", "bad", "q", "ok")
    row["messages"][1].update(flag)
    return row


TEXTS = [{"text": "ab"}, {"text": "2024-01-05"}]
AS_TEXTS = ["«abε»", "«2024-01-05ε»"]
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
PARTS = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
}
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\nadd\n\n### Response:\n«3ε»"
)

ROWS: dict[str, tuple[list[dict[str, Any]], list[str], dict[str, Any]]] = {
    "texts, one like a date": (TEXTS, AS_TEXTS, {}),
    "a text that has its end": ([{"text": "abε".replace("ε", "<|end|>")}], ["«abε»"], {}),
    "letters of several bytes": ([{"text": "é🙂"}], ["«é🙂ε»"], {}),
    "alpaca": ([{"instruction": "add", "input": "", "output": "3"}], [ALPACA], {}),
    "dates as answers": (
        [{"prompt": "when", "completion": "2024-01-05"}, {"prompt": "now", "completion": "2023-12-31T10:00:00"}],
        ["when«2024-01-05ε»", "now«2023-12-31T10:00:00ε»"],
        {},
    ),
    "prompt and completion of messages": (
        [
            {
                "prompt": talk("p", "o", "q")["messages"],
                "completion": [{"role": "assistant", "content": "a"}],
            }
        ],
        ["βυpεαoευqεα«aε»"],
        {},
    ),
    "question and answer": ([{"question": "q", "answer": "a"}], ["βυqεα«aε»"], {}),
    "messages": ([talk("p", "o", "q", "a")], ["βυpεα«oε»υqεα«aε»"], {}),
    "ShareGPT": ([SHAREGPT], ["βυqεα«aε»"], {}),
    "parts of text": ([PARTS], ["βυqεα«abε»"], {}),
    "a column system": ([{**talk("q", "a"), "system": "s"}], ["βσsευqεα«aε»"], {}),
    "weight 0": ([flagged(weight=0)], ["βυpεαbadευqεα«okε»"], {}),
    "weights of floats": ([flagged(weight=0.0), flagged(weight=1.0)], ["βυpεαbadευqεα«okε»", "βυpεα«badε»υqεα«okε»"], {}),
    "train false": ([flagged(train=False)], ["βυpεαbadευqεα«okε»"], {}),
    "loss_weight 0": ([flagged(loss_weight=0.0)], ["βυpεαbadευqεα«okε»"], {}),
    "a row of weight 0": ([{"text": "a", "weight": 0}, {"text": "b", "weight": 1}], ["aε", "«bε»"], {}),
    "the last answer": ([talk("p", "o", "q", "a")], ["βυpεαoευqεα«aε»"], {"train_on": "last"}),
    "whole inputs": ([talk("q", "a")], ["«βυqεαaε»"], {"train_on_inputs": True}),
    "names of its own": (
        [{"query": "q", "reply": "a"}],
        ["q«aε»"],
        {"fields": {"prompt": "query", "completion": "reply"}},
    ),
    "keys of messages of its own": (
        [{"dialog": [{"who": "user", "said": "q"}, {"who": "assistant", "said": "a"}]}],
        ["βυqεα«aε»"],
        {"fields": {"messages": "dialog", "role": "who", "content": "said"}},
    ),
    "images that are left out on purpose": (
        [{**talk("q", "a"), "images": ["1.png"]}],
        ["βυqεα«aε»"],
        {"ignore_fields": ["images"]},
    ),
    "a key that only one message has, and an explicit null": (
        [talk("q", "a"), {"messages": [{"role": "user", "content": "q", "weight": None}, {"role": "assistant", "content": "a", "weight": 1}]}],
        ["βυqεα«aε»"] * 2,
        {},
    ),
    "tokens": ([{"input_ids": [64, 65]}], ["«ab»"], {}),
    "tokens with labels": ([{"input_ids": [64, 65], "labels": [-100, 65]}], ["a«b»"], {}),
    "tokens with a mask": ([{"input_ids": [64, 65], "loss_mask": [0, 1]}], ["a«b»"], {}),
    "tokens with padding": ([{"input_ids": [64, 65, 256], "attention_mask": [1, 1, 0]}], ["«ab»"], {}),
    "packed, by lengths": (
        [{"input_ids": [64, 65, 66, 67], "seq_lengths": [3, 1]}, {"input_ids": [68], "seq_lengths": [1]}],
        ["«abc»", "«d»", "«e»"],
        {},
    ),
    "packed, by positions": (
        [{"input_ids": [64, 65, 66, 67], "labels": [64, -100, 66, 67], "position_ids": [0, 1, 0, 1]}],
        ["«a»b", "«cd»"],
        {},
    ),
    "packed, by numbers in the mask": (
        [{"input_ids": [64, 65, 66, 256], "attention_mask": [1, 2, 2, 0]}],
        ["«a»", "«bc»"],
        {},
    ),
}  # fmt: skip


def of(path: Path, folder: Path, **options: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of a file, as the cache of training has them."""
    keys = {key: options.pop(key) for key in ("fields", "ignore_fields", "type") if key in options}
    config = TrainConfig(
        datasets=[DatasetConfig(path=str(path), **keys)],
        dataset_prepared_path=str(folder / "prepared"),
        output_dir=str(folder / "run"),
        **options,
    )
    (prepared,) = prepare_data(config).folders
    with pa.memory_map(str(prepared / "rows.arrow")) as file:
        table = pa.ipc.open_stream(file).read_all()
        return [(row["input_ids"], row["labels"]) for row in table.to_pylist()]


@cache
def byte_folder() -> Path:
    """A folder of the tokenizer of bytes."""
    folder = Path(mkdtemp())
    byte_tokenizer().save_pretrained(folder)
    return folder


def inspected(path: Path, folder: Path, **options: Any) -> list[int]:
    """Lengths of the sequences of a file, as `multipack inspect` counts them."""
    found = scan(
        [path],
        column=None,
        split=None,
        tokenise=tokenizer_of(byte_folder(), train_on=options.get("train_on", "all")),
        progress=lambda name, done, total: None,
        reading=Reading(
            fields=options.get("fields", {}), ignore_fields=options.get("ignore_fields", ()), type=options.get("type", "auto")
        ),
    )  # fmt: skip
    return found.lengths.tolist()


def as_jsonl(rows: list[dict[str, Any]], folder: Path) -> Path:
    (folder / "rows.jsonl").write_bytes(lines(rows))
    return folder / "rows.jsonl"


def as_parquet(rows: list[dict[str, Any]], folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def as_arrow(rows: list[dict[str, Any]], folder: Path) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(folder / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    return folder / "rows.arrow"


def as_saved(rows: list[dict[str, Any]], folder: Path) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, as_arrow, as_saved])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_give_the_same_tokens_whatever_file_they_came_in(
    kind: str, write: Callable[[list[dict[str, Any]], Path], Path], tmp_path: Path
) -> None:
    rows, expected, options = ROWS[kind]
    path = write(rows, tmp_path)
    assert of(path, tmp_path, **options) == [by_hand(text) for text in expected]
    assert inspected(path, tmp_path, **options) == [len(by_hand(text)[0]) for text in expected]


MARK = b"\xef\xbb\xbf"
FILES: dict[str, tuple[bytes, list[str]]] = {
    "rows.ndjson": (lines(TEXTS), AS_TEXTS),
    "rows.JSONL": (lines(TEXTS), AS_TEXTS),
    "rows.json": (json.dumps(TEXTS, indent=1).encode(), AS_TEXTS),
    "one.json": (b'{"text": "ab"}', ["«abε»"]),
    "marked.json": (MARK + json.dumps(TEXTS).encode(), AS_TEXTS),
    "marked.jsonl": (MARK + b"\n" + lines(TEXTS).replace(b"\n", b"\r\n\r\n"), AS_TEXTS),
    "unended.jsonl": (lines(TEXTS).rstrip(), AS_TEXTS),
    "rows.jsonl.gz": (gzip.compress(lines(TEXTS)), AS_TEXTS),
    "rows.JSONL.GZ": (gzip.compress(lines(TEXTS)), AS_TEXTS),
    "rows.jsonl.zst": (zst(lines(TEXTS)), AS_TEXTS),
    "two-frames.jsonl.zst": (zst(lines(TEXTS[:1])) + zst(lines(TEXTS[1:])), AS_TEXTS),
    "rows.csv": (b"text\nab\n2024-01-05\n", AS_TEXTS),
    "quoted.csv": (MARK + b'id,text\r\n1,"a,b\nc ""d"""\r\n\r\n2,00123\r\n', ['«a,b\nc "d"ε»', "«00123ε»"]),
    "rows.tsv": (b"prompt\tcompletion\nq\ta,b\nq\ttrue\n", ["q«a,bε»", "q«trueε»"]),
    "rows.csv.gz": (gzip.compress(b"text\nab\n2024-01-05\n"), AS_TEXTS),
    "messages.csv": (
        b'messages\n"[{""role"": ""user"", ""content"": ""q""}, {""role"": ""assistant"", ""content"": ""a""}]"\n',
        ["βυqεα«aε»"],
    ),
    "tokens.csv": (b'input_ids,labels\n"[64, 65]","[-100, 65]"\n', ["a«b»"]),
    "long.csv": (b"text\n" + b"a" * 200_000 + b"\n", ["«" + "a" * 200_000 + "ε»"]),
    "rows.txt": (b"ab\r\n\n  \n2024-01-05", AS_TEXTS),
    "rows.txt.zst": (zst(b"ab\n2024-01-05\n"), AS_TEXTS),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind_by_hand(name: str, tmp_path: Path) -> None:
    raw, expected = FILES[name]
    (tmp_path / name).write_bytes(raw)
    options = {"sequence_len": 1 << 20}
    assert of(tmp_path / name, tmp_path, **options) == [by_hand(text) for text in expected]
    assert inspected(tmp_path / name, tmp_path) == [len(by_hand(text)[0]) for text in expected]


def test_nested_values_of_tools_are_the_same_from_tables(tmp_path: Path) -> None:
    # A table has one set of keys for both tools and fills them with nulls; the template must not see these.
    def tool(name: str, **properties: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}

    def row(*tools: dict[str, Any]) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": {"x": 1}}}
        messages = [*talk("q")["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
        return {"messages": messages, "tools": list(tools)}

    rows = [row(tool("f", x={"type": "int"})), row(tool("g", y={"enum": ["a", "b"]}), tool("f", x={}))]
    template = tmp_path / "calls.jinja"
    template.write_text(
        "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        encoding="utf-8",
    )
    rows[1]["tools"][1]["function"]["parameters"]["properties"]["x"] = {"type": "str"}
    first, second = (
        json.dumps(row["tools"]) + 'υqεα«[{"function": {"name": "f", "arguments": {"x": 1}}}]ε»'
        for row in rows
    )
    for write in (as_jsonl, as_parquet, as_arrow, as_saved):
        found = of(write(rows, tmp_path), tmp_path, chat_template=str(template))
        assert found == [by_hand(first), by_hand(second)]
    texts = [{**row, "tools": json.dumps(row["tools"])} for row in rows]
    assert of(as_parquet(texts, tmp_path), tmp_path, chat_template=str(template)) == [
        by_hand(first),
        by_hand(second),
    ]


def test_values_that_datasets_stores_as_json_are_opened(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "parameters": {"x": 1}}}
    other = {"type": "function", "function": {"name": "f", "parameters": {"x": "s"}}}
    rows = [{**talk("q", "a"), "tools": [call]}, {**talk("q", "a"), "tools": [other]}]
    loaded = datasets.load_dataset(
        "json", data_files=str(as_jsonl(rows, tmp_path)), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert "Json" in str(loaded.features)
    loaded.save_to_disk(tmp_path / "json")
    template = "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    found = of(tmp_path / "json", tmp_path, chat_template=template)
    assert found == [by_hand(json.dumps([tool]) + "υqεα«aε»") for tool in (call, other)]


REFUSED: dict[str, tuple[bytes, str]] = {
    "empty.jsonl": (b"", "empty.jsonl (has|holds) no rows"),
    "empty.jsonl.gz": (b"", "empty.jsonl.gz (has|holds) no rows"),
    "blank.jsonl": (b"\n \n", "blank.jsonl (has|holds) no rows"),
    "none.json": (b"[]", "none.json (has|holds) no rows"),
    "empty.csv": (b"", "empty.csv (has|holds) no rows"),
    "names.csv": (b"text\n", "names.csv (has|holds) no rows"),
    "half.jsonl": (b'{"text": "a"}\n{"te', "half.jsonl, line 2 is not JSON"),
    "list.jsonl": (b'{"text": "a"}\n[1]\n', "list.jsonl, line 2 is not an object"),
    "twice.jsonl": (b'{"text": "a", "text": "b"}\n', "twice.jsonl, line 1 has the key 'text' twice"),
    "twice.json": (b'[{"text": "a", "text": "b"}]', "twice.json has a row with the key 'text' twice"),
    "deep.jsonl": (b'{"text": ' + b"[" * 100_000 + b"\n", "deep.jsonl, line 1 is nested too deeply"),
    "object.json": (b'{\n "text": "a"\n}\n', "object.json, line 1 is not JSON.* one object over several lines"),
    "numbers.json": (b"[1]", "numbers.json is an array of something other than rows: row 0"),
    "latin.jsonl": ('{"text": "é"}\n'.encode("latin-1"), "latin.jsonl, line 1 is not UTF-8 .byte 0xe9"),
    "wide.jsonl": ('{"text": "a"}\n'.encode("utf-16"), "wide.jsonl is UTF-16 text"),
    "wide.csv": ("text\na\n".encode("utf-16"), "wide.csv is UTF-16 text"),
    "half.text.jsonl": (b'{"text": "b \\ud83d"}\n', "half.text.jsonl: row 0: a text holds half of a surrogate pair"),
    "half.chat.jsonl": (lines([talk("q", "a\ud83d")]), "half.chat.jsonl: row 0: a text holds half of a surrogate"),
    "cells.csv": (b"text,id\na,1\nb\n", "cells.csv, line 3: 1 cells under 2 names"),
    "names2.csv": (b"text,text\na,b\n", "names2.csv: its first line has the name 'text' twice"),
    "quote.csv": (b'text\n"a\n', "quote.csv, line 2 is not a row"),
    "cut.jsonl.gz": (gzip.compress(lines(TEXTS) * 100)[:-20], "cut.jsonl.gz cannot be read; is it whole"),
    "cut.jsonl.zst": (zst(lines(TEXTS) * 100)[:-5], "cut.jsonl.zst"),
    "wrong.jsonl.gz": (lines(TEXTS), "wrong.jsonl.gz cannot be read; is it whole, and what its name says"),
    "wrong.jsonl.zst": (lines(TEXTS), "wrong.jsonl.zst cannot be read"),
    "wrong.parquet": (lines(TEXTS), "wrong.parquet cannot be read"),
    "rows.xlsx": (b"PK", "rows.xlsx has the suffix '.xlsx', which is not a kind of file that is read here"),
    "negative.jsonl": (lines([{"input_ids": [1]}, {"input_ids": [1, -5]}]), "row 1: token 1 of input_ids is -5, outside 0"),
    "nan.jsonl": (b'{"input_ids": [1, NaN]}\n', "row 0: token 1 of input_ids is nan, not a whole number"),
    "infinite.jsonl": (b'{"input_ids": [Infinity]}\n', "row 0: token 0 of input_ids is inf, not a whole number"),
    "half.ids.jsonl": (b'{"input_ids": [1.5]}\n', "row 0: token 0 of input_ids is 1.5, not a whole number"),
    "huge.jsonl": (lines([{"input_ids": [2**31]}]), "row 0: token 0 of input_ids is 2147483648, outside 0"),
    "labels.jsonl": (lines([{"input_ids": [1, 2], "labels": [1]}]), "row 0: it has 2 tokens but 1 values of labels"),
    "sums.jsonl": (lines([{"input_ids": [1, 2], "seq_lengths": [1]}]), "row 0: seq_lengths add up to 1, and the row has 2"),
    "places.jsonl": (lines([{"input_ids": [1, 2], "position_ids": [0, 5]}]), "row 0: position_ids go from 0 to 5 at token 1"),
    "differ.jsonl": (lines([{"input_ids": [1, 2], "position_ids": [0, 1], "seq_lengths": [1, 1]}]), "row 0: seq_lengths and position_ids put the"),
    "images.jsonl": (lines([{**talk("q", "a"), "images": ["1.png"]}]), "row 0: the column images is not read by type messages"),
    "tools.jsonl": (lines([{"text": "a", "tools": [{"name": "f"}]}]), "row 0: the column tools is not read by type text"),
    "context.jsonl": (lines([{"question": "q", "answer": "a", "context": "c"}]), "row 0: the column context is not"),
    "part.jsonl": (lines([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}]), "row 0: message 0: its content has a part of type 'image'"),
    "weight.jsonl": (lines([flagged(weight=0.5)]), "row 0: message 1: weight is 0.5; it can be 0 or 1"),
    "weights.jsonl": (lines([flagged(weight=0, train=True)]), "row 0: message 1 has .* which contradict each other"),
    "learn-user.jsonl": (lines([{"messages": [{"role": "user", "content": "q", "train": True}]}]), "row 0: message 0 is to be learnt"),
    "detail.jsonl": (lines([flagged(train_detail=[{"begin_offset": 0}])]), "row 0: message 1 has train_detail"),
    "row-weight.jsonl": (lines([{"text": "a", "weight": 0.3}]), "row 0: weight is 0.3; it can be 0 or 1"),
    "two-systems.jsonl": (lines([{"messages": [{"role": "system", "content": "s"}], "system": "s"}]), "row 0: the column system and the first"),
    "dates.json": (lines([{"prompt": "q", "completion": 2024}]), "row 0: completion is 2024, not text"),
    "strange.jsonl": (lines([{"a": "x"}]), r"The columns \(a\) fit no format"),
    "mixed.jsonl": (lines([{"prompt": talk("q")["messages"], "completion": "a"}]), "row 0: prompt is a list of messages and completion is"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_the_same_words(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, message = REFUSED[name]
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=message) as prepared:
        of(tmp_path / name, tmp_path)
    assert name in str(prepared.value)
    arguments = [
        "inspect",
        str(tmp_path / name),
        "--capacity",
        "64",
        "--tokenizer",
        str(byte_folder()),
    ]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.replace("holds no rows", "has no rows") == f"multipack: {prepared.value}\n"


def test_true_dates_of_a_table_are_no_text(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array([0], pa.timestamp("s"))})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(
        ValueError, match=r"rows.parquet: row 0: text is datetime.datetime\(1970, 1, 1.*, not text"
    ):
        of(tmp_path / "rows.parquet", tmp_path)


def test_columns_that_are_not_read_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": "a", "id": n, "url": "x"} for n in range(600)]
    of(as_jsonl(rows, tmp_path), tmp_path)
    said = [record.getMessage() for record in caplog.records if "not read" in record.getMessage()]
    assert said == [f"{tmp_path / 'rows.jsonl'}: columns not read: id, url"]


def test_keys_and_roles_that_the_template_does_not_write_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = (
        "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    row = talk("q", "a")
    row["messages"][0]["name"] = "Ann"
    row["messages"].insert(0, {"role": "system", "content": "be brief"})
    of(as_jsonl([row, row], tmp_path), tmp_path, chat_template=template)
    said = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert said == [
        "keys that the chat template does not read: name",
        "the chat template does not write what messages of the role system say",
    ]


def test_a_start_token_in_the_text_is_not_doubled(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 257)]
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for row, expected in (
        ({"text": "ab"}, "«βabε»"),
        ({"text": "<|bos|>ab"}, "«βabε»"),
        ({"prompt": "<|bos|>q", "completion": "a<|end|>"}, "βq«aε»"),
    ):
        path = as_jsonl([row], tmp_path)
        assert of(path, tmp_path, tokenizer=str(tmp_path / "tokenizer")) == [by_hand(expected)]


def test_folders_have_the_splits_that_names_of_files_say(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "dev").mkdir(parents=True)
    for name, text in (("a.jsonl", "ab"), ("train-0.csv", "b"), ("test.jsonl", "c"), ("dev/0.jsonl", "d")):
        raw = f"text\n{text}\n".encode() if name.endswith("csv") else lines([{"text": text}])
        (folder / name).write_bytes(raw)
    for split, expected in (("train", ["«abε»", "«bε»"]), ("test", ["«cε»"]), ("validation", ["«dε»"])):
        config = DatasetConfig(path=str(folder), split=split)
        run = TrainConfig(
            datasets=[config], dataset_prepared_path=str(tmp_path / "prepared"), output_dir=str(tmp_path)
        )
        tokens = prepare_data(run).train
        assert [tokens[n]["input_ids"].tolist() for n in range(len(tokens))] == [
            by_hand(text)[0] for text in expected
        ]
        found = scan(
            [folder],
            column=None,
            split=split,
            tokenise=tokenizer_of(byte_folder()),
            progress=lambda name, done, total: None,
        )
        assert found.lengths.tolist() == [len(by_hand(text)[0]) for text in expected]


@pytest.mark.parametrize(
    ("split", "rows"),
    [("train[1:3]", [1, 2]), ("train[:50%]", [0, 1]), ("train[-1:]", [3]), ("train[:1]+train[3:]", [0, 3])],
)
def test_slices_of_files_count_rows_as_datasets_does(split: str, rows: list[int], tmp_path: Path) -> None:
    texts = ["aa", "bb", "cc", "dd"]
    path = as_jsonl([{"text": text} for text in texts], tmp_path)
    run = TrainConfig(
        datasets=[DatasetConfig(path=str(path), split=split)],
        dataset_prepared_path=str(tmp_path / "prepared"),
        output_dir=str(tmp_path),
    )
    tokens = prepare_data(run).train
    assert [tokens[n]["input_ids"].tolist() for n in range(len(tokens))] == [
        by_hand(f"«{texts[row]}ε»")[0] for row in rows
    ]


def test_selections_are_saved_and_read_in_their_order(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}, {"text": "c"}])
    rows.select([2, 0]).save_to_disk(tmp_path / "saved")
    assert of(tmp_path / "saved", tmp_path) == [by_hand("«cε»"), by_hand("«aε»")]


def test_packed_rows_of_a_parquet_file_are_inspected_with_their_boundaries(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]}, {"input_ids": [6], "seq_lengths": [1]}]
    assert inspected(as_parquet(rows, tmp_path), tmp_path) == [2, 3, 1]


def test_a_column_of_lengths_is_read_only_without_tokens_or_text(tmp_path: Path) -> None:
    path = as_jsonl([{"text": "ab", "length": 7}], tmp_path)
    assert inspected(path, tmp_path) == [3]
    found = scan([path], column=None, split=None, tokenise=None, progress=lambda name, done, total: None)
    assert found.lengths.tolist() == [7]
    assert np.issubdtype(found.lengths.dtype, np.int64)


def test_files_of_a_folder_that_are_not_read_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.jsonl", "test.jsonl", "README.md", "more.jsonl.xz"):
        (folder / name).write_bytes(lines(TEXTS))
    of(folder, tmp_path)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{folder}: files not read: more.jsonl.xz, test.jsonl"]


CELLS: list[Any] = [
    *(
        None,
        0,
        -1,
        1.5,
        True,
        "",
        "a",
        "[1]",
        "{",
        "\ud800",
        [],
        [1, 2],
        [None],
        ["a"],
        {},
        [[1, 2]],
        1e400,
        2**70,
    ),
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    [{"from": "gpt", "value": 3}],
    [{"role": "user"}],
    [{"role": 3, "content": "a"}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": "x"}]}],
    [{"role": "assistant", "content": "", "tool_calls": "z"}],
    [{"role": "assistant", "content": {"a": 1}}],
    [{"role": "assistant", "content": "a", "weight": [1]}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "thinking": ["x"]}],
]
NAMES = (
    *("text", "messages", "conversations", "instruction", "output", "input", "prompt", "completion", "question", "answer"),
    *("input_ids", "labels", "position_ids", "seq_lengths", "attention_mask", "tools", "chat_template_kwargs", "system", "weight"),
)  # fmt: skip


def odd_file(rng: random.Random, folder: Path) -> Path | None:
    """A file of rows with odd cells, or of right ones, perhaps damaged; None: nobody could write it."""
    names = rng.sample(NAMES, rng.randint(1, 3))
    rows = [{name: rng.choice(CELLS) for name in names} for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.4:
        rows = rng.choice([rows for rows, _, options in ROWS.values() if not options])
    write = rng.choice([as_jsonl, as_jsonl, as_parquet, as_arrow])
    try:
        path = write(rows, folder)
    except (pa.ArrowException, OverflowError, UnicodeError):
        return None
    raw = bytearray(path.read_bytes())
    if rng.random() < 0.2:
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    path.write_bytes(raw[: rng.randrange(len(raw)) if rng.random() < 0.1 else None])
    return path


@pytest.mark.parametrize("seed", range(4))
def test_no_file_ends_in_a_traceback_and_both_readers_agree(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    tokenizer, read = byte_tokenizer(), 0
    for _ in range(100):
        path = odd_file(rng, tmp_path)
        if path is None:
            continue
        said: list[Any] = []
        for reader in (encoded_lengths, lambda path, _: inspected(path, tmp_path)):
            try:
                said.append(reader(path, tokenizer))
            except ValueError as error:
                said.append(str(error))
        assert said[0] == said[1]
        assert isinstance(said[0], list) or "rows." in said[0]
        read += isinstance(said[0], list)
    assert read > 10


def encoded_lengths(path: Path, tokenizer: Any) -> list[int]:
    """Lengths of the sequences of a file, as training makes them."""
    encoder, lengths = None, []
    for block in read_blocks(path):
        if encoder is None:
            columns = list(dict.fromkeys(name for row in block.rows for name in row))
            try:
                encoder = RowEncoder(choose_format("auto", columns), tokenizer)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        lengths += [len(one.input_ids) for one in encoder.encode(block)]
    if encoder is None:
        raise ValueError(f"{path} holds no rows.")
    return lengths
