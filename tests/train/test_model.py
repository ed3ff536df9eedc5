"""Models are checked before their weights are read, are the same on every rank, and adapt what was asked."""

from __future__ import annotations

import warnings

import pytest
import torch
from tiny_llama import packed, random_sequences, tiny_llama
from transformers import MistralConfig, MistralForCausalLM

from multipack.train.config import TrainConfig
from multipack.train.loss import causal_lm_loss_sum
from multipack.train.model import build_model, model_config


def build(config: TrainConfig, vocabulary: int = 64):
    return build_model(config, model_config(config, vocabulary, 64), bf16=False)


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
    # Positions start anew in every row, so a bin of 4096 tokens is fine where its rows are not longer than
    # 512.
    config = TrainConfig(sequence_len=4096, overrides_of_model_config={"max_position_embeddings": 512})
    assert model_config(config, 64, 512).max_position_embeddings == 512
    with pytest.raises(
        ValueError, match="the longest row has 513 tokens but the small Llama has 512 positions"
    ):
        model_config(config, 64, 513)


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused():
    config = TrainConfig(overrides_of_model_config={"vocab_size": 32})
    with pytest.raises(ValueError, match="64 tokens but the small Llama has embeddings for 32"):
        model_config(config, 64, 64)


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
    model = build_model(config, model_config(config, 64, 64), bf16=bf16)
    weights = {p.dtype for name, p in model.named_parameters() if "base_layer" in name}
    assert weights == {torch.uint8}
    batch = packed(random_sequences([20, 7]))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        causal_lm_loss_sum(model, batch).backward()
    gradients = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert len(gradients) == 7
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_lora_trains_on_eight_bit_weights(tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    MistralForCausalLM(MistralConfig(vocab_size=64, num_key_value_heads=2, **shape)).save_pretrained(tmp_path)
    config = TrainConfig(
        base_model=str(tmp_path), adapter="lora", load_in_8bit=True, lora_r=4, lora_target_linear=True
    )
    model = build_model(config, model_config(config, 64, 64), bf16=True)
    weights = {p.dtype for name, p in model.named_parameters() if "base_layer" in name}
    assert weights == {torch.int8}
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.filterwarnings(
            "ignore", "MatMul8bitLt: inputs will be cast"
        )  # bitsandbytes says what 8 bits mean
        causal_lm_loss_sum(model, packed(random_sequences([20, 7]))).backward()
    gradients = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert len(gradients) == 7
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_parameters_are_trained_by_name():
    model = build(TrainConfig(unfrozen_parameters=["^lm_head", "model.layers.1.mlp"]))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    projections = {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert trained == {"lm_head.weight", *projections}
    with pytest.raises(ValueError, match="match no parameter, so nothing would be trained"):
        build(TrainConfig(unfrozen_parameters=["layers"]))  # no name begins with it


def test_modules_beside_an_adapter_are_trained_whole():
    model = build(TrainConfig(adapter="lora", lora_target_linear=True, lora_modules_to_save=["lm_head"]))
    whole = [name for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name]
    assert whole == ["base_model.model.lm_head.modules_to_save.default.weight"]


def test_rank_stabilized_lora_scales_by_the_root():
    plain = build(TrainConfig(adapter="lora", lora_r=16, lora_alpha=32, lora_target_linear=True))
    stable = build(
        TrainConfig(
            adapter="lora", lora_r=16, lora_alpha=32, lora_target_linear=True, lora_rank_stabilized=True
        )
    )
    for model, scale in ((plain, 32 / 16), (stable, 32 / 4)):
        found = {
            module.scaling["default"] for name, module in model.named_modules() if name.endswith("q_proj")
        }
        assert found == {scale}
