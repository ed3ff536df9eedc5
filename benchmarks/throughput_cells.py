"""One engine after another, each fed by every loader in turn; started by throughput.py or gpu_sft.py, alone
or under torchrun.

All loaders read the same rows. A cell is a few warm-up steps and then `steps` timed ones between two
barriers; the rounds of an engine go over all loaders again, so that a slow moment of the machine hits them
alike.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from benchmarks.length_sets import from_quantiles
from benchmarks.real_lengths import LENGTH_QUANTILES
from benchmarks.throughput_settings import Settings
from multipack import TokenDataset, packed_dataloader
from multipack.integrations.attention import ATTENTION
from multipack.train.engine import EngineOptions, build_engine
from multipack.train.loss import causal_lm_loss_sum
from multipack.train.model import recompute_activations
from multipack.train.optim import OptimizerSpec
from multipack.train.process import process_group, sum_over_ranks

WARM_UP = 3
IGNORE_INDEX = -100


def rows_of(settings: Settings, folder: Path) -> datasets.Dataset:
    """Memory-mapped rows of random tokens with real lengths; the first third of each row is no target."""
    lengths = from_quantiles(LENGTH_QUANTILES, settings.num_rows, settings.sequence_len)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    vocab_size = settings.model.get("vocab_size", 512)
    tokens = np.random.default_rng(1).integers(5, vocab_size, offsets[-1], dtype=np.int32)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    labels = np.where(position < np.repeat(lengths // 3, lengths), np.int32(IGNORE_INDEX), tokens)
    columns = {
        name: pa.ListArray.from_arrays(offsets, values)
        for name, values in (("input_ids", tokens), ("labels", labels))
    }
    datasets.disable_progress_bars()
    path = folder / f"rows-{dist.get_rank()}"
    datasets.Dataset(pa.table(columns)).save_to_disk(str(path), num_shards=1)
    return datasets.load_from_disk(str(path))


def make_loader(name: str, rows: datasets.Dataset, settings: Settings, device: torch.device) -> Any:
    """A loader over this rank's share: `padded`, `trl packed` (both torch's, `+2` for two workers), or
    `multipack`."""
    if name == "multipack":
        return packed_dataloader(
            TokenDataset(rows), settings.sequence_len, bins_per_batch=settings.micro_batch_size, device=device
        )
    packed = name.startswith("trl packed")
    if packed:
        rows = pack_dataset(rows, settings.sequence_len, strategy="bfd")
    return TorchDataLoader(
        rows,
        batch_size=settings.micro_batch_size if packed else settings.padded_rows,
        sampler=DistributedSampler(rows, shuffle=True, seed=0),
        collate_fn=DataCollatorForLanguageModeling(pad_token_id=0, padding_free=packed),
        num_workers=2 if name.endswith("+2") else 0,
        pin_memory=device.type == "cuda",
        drop_last=True,
    )


def for_ever(loader: Any) -> Iterator[dict[str, Any]]:
    while True:
        yield from loader


def ready(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A rival's batch on the device, with the counts that ours carries."""
    if "num_sequences" in batch:
        return batch
    packed = "cu_seq_lens_q" in batch
    counts = {
        "num_sequences": len(batch["cu_seq_lens_q"]) - 1 if packed else len(batch["input_ids"]),
        "num_tokens": batch["input_ids"].numel() if packed else int(batch["attention_mask"].sum()),
        "num_target_tokens": int((batch["labels"] != IGNORE_INDEX).sum()),
    }
    moved = {
        key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
    }
    return moved | counts


Step = Callable[[dict[str, Any]], None]


def simulated(settings: Settings) -> Step:
    """The accelerator's time as a sleep; ranks meet once a step, as with one micro-step every engine's do."""
    full = settings.micro_batch_size * settings.sequence_len
    assert settings.simulate_step_ms is not None
    seconds_a_slot = settings.simulate_step_ms / 1000 / full

    def step(batch: dict[str, Any]) -> None:
        time.sleep(batch["input_ids"].numel() * seconds_a_slot)
        sum_over_ranks(batch["num_target_tokens"])

    return step


def trained(engine_name: str, settings: Settings, device: torch.device) -> Step:
    """Forward, backward and update of a Llama with random weights; packed batches through our attention,
    padded through torch's."""
    torch.manual_seed(0)
    config = LlamaConfig(**settings.model)
    model = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
    if settings.recompute:
        recompute_activations(model)
    engine = build_engine(
        model.train(), OptimizerSpec(name=settings.optimizer), engine_options(engine_name, settings), device
    )

    def step(batch: dict[str, Any]) -> None:
        model.config._attn_implementation = ATTENTION if "cu_seq_lens_q" in batch else "sdpa"
        (targets,) = sum_over_ranks(batch["num_target_tokens"])
        engine.micro_step(lambda called: causal_lm_loss_sum(called, batch), divisor=targets, last=True)
        engine.step()

    return step


def engine_options(name: str, settings: Settings) -> EngineOptions:
    stage = 0 if name == "1 rank" else int(name[4])
    return EngineOptions(
        zero_stage=stage, offload=name.endswith("offload"), bf16=settings.bf16, max_grad_norm=1.0
    )


def measure(
    step: Step, batches: Iterator[dict[str, Any]], settings: Settings, device: torch.device
) -> dict[str, float]:
    """Rates over all ranks of `steps` steps, and the share of time spent waiting for batches."""
    for _ in range(WARM_UP):
        batch = ready(next(batches), device)
        step(batch)
    synchronize(device)
    waited, counts = 0.0, np.zeros(3, np.int64)
    busy = [timed_events() for _ in range(settings.steps if device.type == "cuda" else 0)]
    started = time.perf_counter()
    for i in range(settings.steps):
        del batch  # freeing the last one is no waiting
        before = time.perf_counter()
        batch = ready(next(batches), device)
        waited += time.perf_counter() - before
        counts += [batch["num_sequences"], batch["num_tokens"], batch["input_ids"].numel()]
        if busy:
            busy[i][0].record()
        step(batch)
        if busy:
            busy[i][1].record()
    synchronize(device)
    seconds = time.perf_counter() - started
    sequences, tokens, slots = sum_over_ranks(*counts.tolist())
    result = {
        "samples_per_s": sequences / seconds,
        "tokens_per_s": tokens / seconds,
        "padding_share": 1 - tokens / slots,
        "wait_share": sum_over_ranks(round(waited * 1e6))[0] / 1e6 / dist.get_world_size() / seconds,
    }
    if busy:
        result["gpu_busy_share"] = sum(a.elapsed_time(b) for a, b in busy) / 1e3 / seconds
    return result


def timed_events() -> tuple[Any, Any]:
    """Begin and end of a step on the device's own clock."""
    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def run(settings: Settings, device: torch.device) -> list[dict[str, Any]]:
    """All cells of this process group, one entry for each engine, loader and round."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(settings, Path(folder))
        loaders = {name: for_ever(make_loader(name, rows, settings, device)) for name in settings.loaders}
        for engine in settings.engines:
            step = (
                simulated(settings)
                if settings.simulate_step_ms is not None
                else trained(engine, settings, device)
            )
            for round_number in range(settings.rounds):
                for name, batches in loaders.items():
                    cell = measure(step, batches, settings, device)
                    results.append({"engine": engine, "loader": name, "round": round_number, **cell})
            del step
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group() as device:
        cells = run(Settings(**json.loads(sys.argv[1])), device)
        if dist.get_rank() == 0:
            Path(sys.argv[2]).write_text(json.dumps(cells))
