"""A trained judge: a sequence classifier with one output, as a reward function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from multipack.train.ppo.reward import Row


class RewardModel:
    """Rewards a response by the classifier's output for prompt and response together.

    It reads the policy's token ids, so it must have the policy's tokenizer. Weights are read at the first use.

    Args:
        name: folder or hub name.
        pad_token_id: fills up shorter sequences on the right.
        batch_size: sequences scored at once.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        ValueError: the classifier has more than one output, so that none of them is the reward.
    """

    def __init__(
        self, name: str, *, pad_token_id: int, batch_size: int, trust_remote_code: bool = False
    ) -> None:
        of = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        if of.num_labels != 1:
            raise ValueError(
                f"reward_model {name} has {of.num_labels} outputs; a reward is one number. Use a classifier with num_labels 1."
            )
        of.pad_token_id = pad_token_id
        self._config = of
        self._name = name
        self._batch_size = batch_size
        self._trust = trust_remote_code
        self._model: Any = None

    def __call__(self, prompts: list[Row], responses: list[Row]) -> list[float]:
        """One number a sequence."""
        sequences = [
            torch.tensor([*prompt["input_ids"], *response["input_ids"]])
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        scores: list[float] = []
        for start in range(0, len(sequences), self._batch_size):
            scores.extend(self._score(sequences[start : start + self._batch_size]))
        return scores

    @torch.no_grad()
    def _score(self, sequences: Sequence[torch.Tensor]) -> list[float]:
        model = self._loaded()
        lengths = torch.tensor([len(ids) for ids in sequences])
        input_ids = torch.nn.utils.rnn.pad_sequence(
            list(sequences), batch_first=True, padding_value=self._config.pad_token_id
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
