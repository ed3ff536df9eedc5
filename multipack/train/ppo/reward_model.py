"""A reward model: a sequence classifier with one output, as a reward function.

transformers' decoder classifiers find the last token of a row by comparing token ids with
`config.pad_token_id`, so an end token that also pads would be taken for padding and the score be read one
token early. Here a batch is filled up with a token that does not occur in it, which makes that search exact
whatever token the tokenizer pads with.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.hub import cached_file

from multipack.train.ppo.reward import Row

logger = logging.getLogger(__name__)


class RewardModel:
    """Rewards a response by the classifier's output for prompt and response together, at its last token.

    It reads the policy's token ids, so it must have the policy's tokenizer. Weights are read at the first
    use.

    Args:
        name: folder or hub name.
        batch_size: sequences scored at once.
        longest: tokens of the longest sequence that will come; None checks nothing.
        tokenizer: the policy's, to compare with the classifier's own; None compares nothing.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        ValueError: the classifier does not have exactly one output, fewer positions than `longest`, or
            another tokenizer than the policy.
    """

    def __init__(
        self,
        name: str,
        *,
        batch_size: int,
        longest: int | None = None,
        tokenizer: Any = None,
        trust_remote_code: bool = False,
    ) -> None:
        try:
            self._config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"reward_model {name} cannot be loaded; give a folder, or a name on the hub. {error}"
            ) from error
        if self._config.num_labels != 1:
            raise ValueError(
                f"reward_model {name} has {self._config.num_labels} outputs; a reward is one number. Use a "
                "classifier with num_labels 1."
            )
        text_config = self._config.get_text_config()
        positions = getattr(text_config, "max_position_embeddings", None)
        if longest is not None and positions is not None and longest > positions:
            raise ValueError(
                f"reward_model {name} has {positions} positions, and a prompt with its response can have "
                f"{longest} tokens (max_prompt_tokens + max_new_tokens), which it could not read. Lower "
                "them, or use another classifier."
            )
        self._vocabulary: int = text_config.vocab_size
        self._name = name
        self._batch_size = batch_size
        self._trust = trust_remote_code
        self._model: Any = None
        if tokenizer is not None:
            self._check_tokenizer(tokenizer)

    def __call__(self, prompts: list[Row], responses: list[Row]) -> list[float]:
        """One number a sequence.

        Raises:
            ValueError: a token id that the classifier has no embedding for.
        """
        sequences = [
            torch.tensor([*prompt["input_ids"], *response["input_ids"]])
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        for ids in sequences:
            if int(ids.max()) >= self._vocabulary:
                raise ValueError(
                    f"reward_model {self._name} has embeddings for {self._vocabulary} tokens and is asked "
                    f"about token {int(ids.max())}: it has another tokenizer than the policy. Use one "
                    "trained with the policy's."
                )
        scores: list[float] = []
        for start in range(0, len(sequences), self._batch_size):
            scores.extend(self._score(sequences[start : start + self._batch_size]))
        return scores

    @torch.no_grad()
    def _score(self, sequences: Sequence[torch.Tensor]) -> list[float]:
        model = self._loaded()
        padding = absent_token(sequences, self._vocabulary)
        if padding is None and len(sequences) > 1:
            return [score for ids in sequences for score in self._score([ids])]
        model.config.get_text_config().pad_token_id = padding
        lengths = torch.tensor([len(ids) for ids in sequences])
        input_ids = torch.nn.utils.rnn.pad_sequence(
            list(sequences), batch_first=True, padding_value=padding or 0
        )
        mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
        logits = model(input_ids=input_ids.to(model.device), attention_mask=mask.to(model.device)).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return scores

    def _loaded(self) -> Any:
        if self._model is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
            model = AutoModelForSequenceClassification.from_pretrained(
                self._name, config=self._config, trust_remote_code=self._trust
            )
            self._model = model.eval().to(device)
        return self._model

    def _check_tokenizer(self, policys: Any) -> None:
        if (
            cached_file(self._name, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
            is None
        ):
            logger.info(
                "reward_model %s comes without a tokenizer: it is taken to read the policy's token ids",
                self._name,
            )
            return
        own = AutoTokenizer.from_pretrained(self._name, trust_remote_code=self._trust).get_vocab()
        shared = {token: number for token, number in policys.get_vocab().items() if token in own}
        differing = [token for token, number in shared.items() if own[token] != number]
        if differing or not shared:
            example = (
                f"{differing[0]!r} is {shared[differing[0]]} for the policy and {own[differing[0]]} for it"
                if differing
                else "they share no token"
            )
            raise ValueError(
                f"reward_model {self._name} has another tokenizer than the policy ({example}), so it would "
                "judge other text than was written. Use a classifier trained with the policy's tokenizer."
            )


def absent_token(sequences: Sequence[torch.Tensor], vocabulary: int) -> int | None:
    """The smallest token id that occurs in none of the sequences; None if all `vocabulary` ids do."""
    present = torch.zeros(vocabulary, dtype=torch.bool)
    for ids in sequences:
        present[ids] = True
    absent = torch.nonzero(~present)
    return int(absent[0]) if len(absent) else None
