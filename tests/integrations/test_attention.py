"""Packed sequences must not see each other; where stock paths let them, a test says so."""

from __future__ import annotations

import pytest
import torch
from tiny_llama import packed, random_sequences, tiny_llama
from transformers import MistralConfig, MistralForCausalLM

from multipack.integrations.attention import model_inputs, multipack_attention, stock_attention
from multipack.train.model import recompute_activations

LENGTHS = [17, 5, 30, 1, 12]


def single_logits(model, sequences):
    rows = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids, _ in sequences]
    return torch.cat(rows)


@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
@pytest.mark.report("DeepOpt-com/WrinkleFree-Monorepo#53")
def test_packed_logits_equal_those_of_single_runs(key_value_heads):
    sequences = random_sequences(LENGTHS)
    model = tiny_llama(num_key_value_heads=key_value_heads)
    stock = tiny_llama(attention="eager", num_key_value_heads=key_value_heads)
    logits = model(**model_inputs(packed(sequences))).logits[0]
    torch.testing.assert_close(logits, single_logits(stock, sequences), atol=1e-5, rtol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_gradients_equal_those_of_single_runs(checkpointing):
    sequences = random_sequences(LENGTHS)
    model, stock = tiny_llama().train(), tiny_llama(attention="eager")
    if checkpointing:
        recompute_activations(model)
    weights = torch.randn(sum(LENGTHS), 64, generator=torch.Generator().manual_seed(3))
    (model(**model_inputs(packed(sequences))).logits[0] * weights).sum().backward()
    (single_logits(stock, sequences) * weights).sum().backward()
    for ours, right in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, right.grad, atol=1e-4, rtol=1e-4)


def test_rows_are_read_as_one_long_row():
    sequences = random_sequences([8, 2, 6, 4])
    flat = packed(sequences)
    rows = flat | {key: flat[key].view(2, 10) for key in ("input_ids", "position_ids", "labels")}
    model = tiny_llama()
    logits = model(**model_inputs(rows)).logits.reshape(20, -1)
    torch.testing.assert_close(logits, model(**model_inputs(flat)).logits[0], atol=1e-5, rtol=0)


def test_sliding_window_counts_inside_each_sequence():
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM._from_config(config, attn_implementation="multipack")
    sequences = random_sequences([3, 4, 5, 20])
    logits = model(**model_inputs(packed(sequences))).logits[0]
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits, single_logits(model, sequences), atol=1e-5, rtol=0)


def test_bfloat16_autocast_keeps_float32_rounding_errors_small():
    sequences = random_sequences(LENGTHS)
    model = tiny_llama()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**model_inputs(packed(sequences))).logits[0]
    right = single_logits(tiny_llama(attention="eager"), sequences)
    assert (logits.float() - right).abs().max() < 0.05 * right.abs().max()


def largest_error(model, **inputs):
    sequences = random_sequences(LENGTHS)
    right = single_logits(tiny_llama(attention="eager"), sequences)
    with torch.no_grad():
        return float((model(**inputs).logits[0] - right).abs().max())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_stock_attention_leaks_across_packed_sequences(attention):
    # transformers sees the boundaries in position_ids, but only with neither a mask nor a cache: both are easily added.
    flat = packed(random_sequences(LENGTHS))
    ids, positions = flat["input_ids"], flat["position_ids"]
    stock = tiny_llama(attention=attention)
    assert largest_error(stock, input_ids=ids, position_ids=positions, use_cache=False) < 1e-5
    ones = torch.ones_like(ids)
    assert (
        largest_error(stock, input_ids=ids, position_ids=positions, attention_mask=ones, use_cache=False)
        > 0.01
    )
    assert largest_error(stock, input_ids=ids, position_ids=positions, use_cache=True) > 0.01
    boundaries = {"cu_seq_lens_q": flat["cu_seq_lens_q"], "cu_seq_lens_k": flat["cu_seq_lens_k"]}
    assert largest_error(stock, input_ids=ids, use_cache=False, **boundaries) > 0.01


def test_missing_boundaries_are_an_error():
    flat = packed(random_sequences(LENGTHS))
    with pytest.raises(ValueError, match="no cu_seq_lens_q"):
        tiny_llama()(input_ids=flat["input_ids"], position_ids=flat["position_ids"], use_cache=False)


def test_a_mask_beside_the_boundaries_is_an_error():
    flat = packed(random_sequences(LENGTHS))
    with pytest.raises(ValueError, match="neither a mask nor a key-value cache"):
        tiny_llama()(**model_inputs(flat), attention_mask=torch.ones_like(flat["input_ids"]))


def test_boundaries_that_end_early_are_an_error():
    flat = packed(random_sequences(LENGTHS))
    flat["cu_seq_lens_q"] = flat["cu_seq_lens_q"][:-1]
    with pytest.raises(ValueError, match="ends at 53 but the batch has 65 tokens"):
        tiny_llama()(**model_inputs(flat))


@pytest.mark.parametrize("argument", ["softcap", "s_aux", "position_bias"])
def test_what_this_attention_has_not_is_refused(argument):
    states = torch.randn(1, 2, 4, 8)
    boundaries = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=argument):
        multipack_attention(
            torch.nn.Module(),
            states,
            states,
            states,
            None,
            cu_seq_lens_q=boundaries,
            **{argument: torch.ones(1)},
        )


def test_generation_runs_under_stock_attention_and_leaves_ours_in_place():
    model = tiny_llama().eval()
    prompt = torch.tensor([[5, 6, 7]])
    with stock_attention(model):
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    assert tokens.shape == (1, 7)
    assert model.config._attn_implementation == "multipack"


def test_boundaries_are_read_once_for_all_layers(monkeypatch):
    flat = packed(random_sequences(LENGTHS))
    reads = []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or read(tensor))
    tiny_llama(num_hidden_layers=4)(**model_inputs(flat))
    assert len(reads) == 1
