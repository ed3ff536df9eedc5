"""What is claimed: who does what, against whom or what probe, the record that says it, and the bound that it
must keep.

Claims are ratios between what ran in the same minutes, so that they hold or fail on any machine. A new claim
is a line here; the benchmark that records the value names its table, row and column.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from benchmarks.record import Record
from benchmarks.report.measure import Run


class Claim(NamedTuple):
    section: str
    what: str
    against: str
    record: str
    sign: Literal["<=", ">="]
    limit: float
    in_readme: bool = False

    def holds(self, record: Record) -> bool:
        return record.value >= self.limit if self.sign == ">=" else record.value <= self.limit


BFD = "best-fit decreasing against lightbinpack obfd | {} rows | times as fast"
PACK = "pack 1,000,000 rows | {}, 4096 | {}, radix sorts"
SORT = "a radix sort of the same lengths"
REAL = "real sets of lengths | 42 sets, {} | {}"
BPP = "instances of the literature | falkenauer_{} | {}"
PLAN = "a plan of 10,000,000 rows | log-normal, 4096, rank 3 of 8 | {}"
EPOCH = "epochs of 1,000,000 rows | {} | {}"
BATCH = "a batch of 65,536 tokens in torch's loader | CPU time | {}"
BESIDE = "a step of {} | beside multipack DataLoader, 1 thread | {}"
SIMULATED = "samples a second, step simulated by 20 ms of sleep | zero2, {} | {}"
TRAINED = "samples a second, Llama of 4 layers x 128, adamw_torch | 1 rank, {} | {}"
GPU_LLAMA = "samples a second, Llama of 22 layers x 2048, adamw_bnb_8bit | 1 rank, {} | {}"

CLAIMS = [
    Claim("packing", "best-fit decreasing, 10^4 sequences", "lightbinpack `obfd`, as many bins", BFD.format("10,000"), ">=", 8),
    Claim("packing", "best-fit decreasing, 10^5 sequences", "lightbinpack `obfd`, as many bins", BFD.format("100,000"), ">=", 8),
    Claim("packing", "best-fit decreasing, 10^6 sequences", "lightbinpack `obfd`, as many bins", BFD.format("1,000,000"), ">=", 4, True),
    Claim("packing", "`stream`, 10^6 log-normal lengths", SORT, PACK.format("log-normal", "stream"), "<=", 1.5),
    Claim("packing", "`stream`, 10^6 uniform lengths", SORT, PACK.format("uniform", "stream"), "<=", 1.5),
    Claim("packing", "`stream`, 10^6 lengths of triplets", SORT, PACK.format("triplets", "stream"), "<=", 1.5),
    Claim("packing", "`auto`, 10^6 log-normal lengths", SORT, PACK.format("log-normal", "auto"), "<=", 1.5),
    Claim("packing", "`auto`, 10^6 bimodal lengths", SORT, PACK.format("bimodal", "auto"), "<=", 1.5),
    Claim("packing", "`stream`: slots filled, 10^6 log-normal lengths", "all slots", "order of stream | log-normal, 4096 | efficiency", ">=", 99.99),
    Claim("packing", "`stream`: correlation of position and length", "0, a perfect shuffle", "order of stream | log-normal, 4096 | correlation of position and length", "<=", 0.005),
    Claim("packing", "`auto`, 10^6 uniform lengths", SORT, PACK.format("uniform", "auto"), "<=", 1.5),
    Claim("packing", "`auto`, 10^6 lengths of triplets", SORT, PACK.format("triplets", "auto"), "<=", 1.5),
    Claim("quality", "`auto`, the slowest real set at 2048, 10^6 rows", SORT, REAL.format(2048, "slowest set at 1,000,000 rows, radix sorts"), "<=", 3),
    Claim("quality", "`auto`, the slowest real set at 8192, 10^6 rows", SORT, REAL.format(8192, "slowest set at 1,000,000 rows, radix sorts"), "<=", 3),
    Claim("quality", "real sets at capacity 2048: bins", "the lower bound", REAL.format(2048, "bins over the bound"), "<=", 1.002),
    Claim("quality", "real sets at capacity 8192: bins", "the lower bound", REAL.format(8192, "bins over the bound"), "<=", 1.002),
    Claim("quality", "real sets at capacity 2048: bins, less what a proof shows to be needed", "the lower bound", REAL.format(2048, "less what a proof shows to be needed"), "<=", 1.002),
    Claim("quality", "real sets at capacity 8192: bins, less what a proof shows to be needed", "the lower bound", REAL.format(8192, "less what a proof shows to be needed"), "<=", 1.002),
    Claim("quality", "the worst real set at 8192: bins more", "best-fit decreasing", REAL.format(8192, "most bins above best-fit decreasing"), "<=", 1),
    Claim("quality", "the worst real set at 2048: bins more", "best-fit decreasing", REAL.format(2048, "most bins above best-fit decreasing"), "<=", 1),
    Claim("quality", "Falkenauer U: bins too many (first-fit decreasing: 192)", "the proved optimum", BPP.format("u", "bins above the optimum"), "<=", 100),
    Claim("quality", "Falkenauer T: bins too many (first-fit decreasing: 881)", "the proved optimum", BPP.format("t", "bins above the optimum"), "<=", 110),
    Claim("quality", "the slowest instance of Falkenauer U, an item", "a dependent load, 1 MiB", BPP.format("u", "slowest instance, dependent loads (1 MiB) an item"), "<=", 300),
    Claim("quality", "the slowest instance of Falkenauer T, an item", "a dependent load, 1 MiB", BPP.format("t", "slowest instance, dependent loads (1 MiB) an item"), "<=", 300),
    Claim("order", "rows that share a bin again in the next epoch, log-normal", "next-fit on a shuffle", "pairs of rows that share a bin in two epochs | log-normal, 4096, auto | over next-fit on a shuffle", "<=", 1.5),
    Claim("order", "rows that share a bin again in the next epoch, heavy tail", "next-fit on a shuffle", "pairs of rows that share a bin in two epochs | heavy tail, 32768, auto | over next-fit on a shuffle", "<=", 1.5),
    Claim("planning", "slots filled by an epoch of 10^6 rows, log-normal at 4096", "all slots", EPOCH.format("log-normal, 4096", "efficiency"), ">=", 99.99),
    Claim("planning", "slots filled by an epoch of 10^6 rows, log-normal at 65536", "all slots", EPOCH.format("log-normal, long bins, 65536", "efficiency"), ">=", 99.99),
    Claim("planning", "slots filled by an epoch of 10^6 rows, heavy tail at 65536", "all slots", EPOCH.format("heavy tail, 65536", "efficiency"), ">=", 99.99),
    Claim("planning", "slots filled by an epoch of 10^6 rows in shuffled order, heavy tail at 32768", "all slots", EPOCH.format("heavy tail, 32768", "efficiency"), ">=", 99.99, True),
    Claim("planning", "bins of an epoch of 10^6 log-normal rows at 65536, more", "the fewest possible", EPOCH.format("log-normal, long bins, 65536", "more than the fewest possible"), "<=", 0),
    Claim("planning", "exact length of a plan of 10^7 rows", SORT, PLAN.format("exact length, radix sorts of all rows"), "<=", 4),
    Claim("planning", "any batch of it by its place", "a radix sort of a window's lengths", PLAN.format("any batch by its place, radix sorts of a window"), "<=", 6),
    Claim("planning", "its memory beyond the lengths, bytes a row", "the lengths: 2", PLAN.format("memory beyond the lengths"), "<=", 8),
    Claim("planning", "forecast of 10^11 rows from a histogram", "a radix sort of 10^6 lengths", "forecast of 10^11 rows from a histogram | log-normal, 4096 | over a radix sort of 1,000,000", "<=", 1),
    Claim("planning", "rows of every step on 1, 3, 8, 64 ranks in two processes: different ones", "1, the same", "rows of every optimizer step | 1, 3, 8, 64 ranks, two processes | different digests", "<=", 1),
    Claim("balance", "slowest of 64 ranks x 16, heavy tail, `micro_step` (dealt in turn: 1.45)", "the mean rank", "slowest rank over the mean | 64 ranks, accumulate 16 | micro_step", "<=", 1.02),
    Claim("balance", "slowest of 64 ranks x 16, heavy tail, `step`", "the mean rank", "slowest rank over the mean | 64 ranks, accumulate 16 | step", "<=", 1.005),
    Claim("collate", "CPU time of a batch of 65,536 tokens: times as fast, equal tensors", "torch DataLoader + trl's padding-free collator", BATCH.format("trl over ours"), ">=", 50, True),
    Claim("collate", "the same, its CPU time", "a copy of as many bytes", BATCH.format("ours over a copy of its bytes"), "<=", 3, True),
    Claim("loading", "tokens a CPU second, from disk to batch, one thread", "the best of torch (0, 1, 2 workers), StatefulDataLoader, spdl, grain", "tokens a CPU second | multipack DataLoader, 1 thread | over the best rival", ">=", 10, True),
    Claim("loading", "torch's own DataLoader over our parts", "torch DataLoader + trl", "tokens a CPU second | torch DataLoader over our parts | over torch + trl", ">=", 20),
    Claim("loading", "first batch of 10^6 rows after imports: samplers, loader, batch", SORT, "first batch of 1,000,000 rows | log-normal, 65536 | samplers, loader and batch, radix sorts", "<=", 15),
    Claim("overlap", "a step of 20 ms sleep beside our loader, waiting included", "the bare step", BESIDE.format("20 ms sleep", "step over alone"), "<=", 1.02),
    Claim("overlap", "waiting for data beside a 20 ms step, 65,536-token batches", "the step", BESIDE.format("20 ms sleep", "waiting"), "<=", 0.3, True),
    Claim("overlap", "the same with a cold page cache", "the step", "20 ms sleep beside our loader, by page cache | cold page cache | waiting", "<=", 0.3),
    Claim("overlap", "3,000 tiny operations beside our loader", "beside an idle thread", BESIDE.format("3,000 tiny operations", "work over beside an idle thread"), "<=", 1.05),
    Claim("start", "first batch of 100,000 rows: times as late", "trl `pack_dataset`, torch DataLoader", "first batch of 100,000 rows | trl pack_dataset, torch DataLoader, trl's collator | over ours", ">=", 20),
    Claim("throughput", "samples/s of training, step simulated by 20 ms of sleep, ZeRO-2 on two ranks", "torch DataLoader + trl packed", SIMULATED.format("trl packed", "multipack over it, by samples/s"), ">=", 1.2, True),
    Claim("throughput", "the same", "padded batches", SIMULATED.format("padded", "multipack over it, by samples/s"), ">=", 1.5, True),
    Claim("throughput", "the same, waiting for data", "the step", SIMULATED.format("multipack", "wait"), "<=", 1),
    Claim("throughput", "samples/s of a tiny Llama on the CPU, 1 rank", "padded batches", TRAINED.format("padded", "multipack over it, by samples/s"), ">=", 1.5),
    Claim("main_job", "the main job, 2 ranks: its loss falls by", "the first step's", "the main job | sft | loss falls by", ">=", 33.3),
    Claim("main_job", "the same, from start to exported model", "the start of two ranks", "the main job | sft | over the start of two ranks", "<=", 15),
    Claim("ppo", "built-in task, seed 0: mean reward of the last 10 of 60 iterations", "1, perfect (chance: 0.125)", "the built-in task of PPO | seed 0 | reward of the last 10 iterations", ">=", 0.8),
    Claim("ppo", "built-in task, seed 1", "1, perfect", "the built-in task of PPO | seed 1 | reward of the last 10 iterations", ">=", 0.8),
    Claim("ppo", "built-in task, seed 2", "1, perfect", "the built-in task of PPO | seed 2 | reward of the last 10 iterations", ">=", 0.8),
    Claim("ppo", "distinct samples/s generated, each rank its share", "every rank all", "PPO, compared | generation: sharded over redundant | ratio", ">=", 1),
    Claim("ppo", "PPO update, prompts as long as HH-RLHF's, same sequences and loss", "padded", "PPO, compared | update: packed over padded | ratio", ">=", 1.4, True),
    Claim("ppo", "the same, difference of the loss", "0", "PPO, loss | packed against padded | difference", "<=", 1e-5),
    Claim("soak", "growth of resident memory over batches, MB", "0", "soak | batches | growth of resident memory", "<=", 8),
    Claim("soak", "growth over epochs, MB", "0", "soak | epochs | growth of resident memory", "<=", 8),
    Claim("soak", "growth over restarts, MB", "0", "soak | restarts | growth of resident memory", "<=", 8),
    Claim("gpu", "a step with `DataLoader(device=...)` beside it", "the step alone", "a step on the GPU | DataLoader(device=...) | over alone", "<=", 1.02),
    Claim("gpu", "batches read late: wrong values", "0", "batches read late on the GPU | 400 of 8 MB | wrong values", "<=", 0),
    Claim("gpu", "attention of a packed batch, forward and backward: times as fast", "the same rows padded, SDPA", "attention on the GPU, forward and backward | padded rows, SDPA | over ours", ">=", 1.5),
    Claim("gpu", "samples/s of a Llama of TinyLlama's shape", "padded batches, 2 workers", GPU_LLAMA.format("padded +2", "multipack over it, by samples/s"), ">=", 1.5),
]  # fmt: skip


def missing(runs: Iterable[Run]) -> list[Claim]:
    """Claims of the sections that ran for which no record was made."""
    runs = list(runs)
    sections = {run.section for run in runs}
    found = {record.name for run in runs for record in run.records}
    return [claim for claim in CLAIMS if claim.section in sections and claim.record not in found]
