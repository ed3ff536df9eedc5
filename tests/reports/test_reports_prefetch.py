"""Public bug reports on prefetching: errors, ends, leaks, order, memory. The name of a test is repository and number."""

from __future__ import annotations

import gc
import itertools
import pickle
import random
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from torch.utils.data import Dataset

from multipack import EpochPlan, MultipackBatchSampler
from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader
from multipack.loading.prefetch import Prefetcher

SOURCE = (np.arange(300, dtype=np.int32), np.arange(0, 301, 3))


def quiet(limit_s: float = 1.0) -> bool:
    """Whether all threads of ours end within a second."""
    deadline = time.monotonic() + limit_s
    while living() and time.monotonic() < deadline:
        time.sleep(0.002)
    return not living()


def living() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("multipack")]


class Items(Dataset[int]):
    """Numbers; `on_read` is called with each before it is returned."""

    def __init__(self, length: int, on_read: Callable[[int], Any] = lambda _: None) -> None:
        self.length, self.on_read, self.reads = length, on_read, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        self.on_read(index)
        return index


@pytest.mark.parametrize("depth", [1, 10])
def test_red_rover_23_an_error_of_the_producer_reaches_the_consumer(depth: int) -> None:
    def source() -> Iterator[int]:
        yield from (0, 1)
        raise ValueError("shard is broken")

    iterator = iter(Prefetcher(source(), depth=depth))
    assert [next(iterator), next(iterator)] == [0, 1]
    started = time.monotonic()
    with pytest.raises(ValueError, match="shard is broken") as caught:
        next(iterator)
    assert time.monotonic() - started < 1.0
    assert "in source" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(StopIteration):
        next(iterator)
    assert quiet()


@pytest.mark.parametrize("way", ["break", "close", "del"])
def test_lazy_dataset_58_a_queue_of_one_and_a_cancelled_loop(way: str) -> None:
    iterator: Any = iter(Prefetcher(range(100), depth=1))
    assert next(iterator) == 0
    started = time.monotonic()
    if way == "break":
        for _ in iterator:
            break
        iterator = None
    elif way == "close":
        iterator.close()
    else:
        del iterator
    gc.collect()
    assert quiet(1.0 - (time.monotonic() - started))


def test_grain_1021_dropped_iterators_leave_no_thread_and_close_what_is_inside() -> None:
    for _ in range(50):
        assert next(iter(Prefetcher(range(100), depth=2))) == 0
    gc.collect()
    assert quiet()
    loaders = [packed_dataloader(SOURCE, 6, rank=0, num_replicas=1) for _ in range(50)]
    for loader in loaders:
        next(iter(loader))
    gc.collect()
    assert quiet()
    outer = iter(Prefetcher(Prefetcher(itertools.count(), depth=2, name="multipack-inner"), depth=2))
    assert next(outer) == 0
    assert any(thread.name.startswith("multipack-inner") for thread in living())
    outer.close()
    assert quiet()


