"""Static batches on one GPU: a CUDA graph captured on batch 0 replays on 200 of them, and attention takes
empty segments.

    python -m benchmarks.gpu_static

A small Llama in bfloat16, rows of real lengths, 4096 x 2 slots a batch. Every replay's loss and gradients are
checked against an eager step on the same batch, which nothing was captured for; a batch that changed a shape
or a number is an error. Variable-length attention with empty segments is checked against the same rows
without them first. Says so and stops where there is no GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu_varlen import boundaries, made, step
from benchmarks.length_sets import from_quantiles
from benchmarks.real_lengths import LENGTH_QUANTILES
from benchmarks.record import record
from benchmarks.timing import over
from multipack import packed_dataloader
from multipack.integrations.attention import ATTENTION, model_inputs, multipack_attention
from multipack.integrations.segment_attention import Segments
from multipack.train.loss import cross_entropy_sum

CAPACITY, BINS, MAX_SEQUENCES = 4096, 2, 32
BATCHES = 200
BFLOAT16_ERROR = 0.02
SMALL_LLAMA = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": CAPACITY,
    "tie_word_embeddings": False,
}

Batch = dict[str, Any]
LossAndGradients = list[Tensor]


def relative_error(found: LossAndGradients, right: LossAndGradients) -> float:
    """Root mean square of what a tensor is off, over that of its right values; the worst of the tensors."""
    errors = [
        (one.float() - right_one.float()).square().mean().sqrt() / right_one.float().square().mean().sqrt()
        for one, right_one in zip(found, right, strict=True)
    ]
    return float(torch.stack(errors).max())  # of torch, which keeps a NaN


def empty_segments_error(device: torch.device, dtype: torch.dtype, num_rows: int) -> float:
    """How far attention, forward and backward, is off when empty segments follow the rows."""
    rows = made(device, num_rows, dtype)
    ends = boundaries(rows)
    filled = torch.cat((ends, ends[-1:].expand(64)))

    def attend_to(ends: Tensor) -> LossAndGradients:
        def attend(_: object) -> Tensor:
            found, _weights = multipack_attention(
                nn.Module(),
                *rows.leaves,
                None,
                cu_seq_lens_q=ends,
                max_length_q=max(rows.lengths),
                segments=Segments(ends),
            )
            return found[0]

        return step(attend, rows)

    return relative_error(attend_to(filled), attend_to(ends))


def batches(device: torch.device, vocabulary: int, count: int) -> Iterator[Batch]:
    """Static batches of rows of real lengths, as many as asked for, over as many epochs as that takes."""
    lengths = np.minimum(from_quantiles(LENGTH_QUANTILES, 2000, LENGTH_QUANTILES[-1]), CAPACITY)
    rng = np.random.default_rng(0)
    rows = [rng.integers(5, vocabulary, length).tolist() for length in lengths.tolist()]
    loader = packed_dataloader(
        {"input_ids": rows, "labels": rows},
        CAPACITY,
        bins_per_batch=BINS,
        max_sequences_per_bin=MAX_SEQUENCES,
        pad_to="capacity",
        static=True,
        device=device,
    )

    def endless() -> Iterator[Batch]:
        while True:
            yield from loader

    return islice(endless(), count)


def changed(first: Batch, batch: Batch) -> list[str]:
    """Names of what a graph would have wrong: another shape, dtype, or number handed to the model."""
    wrong = [
        name
        for name, value in first.items()
        if isinstance(value, Tensor) and (batch[name].shape, batch[name].dtype) != (value.shape, value.dtype)
    ]
    return wrong + [name for name in ("max_length_q", "max_length_k") if batch[name] != first[name]]


def train_step(model: nn.Module, batch: Batch) -> LossAndGradients:
    """Loss summed over targets and all gradients. Every slot goes through the output layer: how many predict
    differs by batch."""
    logits = model(**model_inputs(batch)).logits[0, :-1]
    loss = cross_entropy_sum(logits, batch["labels"][0, 1:])
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def small_llama(device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(
        LlamaConfig(**SMALL_LLAMA), attn_implementation=ATTENTION, dtype=torch.bfloat16
    )
    return model.to(device)


def captured(model: nn.Module, first: Batch) -> Callable[[Batch], LossAndGradients]:
    """A step that copies a batch over the one the graph was captured on, and replays."""
    held = {name: value.clone() if isinstance(value, Tensor) else value for name, value in first.items()}
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train_step(model, held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = train_step(model, held)

    def replay(batch: Batch) -> LossAndGradients:
        for name, value in held.items():
            if isinstance(value, Tensor):
                value.copy_(batch[name])
        graph.replay()
        return found

    return replay


def seconds_of(run: Callable[[Batch], LossAndGradients], batch: Batch) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run(batch)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured. On a machine with one: python -m benchmarks.gpu_static")
        return 0
    device, table = torch.device("cuda"), "static batches on the GPU"
    off = empty_segments_error(device, torch.bfloat16, 64)
    record(table, "attention with empty segments", "error", 100 * off, "%")
    if not off <= BFLOAT16_ERROR:
        print(f"empty segments change attention by {off:.2%}: nothing was measured.", file=sys.stderr)
        return 1
    model = small_llama(device)
    stream = batches(device, SMALL_LLAMA["vocab_size"], BATCHES)
    first = next(stream)
    replay = captured(model, first)
    worst, by_graph, by_eager = 0.0, [], []
    for number, batch in enumerate([first, *stream]):
        if wrong := changed(first, batch):
            print(f"batch {number} is not static: {', '.join(wrong)} changed.", file=sys.stderr)
            return 1
        off = relative_error(replay(batch), train_step(model, batch))
        if not off <= BFLOAT16_ERROR:
            print(f"batch {number}: the graph is off by {off:.2%} of the eager step.", file=sys.stderr)
            return 1
        worst = max(worst, off)
        by_graph.append(seconds_of(replay, batch))
        by_eager.append(seconds_of(lambda batch: train_step(model, batch), batch))
    record(table, "CUDA graph of batch 0", "batches replayed", len(by_graph))
    record(table, "CUDA graph of batch 0", "error", 100 * worst, "%")
    record(table, "CUDA graph of batch 0", "time", [1e3 * s for s in by_graph], "ms")
    record(table, "eager", "time", [1e3 * s for s in by_eager], "ms")
    record(table, "eager", "over the graph", over(by_eager, by_graph), "x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
