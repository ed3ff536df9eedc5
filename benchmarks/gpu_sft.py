"""The loaders on one GPU: a Llama of TinyLlama's shape with random weights, rows of real lengths, 4096 x 16
slots a step.

    python -m benchmarks.gpu_sft

History's configuration 1 as near as one script comes: full fine-tune in bfloat16, activations recomputed,
8-bit AdamW. A padded batch has as many rows as fit into the slots of a packed one; rivals load with two
worker processes. First the logits of packed rows are checked against those of padded ones. Under 8 minutes on
a GPU with 80 GB; says so and stops where there is none.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.real_lengths import LENGTH_QUANTILES
from benchmarks.record import record
from benchmarks.throughput import record_cells
from benchmarks.throughput_cells import run
from benchmarks.throughput_settings import Settings
from multipack import PackedCollator, PaddedCollator, TokenDataset
from multipack.integrations.attention import ATTENTION, model_inputs, stock_attention
from multipack.train.process import process_group

SLOTS = 4096 * 16
TINY_LLAMA_1B = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def logit_errors(device: torch.device, shape: dict[str, Any]) -> tuple[float, float]:
    """How far bfloat16 logits are off those of padded rows in float32: of packed rows through our attention,
    and of padded rows.

    Root mean squares, relative to the logits' own. Packing may cost no more than bfloat16 does. The weights
    are random, so that most of a logit comes from attention: tokens that saw another sequence would be off by
    as much as the logits are large.
    """
    torch.manual_seed(0)
    config = LlamaConfig(**shape)
    model = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
    model = model.to(device).eval()
    rng = np.random.default_rng(0)
    rows = [rng.integers(5, shape["vocab_size"], length).tolist() for length in LENGTH_QUANTILES]
    selection = TokenDataset({"input_ids": rows}).__getitems__(list(range(len(rows))))

    def logits(batch: dict[str, Any], bf16: bool) -> Tensor:
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            found: Tensor = model(**model_inputs(inputs)).logits
        return found[inputs["attention_mask"].bool()] if "attention_mask" in inputs else found[0]

    packed = logits(PackedCollator()(selection), bf16=True).float()
    padded_rows = PaddedCollator()(selection)
    with stock_attention(model):
        padded, exact = logits(padded_rows, bf16=True).float(), logits(padded_rows, bf16=False)
    scale = exact.square().mean().sqrt()
    mine, theirs = (float((found - exact).square().mean().sqrt() / scale) for found in (packed, padded))
    return mine, theirs


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured. On a machine with one: python -m benchmarks.gpu_sft")
        return 0
    settings = Settings(
        engines=["1 rank"],
        loaders=["padded +2", "trl packed +2", "multipack"],
        num_rows=52_000,
        sequence_len=4096,
        micro_batch_size=16,
        padded_rows=SLOTS // LENGTH_QUANTILES[-1],
        steps=8,
        rounds=2,
        model=TINY_LLAMA_1B,
        optimizer="adamw_bnb_8bit",
        bf16=True,
        recompute=True,
    )
    with process_group() as device:
        packed, padded = logit_errors(device, TINY_LLAMA_1B | {"num_hidden_layers": 2})
        table = "logits in bfloat16, off those of padded rows in float32"
        record(table, "packed rows", "error", 100 * packed, "%")
        record(table, "padded rows", "error", 100 * padded, "%")
        if not packed <= 1.5 * padded:
            print("Packed rows give other logits: nothing was measured.", file=sys.stderr)
            return 1
        cells = run(settings, device)
    record_cells(cells, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
