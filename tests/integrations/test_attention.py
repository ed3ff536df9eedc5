"""Packed sequences must not see each other; where stock paths let them, a test says so."""

from __future__ import annotations

import inspect

import pytest
import torch
from tiny_llama import packed, random_sequences, tiny_llama
from transformers import MistralConfig, MistralForCausalLM

from multipack import PaddedCollator
from multipack.integrations.attention import model_inputs, multipack_attention, stock_attention
from multipack.integrations.masks import VisibleTokens
from multipack.integrations.segment_attention import Asked, segment_loop, varlen
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
    # transformers sees the boundaries in position_ids, but only with neither a mask nor a cache: both are
    # easily added.
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


def one_layer(**asked):
    states = torch.randn(1, 2, 4, 8)
    boundaries = torch.tensor([0, 4], dtype=torch.int32)
    return multipack_attention(
        torch.nn.Module(), states, states, states, None, cu_seq_lens_q=boundaries, **asked
    )[0]


@pytest.mark.parametrize("argument", ["indices", "block_indices", "head_mask", "something_new"])
def test_an_argument_that_this_attention_does_not_have_is_refused(argument):
    with pytest.raises(ValueError, match=rf"\['{argument}'\]"):
        one_layer(**{argument: torch.ones(1)})
    one_layer(**{argument: None})


def test_a_layer_that_is_not_causal_is_refused():
    with pytest.raises(ValueError, match="not causal"):
        one_layer(is_causal=False)


@pytest.mark.parametrize("asked", ["softcap", "s_aux", "sinks", "position_bias", "sliding_window", "dropout"])
@pytest.mark.parametrize("rows", [1, 2])
def test_what_a_layer_asks_for_is_applied_inside_each_segment(asked, rows):
    # Rows of 12 tokens: segments of 7 and 5, or 3, 4 and 5. The oracle is a softmax over the whole batch in
    # float64.
    torch.manual_seed(1)
    lengths = [7, 5, 3, 4, 5][: 2 if rows == 1 else 5]
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = torch.randn(rows, 4, 12, 8), torch.randn(rows, 2, 12, 8), torch.randn(rows, 2, 12, 6)
    value = {
        "softcap": 0.5,
        "s_aux": torch.randn(4),
        "sinks": torch.randn(rows, 4, 12, 1),
        "position_bias": torch.randn(rows, 4, 12, 12),
        "sliding_window": 3,
        "dropout": 1.0,
    }[asked]
    found, _ = multipack_attention(
        torch.nn.Module(), q, k, v, None, cu_seq_lens_q=boundaries, **{asked: value}
    )
    scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    if asked == "softcap":
        scores = 0.5 * torch.tanh(scores / 0.5)
    if asked == "position_bias":
        scores = scores + value
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).view(rows, 12)
    distance = torch.arange(12)[:, None] - torch.arange(12)
    visible = (segment[:, :, None] == segment[:, None, :]) & (distance >= 0)
    if asked == "sliding_window":
        visible &= distance < 3
    weights = scores.masked_fill(~visible[:, None], -torch.inf).exp()
    sink = {
        "s_aux": lambda: value[None, :, None, None].exp(),
        "sinks": value.exp if asked == "sinks" else None,
    }
    total = weights.sum(-1, keepdim=True) + (sink[asked]() if asked in sink else 0)
    right = ((weights / total) @ v.double().repeat_interleave(2, 1)).transpose(1, 2)
    if asked == "dropout":
        right = torch.zeros_like(right)
    torch.testing.assert_close(found.double(), right, atol=1e-5, rtol=0)


@pytest.mark.parametrize("value_width", [6, 8, 12])
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_gets_states_of_one_width_and_the_scale_of_the_keys(monkeypatch, value_width, window):
    """On CUDA: what the variable-length kernel of torch is handed, checked by a stand-in with its
    signature."""
    seen = []

    def varlen_attn(
        query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] == max(8, value_width)
        assert (query.shape[0], max_q, max_k) == (int(cu_q[-1]), 5, 5)
        assert enable_gqa
        seen.append(window_size)
        lengths = cu_q.diff().tolist()
        states = (states.transpose(0, 1)[None] for states in (query, key, value))
        asked = Asked(VisibleTokens(window=None if window_size[0] < 0 else window_size[0] + 1), scale)
        return segment_loop(*states, lengths, asked, tokens_per_row=9)[0]

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(
        "multipack.integrations.segment_attention._varlen_parameters",
        lambda: frozenset(inspect.signature(varlen_attn).parameters),
    )
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, value_width)
    asked = Asked(VisibleTokens(window=window))
    found = varlen(q, k, v, torch.tensor([0, 4, 9], dtype=torch.int32), 5, asked)
    assert seen == [(-1, 0) if window is None else (window - 1, 0)]
    torch.testing.assert_close(found, segment_loop(q, k, v, [4, 5], asked, tokens_per_row=9)[0])


def test_empty_segments_are_passed_over():
    q = torch.randn(1, 2, 5, 4)
    asked = Asked(VisibleTokens())
    torch.testing.assert_close(
        segment_loop(q, q, q, [3, 2, 0, 0], asked, tokens_per_row=5),
        segment_loop(q, q, q, [3, 2], asked, tokens_per_row=5),
    )


def test_left_padded_logits_equal_those_of_single_runs():
    sequences = random_sequences(LENGTHS)
    batch = PaddedCollator(padding_side="left")([{"input_ids": ids} for ids, _ in sequences])
    model = tiny_llama(attention="sdpa")
    logits = model(**model_inputs(batch)).logits[batch["attention_mask"].bool()]
    torch.testing.assert_close(logits, single_logits(model, sequences), atol=1e-5, rtol=0)


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
