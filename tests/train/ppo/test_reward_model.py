"""A reward model gives each response the classifier's own score, whatever the policy's tokenizer pads
with."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from multipack.train.data.builtin import byte_tokenizer
from multipack.train.ppo.reward_model import RewardModel, absent_token

END, VOCABULARY = 2, 48
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
DECODER = SIZES | {"intermediate_size": 32, "num_key_value_heads": 1}
FAMILIES = {
    "Llama": DECODER,
    "Qwen2": DECODER,
    "GPTNeoX": SIZES | {"intermediate_size": 32},
    "GPT2": {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2},
    "OPT": SIZES | {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "Roberta": SIZES | {"intermediate_size": 32, "bos_token_id": 0, "eos_token_id": END},
}


def saved(folder, family, pad_token_id, num_labels=1, **more):
    """A classifier with random weights whose configuration pads with `pad_token_id`."""
    sizes = FAMILIES[family] | {"pad_token_id": pad_token_id, "num_labels": num_labels} | more
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        getattr(transformers, f"{family}ForSequenceClassification")(config).save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def own_score(folder, ids):
    """What the classifier itself says of one sequence, with no padding and no search for it."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    if model.config.model_type == "roberta":  # reads the first token: there is nothing to search for
        return model(torch.tensor([ids])).logits.item()
    model.config.pad_token_id = None
    return model(torch.tensor([ids])).logits.item()


@pytest.mark.parametrize(
    "pad_token_id", [None, 0, END], ids=["no padding", "padding 0", "padding is the end"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_is_the_classifiers_own_score(tmp_path, family, pad_token_id):
    if family == "Roberta" and pad_token_id != 0:
        pad_token_id = {None: 1, END: 5}[
            pad_token_id
        ]  # its positions need a padding token, which text may hold
    folder = saved(tmp_path, family, pad_token_id)
    prompts = [[5, 6, 7], [5, 6, 7], [0, 9], [4], [8, END, 8, 0, 11, 12]]
    # Finished, cut off, ended at once, ending twice, and with tokens that others pad with.
    responses = [[8, 9, END], [8, 9], [END], [END, END], [0, 13, 0]]
    right = [own_score(folder, [*p, *r]) for p, r in zip(prompts, responses, strict=True)]
    rows = [[{"input_ids": ids} for ids in side] for side in (prompts, responses)]
    for batch_size in (1, 2, 5):
        assert RewardModel(folder, batch_size=batch_size)(*rows) == pytest.approx(right, abs=1e-6)
    assert len({round(score, 6) for score in right}) == len(right)


def test_a_batch_that_uses_every_token_is_scored_row_by_row(tmp_path):
    folder = saved(tmp_path, "Llama", 0)
    everything = list(range(VOCABULARY))
    assert absent_token([torch.tensor(everything)], VOCABULARY) is None
    assert absent_token([torch.tensor([0, 1, 3]), torch.tensor([2])], VOCABULARY) == 4
    rows = [[{"input_ids": everything}, {"input_ids": [3]}], [{"input_ids": [4, 0]}, {"input_ids": [5]}]]
    right = [own_score(folder, [*everything, 4, 0]), own_score(folder, [3, 5])]
    assert RewardModel(folder, batch_size=2)(*rows) == pytest.approx(right, abs=1e-6)


def test_what_is_no_reward_model_is_refused_before_its_weights_are_read(tmp_path):
    with pytest.raises(ValueError, match="has 2 outputs"):
        RewardModel(saved(tmp_path / "two", "Llama", 0, num_labels=2), batch_size=1)
    folder = saved(tmp_path / "short", "Llama", 0, max_position_embeddings=8)
    with pytest.raises(ValueError, match="has 8 positions, and a prompt with its response can have 9"):
        RewardModel(folder, batch_size=1, longest=9)
    with pytest.raises(ValueError, match="cannot be loaded; give a folder"):
        RewardModel(str(tmp_path / "nothing"), batch_size=1)


def test_tokens_that_it_has_no_embedding_for_are_named(tmp_path):
    reward = RewardModel(saved(tmp_path, "Llama", 0), batch_size=2)
    with pytest.raises(ValueError, match="embeddings for 48 tokens and is asked about token 48"):
        reward([{"input_ids": [3]}], [{"input_ids": [48]}])


def test_another_tokenizer_than_the_policys_is_refused(tmp_path, caplog):
    folder = saved(tmp_path, "Llama", 0, vocab_size=262)
    policys = byte_tokenizer()
    with caplog.at_level("INFO"):
        RewardModel(folder, batch_size=1, tokenizer=policys)
    assert "comes without a tokenizer" in caplog.text

    policys.save_pretrained(folder)
    RewardModel(folder, batch_size=1, tokenizer=policys)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["b"], vocabulary["c"] = vocabulary["c"], vocabulary["b"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match="another tokenizer than the policy"):
        RewardModel(folder, batch_size=1, tokenizer=policys)
