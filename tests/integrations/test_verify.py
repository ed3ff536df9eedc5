"""A model is asked before the first step whether packing is right for it, and stays as it was."""

from __future__ import annotations

import pytest
import torch
from tiny_llama import tiny_llama
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_causal_mask_function

from multipack.integrations.masks import visible_tokens
from multipack.integrations.verify import _longest_span, packing_models, verify_packing

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def model_of(family, attention="multipack", **arguments):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **SIZES | arguments)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@pytest.mark.parametrize("training", [False, True])
def test_a_right_model_passes_and_nothing_of_it_changes(training):
    model = tiny_llama().train(training)
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    verify_packing(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.config._attn_implementation == "multipack"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_dropout_of_a_training_model_is_not_taken_for_a_leak():
    verify_packing(tiny_llama(attention_dropout=0.3).train())


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("gemma2", {"head_dim": 8, "sliding_window": 8}),
        ("gpt_oss", {"head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_soft_caps_and_sinks_train_packed(family, arguments):
    model = model_of(family, **arguments)
    verify_packing(model)


def test_a_recurrent_model_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"RecurrentGemmaForCausalLM .*sequences see each other.*PaddedCollator"
    ):
        verify_packing(model_of("recurrent_gemma", lru_width=32, block_types=["recurrent", "attention"]))


def test_attention_of_its_own_is_refused_by_name():
    with pytest.raises(ValueError, match=r"BloomForCausalLM .*code of its own"):
        verify_packing(model_of("bloom"))


def wrong_layer(model, change):
    """Let the first layer mix tokens as `change` does, beside its attention."""
    layer = model.model.layers[0]
    forward = layer.forward

    def changed(hidden_states, *args, **kwargs):
        return forward(hidden_states + change(hidden_states), *args, **kwargs)

    layer.forward = changed
    return model


def test_a_layer_that_reads_the_token_before_is_found():
    with pytest.raises(ValueError, match="sequences see each other"):
        verify_packing(wrong_layer(tiny_llama(), lambda states: states.roll(1, 1)))


def test_a_layer_that_reads_the_next_token_is_found():
    with pytest.raises(ValueError, match="sees the future"):
        verify_packing(wrong_layer(tiny_llama(), lambda states: states.roll(-1, 1)))


def test_a_layer_that_knows_its_place_in_the_row_is_found():
    with pytest.raises(ValueError, match="not those of the sequence alone"):
        verify_packing(
            wrong_layer(tiny_llama(), lambda states: torch.arange(states.shape[1])[None, :, None] / 9)
        )


def test_what_zero_gates_hide_is_found():
    # A recurrent branch behind a gate of zeros has no effect on any logit until the first step opens it.
    model = tiny_llama()
    model.gate = nn.Parameter(torch.zeros(32))
    wrong_layer(model, lambda states: model.gate * states.roll(1, 1))
    with pytest.raises(ValueError, match="sequences see each other"):
        verify_packing(model)
    assert not model.gate.any()


def test_what_is_no_model_of_transformers_is_a_type_error():
    with pytest.raises(TypeError, match="got Linear"):
        verify_packing(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("family", "arguments", "max_length", "longest"),
    [
        ("mistral", {"sliding_window": 40}, None, 44),
        ("mistral", {"sliding_window": 40}, 30, 30),
        ("llama4_text", {"attention_chunk_size": 50, "num_local_experts": 2}, None, 54),
        ("llama", {}, None, 4),
    ],
)
def test_sequences_fill_every_window_that_the_run_can_fill(family, arguments, max_length, longest):
    assert _longest_span(model_of(family, **arguments), max_length) == longest


def test_a_mask_that_only_evaluation_knows_is_evaluated():
    def not_the_first(batch, head, query, key):
        return (key > 0) | (query == 0)

    assert visible_tokens(sliding_window_causal_mask_function(3)).window == 3
    visible = visible_tokens(and_masks(causal_mask_function, not_the_first))
    # A sequence of 3 tokens at the start of the second row: the others do not see the first.
    found = visible.within(1, 0, 3, torch.device("cpu"))
    assert found.int().tolist() == [[[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]]


def test_trained_transformers_models_are_found_inside_a_module():
    policy, reference = tiny_llama(), tiny_llama().requires_grad_(False)
    assert packing_models(nn.ModuleDict({"policy": policy, "reference": reference})) == [policy]
