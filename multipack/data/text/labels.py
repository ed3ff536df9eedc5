"""From characters that are learnt to tokens that are learnt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from multipack.data.targets import IGNORE_INDEX
from multipack.data.text.answers import Written

IGNORED = IGNORE_INDEX


class Encoded(NamedTuple):
    """One sequence: as many labels as tokens; a label is the token itself or IGNORED."""

    input_ids: list[int]
    labels: list[int]

    @property
    def num_targets(self) -> int:
        """Tokens that are learnt."""
        return len(self.labels) - self.labels.count(IGNORED)


class _Tokens(NamedTuple):
    ids: list[int]
    offsets: list[tuple[int, int]]
    """Characters of the text that each token covers."""


def encode_spans(texts: Sequence[Written], tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """Tokens of texts, with labels on those of the spans.

    A token belongs to one side of the border of a span: where the tokenizer would join characters of both
    sides, what lies on either side is tokenised apart, as it is when a model is given the prompt and writes
    the answer.

    Raises:
        ValueError: the tokenizer does not tell which characters a token covers.
    """
    if not texts:
        return []
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell which characters a token covers, so assistant turns "
            "cannot be found. Use a fast tokenizer, or train_on_inputs: true."
        )
    return [
        _labelled(text, _cut(text, tokens, tokenizer))
        for text, tokens in zip(texts, _tokens([text.text for text in texts], tokenizer), strict=True)
    ]


def _tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[_Tokens]:
    found = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [
        _Tokens(list(ids), list(offsets))
        for ids, offsets in zip(found["input_ids"], found["offset_mapping"], strict=True)
    ]


def _cut(written: Written, tokens: _Tokens, tokenizer: PreTrainedTokenizerBase) -> _Tokens:
    """The tokens with none across the border of a span, as far as the tokenizer allows."""
    borders = sorted({place for span in written.spans for place in span})
    starts = [start for start, _ in tokens.offsets]
    crossed = []
    for border in borders:
        token = bisect_left(starts, border) - 1
        if token >= 0 and tokens.offsets[token][1] > border:
            crossed.append(border)
    if not crossed:
        return tokens
    places = [0, *crossed, len(written.text)]
    parts = [written.text[a:b] for a, b in pairwise(places)]
    joined = _Tokens([], [])
    for place, part in zip(places, _tokens(parts, tokenizer), strict=False):
        joined.ids.extend(part.ids)
        joined.offsets.extend((place + start, place + end) for start, end in part.offsets)
    # A tokenizer that puts a space before every text would put one between the parts.
    same = tokenizer.decode(joined.ids) == tokenizer.decode(tokens.ids)
    return joined if same else tokens


def _labelled(written: Written, tokens: _Tokens) -> Encoded:
    """Labels for the tokens that start inside the spans, or before one with nothing but white space of the
    prompt."""
    # Byte-level tokenizers may trim a token's white space from its offsets, down to nothing: such a token
    # counts by the character before.
    places = [start if end > start else start - 1 for start, end in tokens.offsets]
    labels = [IGNORED] * len(tokens.ids)
    for begin, end in written.spans:
        first, last = (bisect_left(places, place) for place in (begin, end))
        if first and tokens.offsets[first - 1][1] > begin:
            first -= not written.text[tokens.offsets[first - 1][0] : begin].strip()
        labels[first:last] = tokens.ids[first:last]
    return Encoded(tokens.ids, labels)
