"""What the report holds: its sections in their order, the commands of each, and the plots of their tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.length_sets import MADE, REAL, SHARED
from benchmarks.report import machine
from benchmarks.report.plots import Draw, bars, clusters, lines, pairs, parts


@dataclass(frozen=True)
class Command:
    """A benchmark as a person starts it. `{rounds}` stands for the option of that name."""

    line: str
    is_pinned: bool = False
    """On one core: all that is single-threaded."""

    @property
    def is_pytest(self) -> bool:
        return "-m pytest" in self.line

    def text(self, core: int, rounds: int) -> str:
        pin = f"taskset -c {core} " if self.is_pinned else ""
        return pin + self.line.replace("{rounds}", str(rounds))


@dataclass(frozen=True)
class Plot:
    """A picture of the first table with `table` in its heading or in one of its columns."""

    name: str
    table: str
    title: str
    draw: Draw


@dataclass(frozen=True, kw_only=True)
class Section:
    name: str
    title: str
    method: str
    commands: tuple[Command, ...]
    plots: tuple[Plot, ...] = ()
    lacks: Callable[[], str] = lambda: ""
    """What this machine lacks for it; empty: nothing."""


def pinned(line: str) -> Command:
    return Command(line, is_pinned=True)


def gpu() -> str:
    return "" if machine.accelerator() else "no GPU here"


def shared_data() -> str:
    return "" if SHARED.is_dir() else "no folder `shared` with lengths and instances beside the checkout"


SECTIONS = [
    Section(
        name="packing",
        title="Packing: speed",
        method=(
            "Log-normal lengths (mean 350, sigma 1, clipped to 8..4096) where nothing else is said. A rival's conversion of its input counts, as in "
            "real use. Every number of bins is checked. In the tables of growth a rival gets one run and is left out (-) where "
            "the size before lets expect more than five seconds; ours are the best of the rounds."
        ),
        commands=(
            pinned("python -m benchmarks.planning rival speed"),
            pinned("python -m pytest benchmarks/test_packing_speed.py -q -s --benchmark-max-time=0.3"),
            pinned("python -m benchmarks.growth --tables sequences workloads capacities --rounds {rounds}"),
        ),
        plots=(
            Plot(
                "packers",
                "pack 1,000,000 sequences",
                "Packing 1,000,000 sequences",
                bars("median"),
            ),
            Plot(
                "growth_sequences",
                "number of sequences grows: ns",
                "Packing time by number of sequences",
                lines("sequences", "ns a sequence"),
            ),
            Plot(
                "growth_made",
                "by workload",
                "method='auto' on six made workloads",
                lines("sequences", "ns a sequence", tuple(MADE)),
            ),
            Plot(
                "growth_real",
                "by workload",
                "method='auto' on lengths of real data",
                lines("sequences", "ns a sequence", tuple(REAL)),
            ),
            Plot(
                "growth_capacities",
                "capacity grows",
                "Packing time by capacity, 1,000,000 sequences",
                lines("tokens of a bin", "ns a sequence"),
            ),
        ),
    ),
    Section(
        name="quality",
        title="Packing: how full",
        method=(
            "Bins against the larger of ceil(sum / capacity) and the Martello-Toth L2 bound, on every real set of lengths beside the checkout "
            "(rows longer than the capacity left out), and on bin-packing instances of the literature with a proved optimum."
        ),
        commands=(pinned("python -m benchmarks.planning real quality"),),
        plots=(
            Plot(
                "literature",
                "auto: bins too many",
                "Bins above the proved optimum, all instances of a family",
                pairs("auto: bins too many", "first-fit decreasing"),
            ),
        ),
        lacks=shared_data,
    ),
    Section(
        name="order",
        title="Packing: how random",
        method="Two epochs of 200,000 rows: pairs of sequences that share a bin in both, over those of next-fit on a shuffle.",
        commands=(pinned("python -m benchmarks.planning random_order"),),
    ),
    Section(
        name="planning",
        title="Planning an epoch",
        method=(
            "Exact length, batches at random places, memory beyond the lengths (growth of the peak of resident memory), a forecast from a "
            "histogram, and the same steps for any number of ranks. Growth by rows is on one core and in fresh processes, beside torch's "
            "DistributedSampler, which only shuffles."
        ),
        commands=(
            Command("python -m benchmarks.planning plan ranks"),
            pinned("python -m benchmarks.growth --tables plans ranks --rounds {rounds}"),
        ),
        plots=(
            Plot(
                "growth_plans",
                "Planning an epoch as the number of rows grows",
                "Planning by number of rows, one core",
                lines(
                    "rows",
                    "ms",
                    (
                        "first batch ms",
                        "exact length ms more",
                        "batch at a random place ms",
                        "torch DistributedSampler: first batch ms",
                    ),
                ),
            ),
            Plot(
                "growth_ranks",
                "number of ranks grows",
                "First batch of a rank, and dealing one optimizer step",
                lines(
                    "ranks",
                    "ms",
                    ("first batch ms, in turn", "first batch ms, lpt", "sorted, ms a step", "lpt, ms a step"),
                ),
            ),
        ),
    ),
    Section(
        name="balance",
        title="Balance between ranks",
        method=(
            "Bins of 32,768 tokens of heavy-tailed documents; cost = tokens + sum(len^2) / (12 * 4096). Slowest rank over the mean: with `micro_step`, "
            "ranks meet every micro-step; with `step`, once a step. 1 is perfect."
        ),
        commands=(
            pinned("python -m benchmarks.planning balance"),
            pinned("python -m pytest benchmarks/test_balance_speed.py -q -s"),
        ),
    ),
    Section(
        name="collate",
        title="Collating a batch",
        method=(
            "One batch of 65,536 tokens from a memory-mapped data set (200,000 rows, input_ids and labels, 200 chunks, in the page cache), CPU time "
            "of the thread that makes it. Every collator gives trl's batch, bit for bit, before it is timed. `copy` is numpy.copyto of as many "
            "bytes as our batch has."
        ),
        commands=(
            pinned(
                "python -m pytest benchmarks/test_collate_speed.py -q -s --benchmark-timer=time.thread_time"
            ),
        ),
        plots=(
            Plot(
                "collate",
                "collate a batch",
                "CPU time of a batch of 65,536 tokens",
                bars("median"),
            ),
        ),
    ),
    Section(
        name="loading",
        title="Loading: tokens a second of CPU",
        method=(
            "From disk to batches: the same bins of 65,536 tokens out of every loader, one core, each first batch compared with trl's bit for bit. "
            "CPU time counts worker processes too; the first batch is left out. Medians of 3 rounds; spread = (largest - smallest) / median."
        ),
        commands=(pinned("python -m benchmarks.test_loading_speed"),),
        plots=(
            Plot(
                "loading",
                "Mtok a CPU second",
                "Tokens a second of CPU, from disk to batches",
                bars("Mtok a CPU second", reverse=True),
            ),
        ),
    ),
    Section(
        name="overlap",
        title="Beside the training loop: waiting and the GIL",
        method=(
            "The loop has one core, the loader's threads and processes the other. A sleeping step stands for an accelerator at work; 3,000 tiny torch "
            "operations stand for a model of many small kernels, which a loader under the GIL slows down. Cold page cache: the files are "
            "flushed and dropped from the cache first."
        ),
        commands=(
            Command("python -m benchmarks.test_overlap_speed"),
            Command("python -m benchmarks.cold_cache"),
        ),
        plots=(
            Plot(
                "overlap_sleep",
                "20 ms sleep, beside",
                "A step of 20 ms sleep, with each loader beside it",
                parts(("work ms", "wait ms"), "milliseconds a step"),
            ),
            Plot(
                "overlap_launch",
                "3,000 tiny operations, beside",
                "A step of 3,000 tiny operations, with each loader beside it",
                parts(("work ms", "wait ms"), "milliseconds a step"),
            ),
        ),
    ),
    Section(
        name="start",
        title="First batch and resuming",
        method=(
            "100,000 memory-mapped rows, bins of 65,536 tokens, after imports. The first batch includes planning the epoch; trl packs by writing "
            "the rows anew. Resuming goes to the 101st batch of an epoch, whose bins the rivals are given, and rows as tensors; ours is measured with those bins, too."
        ),
        commands=(pinned("python -m pytest benchmarks/test_start_speed.py -q -s"),),
        plots=(
            Plot(
                "first_batch",
                "first batch of",
                "From 100,000 rows on disk to the first batch",
                bars("median"),
            ),
            Plot(
                "resume",
                "resume after",
                "Back to the 101st batch of an epoch",
                bars("median"),
            ),
        ),
    ),
    Section(
        name="throughput",
        title="Training throughput by loader and engine",
        method=(
            "Short form. All loaders feed the same rows to the same engine in turn. First with a sleep of 20 ms in an accelerator's place, then a tiny "
            "Llama trained on the CPU. trl's packed rows are sorted by length, so that over few steps its tokens/s say more than its samples/s."
        ),
        commands=(
            Command(
                "python -m benchmarks.throughput --simulate-step 20 --engines zero2 --rounds {rounds} --steps 15"
            ),
            Command("python -m benchmarks.throughput --engines '1 rank' zero2 --rounds {rounds} --steps 12"),
        ),
        plots=(
            Plot(
                "throughput",
                "data wait",
                "Simulated step of 20 ms on 2 ranks: samples a second over all ranks",
                clusters("engine", "loader", "samples/s", "samples/s"),
            ),
        ),
    ),
    Section(
        name="main_job",
        title="The main job",
        method="What the README's first command does, from the first import to the exported model, in a folder of its own.",
        commands=(Command("python -m benchmarks.main_job sft"),),
    ),
    Section(
        name="ppo",
        title="PPO: the built-in task, generation and packed updates",
        method=(
            "The built-in task: answer with tokens of the class that the prompt names. Then the short form of the PPO benchmark: a tiny OPT with "
            "LoRA on 2 ranks, prompt lengths as HH-RLHF has them."
        ),
        commands=(
            Command("python -m benchmarks.main_job ppo"),
            Command(
                "torchrun --standalone --nproc_per_node 2 benchmarks/ppo_opt_lora_dummy.py --strategy colossalai_zero2 --use_kernels "
                "--num_episodes 2 --num_collect_steps 1 --experience_batch_size 64 --train_batch_size 32 --prompt_tokens 512 "
                "--varied_prompts --max_new_tokens 64 --compare"
            ),
        ),
    ),
    Section(
        name="soak",
        title="Soak: memory, threads, files",
        method="Short form: batches, epochs and restarts, each for up to 20 seconds. What grows is an error.",
        commands=(Command("python -m benchmarks.soak --seconds 20"),),
    ),
    Section(
        name="gpu",
        title="On a GPU",
        method="Copies that overlap with training, and one GPU's training throughput by loader.",
        commands=(Command("python -m benchmarks.gpu_loader"), Command("python -m benchmarks.gpu_sft")),
        lacks=gpu,
    ),
]
