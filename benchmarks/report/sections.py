"""What the report holds: its sections in their order, with the commands that measure each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import machine
from benchmarks.length_sets import SHARED


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    method: str
    commands: tuple[str, ...]
    """As a person types them. `{pin}` stands for `taskset` to one core, for what is single-threaded;
    `{rounds}` for the option."""
    lacks: Callable[[], str] = lambda: ""
    """What this machine lacks for it; empty: nothing."""


def gpu() -> str:
    return "" if machine.accelerator() else "no GPU here"


def shared_data() -> str:
    return "" if SHARED.is_dir() else "no folder `shared` with lengths and instances beside the checkout"


SECTIONS = [
    Section("probes", "The machine", (
        "What the machine itself does: claims are ratios to these, measured again beside each claim. A "
        "dependent load is one whose address is the value of the load before."
    ), (
        "{pin}python -m benchmarks.probes",
    )),
    Section("packing", "Packing: speed", (
        "Log-normal lengths (mean 350, sigma 1, clipped to 8..4096) where nothing else is said. A rival's "
        "conversion of its input counts, as in real use. Every number of bins is checked. `radix sorts`: "
        "time over that of a stable argsort of the same lengths as uint16, in turns. A rival gets one run "
        "by number of sequences, and is left out where the size before lets expect more than five seconds."
    ), (
        "{pin}python -m benchmarks.planning rival speed",
        "{pin}python -m pytest benchmarks/test_packing_speed.py -q -s --benchmark-max-time=0.3",
        "{pin}python -m benchmarks.growth --parts sequences workloads capacities --rounds {rounds}",
    )),
    Section("quality", "Packing: how full", (
        "Bins against the lower bound, on every real set of lengths beside the checkout (rows longer than "
        "the capacity left out), and on bin-packing instances of the literature with a proved optimum."
    ), (
        "{pin}python -m benchmarks.planning real quality",
    ), shared_data),
    Section("order", "Packing: how random", (
        "Two epochs of 200,000 rows: pairs of sequences that share a bin in both, over those of next-fit on "
        "a shuffle."
    ), (
        "{pin}python -m benchmarks.planning random_order",
    )),
    Section("planning", "Planning an epoch", (
        "Exact length, batches at random places, memory beyond the lengths (growth of the peak of resident "
        "memory), a forecast from a histogram, and the same steps for any number of ranks. By number of "
        "rows: on one core, in fresh processes, beside torch's DistributedSampler, which only shuffles."
    ), (
        "python -m benchmarks.planning epochs plan ranks",
        "{pin}python -m benchmarks.growth --parts plans ranks --rounds {rounds}",
    )),
    Section("balance", "Balance between ranks", (
        "Bins of 32,768 tokens of heavy-tailed documents; cost = tokens + sum(len^2) / (12 * 4096). Slowest "
        "rank over the mean: with `none` (dealt in turn) and `micro_step`, ranks meet every micro-step; "
        "with `step`, once a step. 1 is perfect."
    ), (
        "{pin}python -m benchmarks.planning balance",
        "{pin}python -m pytest benchmarks/test_balance_speed.py -q -s",
    )),
    Section("collate", "Collating a batch", (
        "One batch of 65,536 tokens from a memory-mapped data set (200,000 rows, input_ids and labels, 200 "
        "chunks, in the page cache), CPU time of the thread that makes it. Every collator gives trl's "
        "batch, bit for bit, before it is timed. `copy` is numpy.copyto of as many bytes as our batch has."
    ), (
        "{pin}python -m pytest benchmarks/test_collate_speed.py -q -s --benchmark-timer=time.thread_time",
    )),
    Section("loading", "Loading: tokens a second of CPU", (
        "From disk to batches: the same bins of 65,536 tokens out of every loader, one core, each first "
        "batch compared with trl's bit for bit. CPU time counts worker processes too; the first batch is "
        "left out. 3 rounds."
    ), (
        "{pin}python -m pytest benchmarks/test_loading_speed.py -q -s",
    )),
    Section("overlap", "Beside the training loop: waiting and the GIL", (
        "The loop has one core, the loader's threads and processes the other. A sleeping step stands for an "
        "accelerator at work; 3,000 tiny torch operations stand for a model of many small kernels, which a "
        "loader under the GIL slows down. 20 rounds in turns; `no loader` is the bare step, `an idle "
        "thread` shows what else ran. Cold page cache: the files are flushed and dropped from the cache "
        "first."
    ), (
        "python -m pytest benchmarks/test_overlap_speed.py -q -s",
        "python -m benchmarks.cold_cache",
    )),
    Section("start", "First batch and resuming", (
        "100,000 memory-mapped rows, bins of 65,536 tokens, after imports. The first batch includes "
        "planning the epoch; trl packs by writing the rows anew. Resuming goes to the 101st batch of an "
        "epoch, whose bins the rivals are given, and rows as tensors; ours is measured with those bins, and "
        "with planning its own, too."
    ), (
        "{pin}python -m pytest benchmarks/test_start_speed.py -q -s",
    )),
    Section("throughput", "Training throughput by loader and engine", (
        "All loaders feed the same rows to the same engine in turn. First with a sleep of 20 ms in an "
        "accelerator's place, batches of 16 x 4096 slots; then a tiny Llama trained on the CPU, 2 x 1024. 2 "
        "ranks but for `1 rank`. trl's packed rows are sorted by length, so that over few steps its "
        "tokens/s say more than its samples/s."
    ), (
        "python -m benchmarks.throughput --simulate-step 20 --engines zero2 --rounds {rounds} --steps 15",
        "python -m benchmarks.throughput --engines '1 rank' zero2 --rounds {rounds} --steps 12",
    )),
    Section("main_job", "The main job", (
        "What the README's first command does, from the first import to the exported model, over the start "
        "of two ranks that only import the trainer."
    ), (
        "python -m benchmarks.main_job sft",
    )),
    Section("ppo", "PPO: the built-in task, generation and packed updates", (
        "The built-in task: answer with tokens of the class that the prompt names. Then the short form of "
        "the PPO benchmark: a tiny OPT with LoRA on 2 ranks, prompt lengths as HH-RLHF has them; both sides "
        "of a comparison alternate, and give the same loss first."
    ), (
        "python -m benchmarks.main_job ppo",
        ("torchrun --standalone --nproc_per_node 2 -m benchmarks.ppo_opt_lora_dummy --strategy colossalai_zero2 "
         "--use_kernels --num_episodes 2 --num_collect_steps 1 --experience_batch_size 64 "
         "--train_batch_size 32 --prompt_tokens 512 --varied_prompts --max_new_tokens 64 --compare"),
    )),
    Section("soak", "Soak: memory, threads, files", (
        "Batches, epochs and restarts, each for up to 20 seconds. What grows is an error."
    ), (
        "python -m benchmarks.soak --seconds 20",
    )),
    Section("gpu", "On a GPU", (
        "Copies that overlap with training; packed attention against padded and masked, outputs and "
        "gradients compared first; training throughput of a Llama of TinyLlama's shape by loader, logits "
        "compared first; one CUDA graph over static batches, losses and gradients compared with eager steps."
    ), (
        "python -m benchmarks.gpu_loader",
        "python -m benchmarks.gpu_varlen",
        "python -m benchmarks.gpu_sft",
        "python -m benchmarks.gpu_static",
    ), gpu),
]  # fmt: skip
