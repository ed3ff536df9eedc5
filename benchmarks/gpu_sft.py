"""The loaders on one GPU: a Llama of TinyLlama's shape with random weights, rows of real lengths, 4096 x 16 slots a step.

    python -m benchmarks.gpu_sft

History's configuration 1 as near as one script comes: full fine-tune in bfloat16, activations recomputed, 8-bit AdamW. A padded batch
has as many rows as fit into the slots of a packed one. Under 8 minutes on a GPU with 80 GB; says so and stops where there is none.
"""

from __future__ import annotations

import torch

from benchmarks.throughput import report
from benchmarks.throughput_cells import run
from benchmarks.throughput_settings import LENGTH_QUANTILES, Settings
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


def main() -> None:
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured. On a machine with one: python -m benchmarks.gpu_sft")
        return
    settings = Settings(
        engines=["1 rank"],
        loaders=["padded", "trl packed", "multipack"],
        num_rows=52_000,
        sequence_len=4096,
        micro_batch_size=16,
        padded_rows=SLOTS // LENGTH_QUANTILES[-1],
        steps=12,
        rounds=2,
        model=TINY_LLAMA_1B,
        optimizer="adamw_bnb_8bit",
        bf16=True,
        recompute=True,
    )
    with process_group() as device:
        cells = run(settings, device)
    print(report(cells, settings, ranks=1))


if __name__ == "__main__":
    main()
