# ruff: noqa: RUF001 (letters of templates, and Greek ones that stand for special tokens)
"""Chat templates of others: each answer's text and its end are learnt, nothing of a prompt is, or the row is
refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trl
from helpers import SHARED
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from multipack.data.text.encode import RowEncoder
from multipack.data.text.files import Block
from multipack.data.text.formats import RowFormat
from multipack.data.text.labels import IGNORED, Encoded
from multipack.train.data.builtin import byte_tokenizer

TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
MARKERS = re.compile(
    r"<[|｜][^|｜<>\n]{1,40}[|｜]>|<(?:start_of_turn|end_of_turn|end_of_utterance|turn\||\|turn|channel\||\|channel)>|</s>|\[/?INST\]"
)
"""What stands in templates as a special token."""
QUESTIONS, ANSWERS = ("Pflaume?", "Kirsche?"), ("Zwetschge!", "Amarelle!")


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TWO_TURNS = [user(QUESTIONS[0]), assistant(ANSWERS[0]), user(QUESTIONS[1]), assistant(ANSWERS[1])]


def tokenizer_with(template: str, **special: str) -> PreTrainedTokenizerFast:
    """Single bytes, and every marker of the template as one special token."""
    tokenizer = byte_tokenizer()
    markers = sorted({*MARKERS.findall(template), *special.values()})
    tokenizer.add_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    for name, token in special.items():
        setattr(tokenizer, name, token)
    tokenizer.chat_template = template
    return tokenizer


def encode(tokenizer: Any, messages: list[dict[str, Any]], **row: Any) -> list[Encoded]:
    block = Block(Path("rows.jsonl"), 0, [{"messages": messages, **row}])
    return RowEncoder(RowFormat("messages"), tokenizer).encode(block)


def shown(tokenizer: Any, sequence: Encoded) -> str:
    """The text with what is learnt in «»."""
    text, on = "", False
    for token, label in zip(sequence.input_ids, sequence.labels, strict=True):
        assert label in (IGNORED, token)
        if (label != IGNORED) != on:
            on = not on
            text += "«" if on else "»"
        text += tokenizer.decode([token])
    return text + ("»" if on else "")


def learnt(tokenizer: Any, sequences: list[Encoded]) -> list[str]:
    """Every stretch of learnt tokens, those of one answer as one."""
    return [part for one in sequences for part in re.findall("«([^»]*)»", shown(tokenizer, one))]


DISAGREE = "asks for message 1 by"
NO_END = "writes no end after message 1"
REFUSED = {"deepseek_r1_distill": DISAGREE, "deepseekv3": DISAGREE, "glm4moe": NO_END}
"""Templates of trl that cannot be trained on, and why: one opens <think> and then writes answers without it,
one has no end token."""


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_of_trl_are_right_or_refused(path: Path) -> None:
    tokenizer = tokenizer_with(path.read_text(encoding="utf-8"))
    if path.stem in REFUSED:
        with pytest.raises(ValueError, match=f"rows.jsonl: row 0: the chat template {REFUSED[path.stem]}"):
            encode(tokenizer, TWO_TURNS)
        return
    sequences = encode(tokenizer, TWO_TURNS)
    parts = learnt(tokenizer, sequences)
    whole = "".join(parts)
    for answer in ANSWERS:
        assert whole.count(answer) == 1  # each answer is learnt once
    for question in QUESTIONS:
        assert question not in whole
        assert any(question in tokenizer.decode(one.input_ids) for one in sequences)
    for part in parts:
        answer = next((answer for answer in ANSWERS if answer in part), None)
        if answer is None:  # the second closing token of a last answer, after a line feed that is not learnt
            assert MARKERS.fullmatch(part)
            continue
        before, _, after = part.partition(answer)
        assert MARKERS.match(after.lstrip()), part  # its end
        assert not re.search("assistant|model|ASSISTANT|CHATBOT|Assistant", before.split("<|start|>")[0]), (
            part
        )


PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
QWEN = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>"
    "{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
HARMONY = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% else %}"
    "{% if loop.last and m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_a_template_that_ends_the_last_turn_in_its_own_way_holds_all_answers_in_one_text() -> None:
    tokenizer = tokenizer_with(PHI)
    (sequence,) = encode(tokenizer, TWO_TURNS)
    assert shown(tokenizer, sequence) == (
        "<|user|>\nPflaume?<|end|>\n<|assistant|>\n«Zwetschge!<|end|>»\n<|user|>\nKirsche?<|end|>\n<|assistant|>\n«Amarelle!<|end|>\n<|endoftext|>»"
    )


def test_an_answer_whose_thinking_is_dropped_later_is_learnt_in_a_text_of_its_own() -> None:
    tokenizer = tokenizer_with(QWEN)
    talk = [
        user("q1"),
        assistant("a1", reasoning_content="r1"),
        user("q2"),
        assistant("a2", reasoning_content="r2"),
    ]
    whole, first = encode(tokenizer, talk)
    assert shown(tokenizer, whole) == (
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n«<think>\nr2\n</think>\n\na2<|im_end|>»\n"
    )
    assert shown(tokenizer, first) == (
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«<think>\nr1\n</think>\n\na1<|im_end|>»\n"
    )


def test_answers_that_stay_together_share_a_text() -> None:
    # After the last user message thinking stays, so both steps of the second turn are in one text.
    tokenizer = tokenizer_with(QWEN)
    tool = {"role": "tool", "content": "t"}
    talk = [
        user("q1"),
        assistant("a1"),
        user("q2"),
        assistant("a2", reasoning_content="r2"),
        tool,
        assistant("a3"),
    ]
    whole, first = encode(tokenizer, talk)
    assert learnt(tokenizer, [whole]) == [
        "<think>\nr2\n</think>\n\na2<|im_end|>",
        "<think>\n\n</think>\n\na3<|im_end|>",
    ]
    assert learnt(tokenizer, [first]) == ["<think>\n\n</think>\n\na1<|im_end|>"]


def test_plain_answers_of_a_template_that_drops_thinking_are_one_text_and_lost_thinking_is_refused() -> None:
    tokenizer = tokenizer_with(DEEPSEEK)
    (sequence,) = encode(tokenizer, TWO_TURNS)
    assert learnt(tokenizer, [sequence]) == [
        "Zwetschge!<｜end▁of▁sentence｜>",
        "Amarelle!<｜end▁of▁sentence｜>",
    ]
    with pytest.raises(ValueError, match="row 0: the chat template leaves out part of message 1, 'because'"):
        encode(tokenizer, [user("q"), assistant("<think>because</think>a")])


def test_a_last_answer_ends_with_its_own_token_wherever_it_is_learnt() -> None:
    tokenizer = tokenizer_with(HARMONY)
    sequences = encode(tokenizer, [user("q1"), assistant("a1", thinking="r1"), user("q2"), assistant("a2")])
    assert learnt(tokenizer, sequences) == [
        "<|channel|>final<|message|>a2<|return|>",
        "<|channel|>analysis<|message|>r1<|end|><|start|>assistant<|channel|>final<|message|>a1<|return|>",
    ]


def test_a_message_that_is_switched_off_takes_no_text_of_its_own() -> None:
    tokenizer = tokenizer_with(HARMONY)
    (sequence,) = encode(
        tokenizer, [user("q1"), assistant("bad", weight=0), user("q2"), assistant("a2", weight=1)]
    )
    assert learnt(tokenizer, [sequence]) == ["<|channel|>final<|message|>a2<|return|>"]
    assert "bad" in tokenizer.decode(sequence.input_ids)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_header_of_a_template_without_generation_prompt_is_not_learnt() -> None:
    tokenizer = tokenizer_with(CHATML.partition("{% if add")[0])
    assert learnt(tokenizer, encode(tokenizer, TWO_TURNS)) == [
        "Zwetschge!<|im_end|>",
        "Amarelle!<|im_end|>",
    ]


def test_ends_that_are_no_special_tokens_are_learnt_too() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    whole = "".join(learnt(tokenizer, encode(tokenizer, TWO_TURNS)))
    assert whole == "Zwetschge!<|im_end|>\nAmarelle!<|im_end|>\n"


@pytest.mark.parametrize("marked", ["{{ m.content }}", "{{ m.content + '<|im_end|>' }}"])
def test_the_end_is_learnt_also_where_the_marks_leave_it_out(marked: str) -> None:
    rest = "" if "im_end" in marked else "<|im_end|>"
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        + marked
        + "{% endgeneration %}"
        + rest
        + "\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = tokenizer_with(template)
    assert learnt(tokenizer, encode(tokenizer, TWO_TURNS)) == [
        "Zwetschge!<|im_end|>",
        "Amarelle!<|im_end|>",
    ]
    off = [user("q1"), assistant("bad", train=False), user("q2"), assistant("good")]
    assert learnt(tokenizer, encode(tokenizer, off)) == ["good<|im_end|>"]


def test_marks_that_begin_with_what_asks_for_an_answer_are_cut() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n"
        "{% endgeneration %}{% else %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = tokenizer_with(template)
    assert learnt(tokenizer, encode(tokenizer, TWO_TURNS)) == [
        "Zwetschge!<|im_end|>",
        "Amarelle!<|im_end|>",
    ]


def test_marks_that_leave_out_an_answer_are_refused() -> None:
    tokenizer = tokenizer_with(
        "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' and not loop.last %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}<|im_end|>{% endfor %}"
    )
    with pytest.raises(ValueError, match="marks of the chat template leave out part of message 1"):
        encode(tokenizer, TWO_TURNS)


def test_contents_are_given_as_parts_to_templates_that_read_parts() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
        "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = tokenizer_with(template)
    parts = [{"type": "text", "text": "Zwet"}, {"type": "text", "text": "schge!"}]
    same = [user("q"), assistant("Zwetschge!")], [user("q"), {"role": "assistant", "content": parts}]
    for talk in same:
        (sequence,) = encode(tokenizer, talk)
        assert shown(tokenizer, sequence) == "<|user|>q<|end|><|assistant|>«Zwetschge!<|end|>»"


def test_a_template_that_disagrees_with_itself_is_refused() -> None:
    template = CHATML.replace("assistant\n{% endif", "assistant: {% endif")
    with pytest.raises(ValueError, match=r"asks for message 1 by ': ' and then writes it as '\\nZwetschge!"):
        encode(tokenizer_with(template), TWO_TURNS)


def test_a_template_without_an_end_is_refused() -> None:
    with pytest.raises(
        ValueError, match="writes no end after message 1, so the model would not learn to stop"
    ):
        encode(
            tokenizer_with("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"), TWO_TURNS
        )


CALLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ ARGUMENTS }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("arguments", [{"city": "Ulm"}, '{"city": "Ulm"}'], ids=["mapping", "text"])
@pytest.mark.parametrize(
    "written",
    ["c.function.name ~ (c.function.arguments | tojson)", "c.function.name + c.function.arguments"],
    ids=["reads a mapping", "reads text"],
)
def test_tools_and_calls_reach_the_template_in_the_form_that_it_reads(arguments: Any, written: str) -> None:
    tokenizer = tokenizer_with(CALLS.replace("ARGUMENTS", written))
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    talk = [user("q"), assistant(None, tool_calls=[call]), {"role": "tool", "content": "sun"}, assistant("a")]
    (sequence,) = encode(tokenizer, talk, tools=[WEATHER])
    assert learnt(tokenizer, [sequence]) == ['<call>weather{"city": "Ulm"}</call><|im_end|>', "a<|im_end|>"]
    text = tokenizer.decode(sequence.input_ids)
    assert text.startswith('<|im_start|>system\n{"type": "function", "function": {"name": "weather", ')


@pytest.mark.parametrize(
    ("messages", "row", "message"),
    [
        (
            [user("q"), assistant("a")],
            {"tools": [WEATHER]},
            "the row has tools, and the chat template does not",
        ),
        ([user("q"), assistant("a")], {"documents": [{"text": "d"}]}, "the row has documents, and"),
        ([user("q"), assistant(None, tool_calls=[WEATHER])], {}, "message 1 has tool_calls, and the chat"),
        ([user("q"), assistant("a", reasoning_content="r")], {}, "leaves out part of message 1, 'r'"),
    ],
)
def test_what_the_template_does_not_write_is_refused(
    messages: list[dict[str, Any]], row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        encode(tokenizer_with(CHATML), messages, **row)


def test_arguments_of_the_template_come_from_the_row() -> None:
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if shout %}!{% endif %}")
    tokenizer = tokenizer_with(template)
    sequences = encode(tokenizer, [user("q"), assistant("a")], chat_template_kwargs={"shout": True})
    assert learnt(tokenizer, sequences) == ["a!<|im_end|>"]


@pytest.mark.shared
def test_a_word_that_the_tokenizer_joins_with_the_prompt_is_learnt_whole() -> None:
    # " cat" is one token of this tokenizer. Given "assistant: " a model sees the space and writes "cat".
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "data/tokenizers/smollm2")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (sequence,) = encode(tokenizer, [user("say"), assistant("cat")])
    assert shown(tokenizer, sequence) == "user: say<|im_end|>\nassistant: «cat<|im_end|>»\n"
    assert tokenizer("assistant: ")["input_ids"][-1] in sequence.input_ids
