"""Load the tokenizer that a configuration asks for."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerBase

from multipack.data.text.templates import check_source
from multipack.train.config import TrainConfig
from multipack.train.data.builtin import byte_tokenizer


def load_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `tokenizer`, else of `base_model`, else the built-in one of bytes, with
    `special_tokens` and `chat_template` set.

    A tokenizer without a padding token pads with its end token: padding is never read, it only has to be a
    token. Tokens of `special_tokens` that are new get new ids, so the model's embedding must have
    `len(tokenizer)` rows or more.

    Raises:
        ValueError: transformers has no class `tokenizer_type`, there is no such tokenizer, or no such
            template.
    """
    name = config.tokenizer or config.base_model
    if name is None:
        tokenizer: PreTrainedTokenizerBase = byte_tokenizer()
    else:
        loader = getattr(transformers, config.tokenizer_type, None)
        if loader is None:
            raise ValueError(
                f"tokenizer_type is {config.tokenizer_type}, which transformers {transformers.__version__} "
                "does not have. AutoTokenizer finds the class."
            )
        try:
            tokenizer = loader.from_pretrained(name, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the tokenizer {name} cannot be loaded; give a folder, or a name on the hub. {error}"
            ) from error
    if config.chat_template is not None:
        tokenizer.chat_template = _chat_template(config.chat_template)
    if config.special_tokens:
        tokenizer.add_special_tokens(dict(config.special_tokens))
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _chat_template(value: str) -> str:
    """The Jinja text that the key holds or names."""
    source = value
    if not ("{%" in value or "{{" in value):
        try:
            source = Path(value).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ValueError(
                f"chat_template {value} is neither a template (it has no {{{{ or {{%) nor a file that can be "
                f"read: {error}. Give the path of a .jinja file, or the text of one."
            ) from None
    check_source(source)
    return source


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the files that the tokenizer saves: its vocabulary, rules, special tokens and chat
    template."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
