"""Training data and a tokenizer that every machine with Python has: no download, the same rows for the same
Python version.

Rows are conversations about the standard library's own sources: from a signature to its docstring, and from a
name to its source, which gives many short rows and a tail of long ones.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Row = dict[str, list[dict[str, str]]]

_SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_RECIPE = "1"  # part of the digest: goes up when the same sources give other rows
_TEMPLATE_BYTES = 64  # room for what a chat template adds to a row
_SHORTEST_DOCSTRING = 16
_SHORTEST_SOURCE = 400

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes: 256 of them and 6 special tokens, with a chat template that marks
    assistant turns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={letter: token for token, letter in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def builtin_rows(max_bytes: int) -> list[Row]:
    """Conversations about the installed standard library, in the order of its files.

    Args:
        max_bytes: longest row in bytes of UTF-8, what a chat template adds included; longer ones are not
            made.

    Returns:
        Rows `{"messages": [user turn, assistant turn]}`, a few thousand of them for `max_bytes` of 1024 and
        more.

    Raises:
        ValueError: no row is that short, or the sources of the standard library are not installed.
    """
    rows = [
        row for path in _sources() for row in _rows_of(path) if _num_bytes(row) + _TEMPLATE_BYTES <= max_bytes
    ]
    if not rows:
        raise ValueError(
            f"{_stdlib()} gives no row of at most {max_bytes} bytes. Raise sequence_len, or give data of "
            "your own with --data FILE."
        )
    return rows


def builtin_digest(max_bytes: int) -> str:
    """SHA-256 of what `builtin_rows(max_bytes)` is made of; far quicker than to make it."""
    digest = hashlib.sha256(f"{_RECIPE} {max_bytes}".encode())
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _sources() -> list[Path]:
    """Public top-level modules by name."""
    return sorted(path for path in _stdlib().glob("*.py") if not path.name.startswith("_"))


def _num_bytes(row: Row) -> int:
    return sum(len(message["content"].encode()) for message in row["messages"])


def _rows_of(path: Path) -> Iterator[Row]:
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for name, node in _definitions(ast.parse(source), path.stem):
        docstring = ast.get_docstring(node)
        signature = _dedented(lines[node.lineno - 1 : node.body[0].lineno - 1])
        if docstring and len(docstring) >= _SHORTEST_DOCSTRING and signature:
            yield _conversation(f"Write the docstring of {name}:\n{signature}", docstring)
        body = _dedented(lines[node.lineno - 1 : node.end_lineno])
        if name.count(".") == 1 and len(body) >= _SHORTEST_SOURCE:  # methods stand in their class's source
            yield _conversation(f"Show the source of {name}.", body)


def _definitions(node: ast.AST, name: str) -> Iterator[tuple[str, _Definition]]:
    """Functions and classes with their dotted names, outer ones first; nothing inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            dotted = f"{name}.{child.name}"
            yield dotted, child
            if isinstance(child, ast.ClassDef):
                yield from _definitions(child, dotted)


def _dedented(lines: list[str]) -> str:
    """The lines without the first one's indentation; lines that start further left stay as they are."""
    if not lines:
        return ""
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return "\n".join(line.removeprefix(indent) for line in lines).rstrip()


def _conversation(prompt: str, answer: str) -> Row:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