def test_grain_1196_an_error_in_main_ends_the_process() -> None:
    script = (
        "import time\n"
        "from multipack.loading.prefetch import Prefetcher\n"
        "def slow():\n"
        "    while True:\n"
        "        time.sleep(0.01)\n"
        "        yield 0\n"
        "def main():\n"
        "    iterator = iter(Prefetcher(Prefetcher(slow(), depth=2), depth=2))\n"
        "    next(iterator)\n"
        "    print(time.time(), flush=True)\n"
        "    raise RuntimeError('in training')\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert time.time() - float(done.stdout) < 5.0
    assert done.stderr.count("Traceback") == 1
    assert "Exception ignored" not in done.stderr


def test_grain_1069_nothing_is_read_after_an_early_end() -> None:
    items = Items(16, on_read=lambda _: time.sleep(0.01))
    iterator = iter(DataLoader(items, batch_size=None, prefetch_batches=2))
    assert next(iterator) == 0
    time.sleep(0.2)  # time to read them all
    assert items.reads <= 4  # one taken, two queued, one in hand
    iterator.close()
    read = items.reads
    time.sleep(0.1)
    assert items.reads == read <= 4


def test_torchtitan_1626_exhaustion_inside_a_generator_is_plain() -> None:
    loader = packed_dataloader(SOURCE, 6, rank=0, num_replicas=1)

    def wrapper() -> Iterator[Any]:
        iterator = iter(loader)
        while True:
            try:
                yield next(iterator)
            except StopIteration:
                return

    assert len(list(wrapper())) == 50
    iterator = iter(loader)
    for _ in range(50):
        next(iterator)
    for _ in range(2):
        with pytest.raises(StopIteration) as caught:
            next(iterator)
        assert type(caught.value) is StopIteration


def stop_at_4(index: int) -> None:
    if index == 4:
        raise StopIteration


def stops_over_4(numbers: list[int]) -> list[int]:
    stop_at_4(max(numbers))
    return numbers


class Stopping:
    """A sampler of ten rows that goes wrong at the fifth."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        for index in range(10):
            stop_at_4(index)
            yield index


@pytest.mark.parametrize(
    "way",
    [
        {"num_workers": 0},
        {"num_workers": 1},
        {"num_workers": 3},
        {"num_workers": 2, "worker_type": "process"},
    ],
)
@pytest.mark.parametrize("where", ["row", "collator", "sampler"])
def test_pytorch_44527_stop_iteration_of_the_users_code_is_no_end(where: str, way: dict[str, Any]) -> None:
    loaders: dict[str, Any] = {
        "row": lambda: DataLoader(Items(10, on_read=stop_at_4), batch_size=None, **way),
        "collator": lambda: DataLoader(Items(10), batch_size=1, collate_fn=stops_over_4, **way),
        "sampler": lambda: DataLoader(Items(10), batch_size=None, sampler=Stopping(), **way),
    }
    got = []
    told = "generator raised StopIteration" if where == "sampler" else "item 4 .*raised StopIteration"
    with pytest.raises(RuntimeError, match=told):
        got.extend(batch for batch in loaders[where]())
    # Worker processes ask the sampler for ids ahead of the batches, so its error may come before them.
    assert got == {"row": [0, 1, 2, 3], "collator": [[0], [1], [2], [3]], "sampler": got}[where]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_dataloaders_jl_23_order_does_not_depend_on_who_is_first(threads: int) -> None:
    rng = random.Random(threads)
    items = Items(100, on_read=lambda _: time.sleep(rng.uniform(0, 0.003)))
    for _ in range(2):
        assert list(DataLoader(items, batch_size=None, num_workers=threads)) == list(range(100))


def test_veomni_789_nothing_happens_before_the_first_batch() -> None:
    items = Items(100)
    before = living()  # a thread of an earlier test may still wait for its worker processes to end
    loader = DataLoader(items, batch_sampler=MultipackBatchSampler([1] * 100, 5), prefetch_batches=10)
    iterator = iter(loader)
    time.sleep(0.2)
    assert not set(living()) - set(before)
    assert items.reads == 0
    place = loader.state_dict()["sampler"]
    assert (place["epoch"], place["batches"]) == (0, 0)
    next(iterator)
    place = loader.state_dict()["sampler"]
    assert (place["epoch"], place["batches"]) == (0, 1)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"prefetch_batches": -1}, "prefetch_batches is -1"),
        ({"worker_type": "greenlet"}, "worker_type is 'greenlet'"),
        ({"num_workers": -1}, "num_workers"),
        ({"batch_size": 0}, "batch_size"),
        ({"timeout": -1}, "timeout"),
    ],
)
def test_pytorch_11599_a_failed_constructor_leaves_nothing_to_clean_up(
    wrong: dict[str, Any], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=text):
        DataLoader(Items(10), **wrong)
    with pytest.raises(ValueError, match="depth=-1"):
        Prefetcher(range(3), depth=-1)
    gc.collect()
    assert capfd.readouterr() == ("", "")


def test_streaming_383_a_prefetch_of_zero_is_synchronous() -> None:
    threads: set[str] = set()
    items = Items(10, on_read=lambda _: threads.add(threading.current_thread().name))
    assert list(DataLoader(items, batch_size=None, prefetch_batches=0)) == list(range(10))
    assert threads == {threading.main_thread().name}
    assert list(Prefetcher(range(10), depth=0)) == list(range(10))
    with pytest.raises(ValueError, match="depth=-1"):
        Prefetcher(range(10), depth=-1)


def test_nanochat_371_a_small_data_set_ends_or_begins_anew_and_never_waits() -> None:
    """A pass ends; going round is one more `iter`, here by `itertools`."""
    loader = DataLoader(Items(6), batch_size=None, prefetch_batches=4)
    assert list(loader) == [0, 1, 2, 3, 4, 5]
    rounds = itertools.chain.from_iterable(itertools.repeat(loader))
    assert list(itertools.islice(rounds, 10)) == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    packed = packed_dataloader(SOURCE, 6, rank=0, num_replicas=1)
    endless = itertools.chain.from_iterable(itertools.repeat(packed))
    starts = [int(batch["input_ids"][0, 0]) for batch in itertools.islice(endless, 125)]
    assert packed.batch_sampler.epoch == 2  # type: ignore[union-attr]
    assert len(starts) == 125


class Memory(Dataset[Any]):
    """A million rows; a batch says who read it, how many rows it has, and, every tenth time, what that process holds for itself."""

    calls = 0

    def __len__(self) -> int:
        return 1_000_000

    def __getitems__(self, ids: list[int]) -> tuple[int, int, int]:
        self.calls += 1
        process = psutil.Process()
        return process.pid, len(ids), process.memory_full_info().uss if self.calls % 10 == 1 else 0


def as_it_is(answer: Any) -> Any:
    return answer


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
def test_pytorch_20433_a_plan_is_a_few_flat_arrays() -> None:
    lengths = np.random.default_rng(0).integers(1, 9, 1_000_000).astype(np.uint16)
    plan = EpochPlan(lengths, 4096)
    plan.bins(0, len(plan))
    kept = sum(array.nbytes for window in plan._cache.values() for array in (window.offsets, window.rows))
    assert 8e6 <= kept <= 16e6
    assert len(pickle.dumps(plan)) < 20e6
    loader = DataLoader(
        Memory(),
        batch_sampler=MultipackBatchSampler(lengths, 4096),
        collate_fn=as_it_is,
        num_workers=4,
        worker_type="process",
    )
    answers = list(loader)
    assert sum(rows for _, rows, _ in answers) == 1_000_000
    for worker in {pid for pid, _, _ in answers}:
        held = [uss for pid, _, uss in answers if pid == worker and uss]
        assert len(held) > 20
        assert max(held) - held[0] < 50e6
