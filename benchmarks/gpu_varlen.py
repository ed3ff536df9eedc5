"""Attention of a packed batch on one GPU, forward and backward: variable-length kernel, padded rows, and a
mask of tokens x tokens.

    python -m benchmarks.gpu_varlen

Heads as TinyLlama's, bfloat16, rows of real lengths. Outputs and gradients of every way are checked against
float32 attention of each row alone before they are timed. Padded rows are causal without any mask, their
fastest way: what lies behind a row's end is not read. Under a minute; says so and stops where there is no
GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.length_sets import from_quantiles
from benchmarks.real_lengths import LENGTH_QUANTILES
from benchmarks.record import record
from benchmarks.timing import in_turns, over
from multipack.integrations.attention import multipack_attention
from multipack.integrations.segment_attention import Segments

HEADS, KEY_VALUE_HEADS, HEAD_DIM = 32, 4, 64
ROWS = 128
ROUNDS = 20


class Rows(NamedTuple):
    """Queries, keys and values of packed rows, [1, heads, tokens, head_dim], their boundaries, and a gradient
    of the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    lengths: list[int]
    grad: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


Attend = Callable[[Rows], Tensor]
"""Attention of packed rows, [tokens, heads, head_dim]."""


def made(device: torch.device, num_rows: int, dtype: torch.dtype) -> Rows:
    lengths = from_quantiles(LENGTH_QUANTILES, num_rows, LENGTH_QUANTILES[-1]).tolist()
    generator = torch.Generator(device).manual_seed(0)

    def drawn(heads: int) -> Tensor:
        shape = (1, heads, sum(lengths), HEAD_DIM)
        return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()

    grad = drawn(HEADS).detach()[0].transpose(0, 1)
    return Rows(drawn(HEADS), drawn(KEY_VALUE_HEADS), drawn(KEY_VALUE_HEADS), lengths, grad)


def boundaries(rows: Rows) -> Tensor:
    ends = torch.tensor([0, *rows.lengths], device=rows.query.device).cumsum(0)
    return ends.to(torch.int32)


def packed(rows: Rows) -> Tensor:
    ends = boundaries(rows)
    found, _ = multipack_attention(
        nn.Module(),
        *rows.leaves,
        None,
        cu_seq_lens_q=ends,
        max_length_q=max(rows.lengths),
        segments=Segments(ends),
    )
    return found[0]


def padded(rows: Rows) -> Tensor:
    real = torch.arange(max(rows.lengths), device=rows.query.device) < boundaries(rows).diff()[:, None]

    def spread(packed: Tensor) -> Tensor:
        flat = packed.new_zeros(*real.shape, packed.shape[1], HEAD_DIM)
        return flat.index_put((real.nonzero(as_tuple=True)), packed[0].transpose(0, 1)).transpose(1, 2)

    query, key, value = (spread(leaf) for leaf in rows.leaves)
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return found.transpose(1, 2)[real]


def masked(rows: Rows) -> Tensor:
    row = torch.repeat_interleave(boundaries(rows).diff())
    mask = (row[:, None] == row).tril()
    found = F.scaled_dot_product_attention(*rows.leaves, attn_mask=mask, enable_gqa=True)
    return found[0].transpose(0, 1)


def alone(rows: Rows) -> Tensor:
    """The reference: each row by itself, from the definition."""
    parts = zip(*(torch.split(leaf, rows.lengths, 2) for leaf in rows.leaves), strict=True)
    group = HEADS // KEY_VALUE_HEADS
    found = []
    for query, key, value in parts:
        scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * HEAD_DIM**-0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        found.append((weights @ value.repeat_interleave(group, 1))[0].transpose(0, 1))
    return torch.cat(found)


WAYS: dict[str, Attend] = {
    "multipack, variable-length": packed,
    "padded rows, SDPA": padded,
    "packed rows, mask of tokens x tokens, SDPA": masked,
}


def step(attend: Attend, rows: Rows) -> list[Tensor]:
    """The output and the gradients of queries, keys and values."""
    found = attend(rows)
    return [found.detach(), *torch.autograd.grad(found, rows.leaves, rows.grad)]


def error(attend: Attend, device: torch.device, num_rows: int, dtype: torch.dtype) -> float:
    """Root mean square of what output or gradients are off, over the root mean square of their right values;
    the worst of them."""
    rows = made(device, num_rows, dtype)
    query, key, value = (leaf.detach().float().requires_grad_() for leaf in rows.leaves)
    right = step(alone, Rows(query, key, value, rows.lengths, rows.grad.float()))
    return max(
        float((found.float() - right_one).square().mean().sqrt() / right_one.square().mean().sqrt())
        for found, right_one in zip(step(attend, rows), right, strict=True)
    )


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured. On a machine with one: python -m benchmarks.gpu_varlen")
        return 0
    device, table = torch.device("cuda"), "attention on the GPU, forward and backward"
    for name, attend in WAYS.items():
        off = error(attend, device, ROWS, torch.bfloat16)
        record(table, name, "error", 100 * off, "%")
        if not off <= 0.02:
            print(
                f"{name}: off by {off:.2%}, more than bfloat16 explains: nothing was measured.",
                file=sys.stderr,
            )
            return 1
    rows = made(device, ROWS, torch.bfloat16)

    def timed(attend: Attend) -> Callable[[], None]:
        def run() -> None:
            step(attend, rows)
            torch.cuda.synchronize()

        return run

    ways = {name: timed(attend) for name, attend in WAYS.items()}
    in_turns(ways, 3)
    seconds = in_turns(ways, ROUNDS)
    ours = next(iter(seconds.values()))
    for name, of in seconds.items():
        record(table, name, "over ours", over(of, ours), "x")
        record(table, name, "time", [1e3 * s for s in of], "ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
