"""Models are checked before their weights are read, are the same on every rank, and adapt what was asked."""

from __future__ import annotations

import pytest
import torch
from tiny_llama import packed, random_sequences, tiny_llama
from transformers import MistralConfig, MistralForCausalLM

from multipack.train.config import TrainConfig
from multipack.train.loss import causal_lm_loss_sum
from multipack.train.model import build_model, model_config


def build(config: TrainConfig, vocabulary: int = 64):
    return build_model(config, model_config(config, vocabulary), bf16=False)


def test_random_weights_follow_the_seed_and_touch_no_global_state():
    torch.manual_seed(5)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    one, two, other = build(TrainConfig()), build(TrainConfig()), build(TrainConfig(seed=1))
    assert torch.equal(torch.rand(1), drawn)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_overrides_shape_the_small_llama():
    config = TrainConfig(overrides_of_model_config={"hidden_size": 64, "num_hidden_layers": 1})
    model = build(config)
    assert (model.config.hidden_size, len(model.model.layers)) == (64, 1)


def test_rows_longer_than_the_positions_are_refused():
    config = TrainConfig(sequence_len=4096, overrides_of_model_config={"max_position_embeddings": 512})
    with pytest.raises(ValueError, match="sequence_len is 4096 but the small Llama has 512 positions"):
        model_config(config, 64)


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused():
    config = TrainConfig(overrides_of_model_config={"vocab_size": 32})
    with pytest.raises(ValueError, match="64 tokens but the small Llama has embeddings for 32"):
        model_config(config, 64)


def test_an_unknown_model_type_is_refused(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type is LamaForCausalLM, which transformers"):
        build(TrainConfig(base_model=str(tmp_path), model_type="LamaForCausalLM", sequence_len=256))


def test_lora_trains_every_linear_layer_but_the_head():
    model = build(TrainConfig(adapter="lora", lora_r=4, lora_target_linear=True))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[1] for name in trained}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(".lora_" in name for name in trained)


@pytest.mark.parametrize("bf16", [False, True])
def test_qlora_trains_on_four_bit_weights(tmp_path, bf16):
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    MistralForCausalLM(MistralConfig(vocab_size=64, num_key_value_heads=2, **shape)).save_pretrained(tmp_path)
    config = TrainConfig(
        base_model=str(tmp_path), model_type="MistralForCausalLM", adapter="qlora", load_in_4bit=True,
        lora_r=4, lora_target_linear=True, sequence_len=128, gradient_checkpointing=True,
    )  # fmt: skip
    model = build_model(config, model_config(config, 64), bf16=bf16)
    weights = {p.dtype for name, p in model.named_parameters() if "base_layer" in name}
    assert weights == {torch.uint8}
    batch = packed(random_sequences([20, 7]))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        causal_lm_loss_sum(model, batch).backward()
    gradients = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert len(gradients) == 7
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
