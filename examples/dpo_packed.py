"""Direct preference optimisation (Rafailov et al. 2023) on packed pairs, in plain torch.

    python examples/dpo_packed.py torchrun --nproc-per-node 2 examples/dpo_packed.py    # the same code; each
    rank gets its share of the pairs

`together="pair"` keeps the chosen and the rejected answer of a pair in one bin, the chosen one first as in
the data, so the loss of a pair needs one forward pass and no other rank. It is the loss that the pair has
alone, which the script checks before it trains.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM

from multipack import DataLoader, optimizer_steps, packed_dataloader
from multipack.integrations.attention import model_inputs, stock_attention

BETA = 0.1
Row = dict[str, Any]


def preference_rows(num_pairs: int, seed: int = 0) -> list[Row]:
    """Two rows a pair, chosen and rejected: a shared prompt of random tokens, and answers that are learnt."""
    random = np.random.default_rng(seed)
    rows = []
    for pair in range(num_pairs):
        prompt = random.integers(1, 64, random.integers(2, 9)).tolist()
        for _ in ("chosen", "rejected"):
            answer = random.integers(1, 64, random.integers(1, 13)).tolist()
            mask = [0] * len(prompt) + [1] * len(answer)
            rows.append({"input_ids": prompt + answer, "completion_mask": mask, "pair": pair})
    return rows


def answer_log_probs(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Log-probability of the answer of each sequence of a flat batch, float32 [num_sequences]."""
    logits = model(**model_inputs(batch)).logits[0, :-1].float()
    of_tokens = -cross_entropy(logits, batch["labels"][0, 1:], reduction="none")  # 0 where nothing is learnt
    sums = torch.zeros(len(batch["group"]))
    return sums.index_add(0, batch["seq_idx"][0, 1:].long(), of_tokens)


def pair_losses(policy: Tensor, reference: Tensor) -> Tensor:
    """DPO's loss of each pair, from log-probabilities [2 * num_pairs] in which the chosen answers come
    first."""
    gain = policy - reference
    return -logsigmoid(BETA * (gain[0::2] - gain[1::2]))


def loss_sum(policy: nn.Module, reference: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Sum over the pairs of a batch. A batch that only repeats another has num_sequences 0, and counts for
    nothing."""
    with torch.no_grad():
        fixed = answer_log_probs(reference, batch)
    counts = min(batch["num_sequences"], 1)
    return pair_losses(answer_log_probs(policy, batch), fixed).sum() * counts


def num_pairs(batches: Sequence[Mapping[str, Any]]) -> int:
    """Pairs of an optimizer step, over all ranks."""
    return int(over_ranks(sum(batch["num_sequences"] for batch in batches)) / 2)


def over_ranks(value: float) -> float:
    """Sum over the ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def pair_loader(rows: list[Row], capacity: int = 128, **options: Any) -> DataLoader[dict[str, Any]]:
    """Packed pairs."""
    return packed_dataloader(rows, capacity, together="pair", **options)


def packed_mean(policy: nn.Module, reference: nn.Module, loader: DataLoader[dict[str, Any]]) -> float:
    """Mean loss of all pairs of an epoch, over all ranks."""
    with torch.no_grad():
        batches = list(loader)
        return over_ranks(sum(float(loss_sum(policy, reference, b)) for b in batches)) / num_pairs(batches)


def separate_mean(policy: nn.Module, reference: nn.Module, rows: list[Row]) -> float:
    """The same without packing: each answer alone, by the model's stock attention."""

    def log_prob(model: nn.Module, row: Row) -> Tensor:
        tokens = torch.tensor(row["input_ids"])
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        learnt = logits.gather(1, tokens[1:, None])[:, 0] * torch.tensor(row["completion_mask"][1:])
        return learnt.sum()

    with torch.no_grad(), stock_attention(policy), stock_attention(reference):
        gains = torch.stack([log_prob(policy, row) - log_prob(reference, row) for row in rows])
    return float(-logsigmoid(BETA * (gains[0::2] - gains[1::2])).double().mean())


def models() -> tuple[nn.Module, nn.Module]:
    """A policy that has moved a little, and the reference it came from."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    reference = LlamaForCausalLM._from_config(config, attn_implementation="multipack").requires_grad_(False)
    policy = copy.deepcopy(reference).requires_grad_(True)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return policy, reference


def main() -> None:
    """Check the loss, then train."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    rows = preference_rows(64)
    policy, reference = models()
    packed = packed_mean(policy, reference, pair_loader(rows))
    separate = separate_mean(policy, reference, rows)
    assert abs(packed - separate) < 1e-6, (packed, separate)
    print(f"64 pairs: loss {packed:.6f} packed, {separate:.6f} alone")

    if dist.is_initialized():
        policy = nn.parallel.DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    loader = pair_loader(rows, accumulate=2)
    for epoch in range(3):
        total = 0.0
        for step in optimizer_steps(loader):
            pairs = num_pairs(step)
            for batch in step:
                loss = loss_sum(policy, reference, batch)
                (loss * step.num_replicas / pairs).backward()  # gradients are averaged over ranks
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {over_ranks(total) / 64:.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
