"""Prefetcher: the order, the bound, the errors, and that no thread outlives its use."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack.loading.prefetch import Prefetcher


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("multipack-prefetch")]


def wait_until(condition: Callable[[], bool], limit_s: float = 1.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    if not wait_until(lambda: not prefetch_threads(), 0.1):
        gc.collect()  # a test may leave an iterator in a cycle of frames; a collection costs 0.1 s, so only then
    assert wait_until(lambda: not prefetch_threads()), prefetch_threads()


class CountingSource:
    """0, 1, 2, ... and how many of them were taken."""

    def __init__(self, count: int, seconds: float = 0.0) -> None:
        self.count, self.seconds, self.taken, self.opened = count, seconds, 0, 0

    def __iter__(self) -> Iterator[int]:
        self.opened += 1
        for item in range(self.count):
            time.sleep(self.seconds)
            self.taken += 1
            yield item


@given(
    count=st.integers(0, 40),
    depth=st.integers(0, 6),
    threads=st.integers(1, 5),
    delays=st.lists(st.integers(0, 2), min_size=1, max_size=7),
)
@settings(deadline=None, max_examples=60)
@pytest.mark.report("lorenzoh/DataLoaders.jl#23")
def test_order_is_kept_for_any_depth_and_number_of_threads(
    count: int, depth: int, threads: int, delays: list[int]
) -> None:
    def work(item: int) -> int:
        time.sleep(delays[item % len(delays)] / 2000)
        return item * 3

    got = list(Prefetcher(range(count), depth=depth, threads=threads, map=work))
    assert got == [item * 3 for item in range(count)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_taken_and_not_yielded_never_exceeds_depth(depth: int, threads: int) -> None:
    source = CountingSource(30)
    yielded = 0
    for item in Prefetcher(source, depth=depth, threads=threads):
        yielded += 1
        assert item == yielded - 1
        time.sleep(0.002)
        assert source.taken - yielded <= depth
    assert (source.taken, yielded) == (30, 30)


def test_it_runs_exactly_depth_ahead_of_a_slow_consumer() -> None:
    source = CountingSource(100)
    iterator = iter(Prefetcher(source, depth=4))
    next(iterator)
    assert wait_until(lambda: source.taken == 5)  # one yielded, four ready
    time.sleep(0.02)
    assert (source.taken, iterator.ready) == (5, 4)
    iterator.close()


def test_nothing_is_touched_and_no_thread_exists_before_the_first_next() -> None:
    source = CountingSource(3)
    iterator = iter(Prefetcher(source, depth=10))
    time.sleep(0.02)
    assert (source.opened, source.taken, prefetch_threads()) == (0, 0, [])
    assert list(iterator) == [0, 1, 2]


def test_several_iterators_are_independent() -> None:
    prefetcher = Prefetcher(range(4), depth=2)
    assert list(zip(prefetcher, prefetcher, strict=True)) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_depth_zero_takes_one_item_at_a_time_in_the_callers_thread() -> None:
    source = CountingSource(10)
    seen: list[str] = []
    iterator = iter(
        Prefetcher(source, depth=0, threads=3, map=lambda _: seen.append(threading.current_thread().name))
    )
    next(iterator)
    assert (source.taken, seen, prefetch_threads()) == (1, ["MainThread"], [])
    assert len(list(iterator)) == 9


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"depth": -1}, "depth=-1"),
        ({"depth": 1, "threads": 0}, "threads=0"),
        ({"depth": 1, "timeout": -2}, "timeout=-2"),
        ({"depth": 0, "timeout": 2}, "depth=0"),
    ],
)
def test_impossible_arguments_are_refused_and_nothing_is_printed(
    arguments: dict[str, int], word: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=word):
        Prefetcher(range(3), **arguments)
    gc.collect()
    assert capfd.readouterr() == ("", "")


class OwnError(BaseException):
    pass


def failing_at_two(error: BaseException) -> Iterator[int]:
    yield 0
    yield 1
    raise error


@pytest.mark.parametrize(
    "error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), OwnError()]
)
@pytest.mark.parametrize("depth", [0, 1, 10])
@pytest.mark.report("RadarML/red-rover#23")
def test_any_exception_of_the_source_reaches_the_consumer_with_its_traceback(
    error: BaseException, depth: int
) -> None:
    iterator = iter(Prefetcher(failing_at_two(error), depth=depth))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(type(error)) as caught:
        next(iterator)
    assert caught.value is error
    assert "failing_at_two" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert next(iterator, "end") == "end"
    assert wait_until(lambda: not prefetch_threads())


@pytest.mark.parametrize("threads", [1, 4])
def test_an_exception_of_map_comes_after_the_items_before_it(threads: int) -> None:
    def work(item: int) -> int:
        if item == 5:
            raise SystemExit("five")
        time.sleep(0.003)  # item 5 fails while 2, 3 and 4 are still being made
        return item

    got = []
    with pytest.raises(SystemExit, match="five"):
        got.extend(
            item for item in Prefetcher(range(100), depth=6, threads=threads, map=work) if got.append(item)
        )
    assert got == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("depth", [0, 2])
def test_stop_iteration_in_map_is_an_error_that_names_the_item(depth: int) -> None:
    def work(item: str) -> str:
        return next(iter(())) if item == "row 4" else item

    iterator = iter(Prefetcher([f"row {i}" for i in range(10)], depth=depth, map=work))
    assert [next(iterator) for _ in range(4)] == ["row 0", "row 1", "row 2", "row 3"]
    with pytest.raises(RuntimeError, match=r"item 4.*'row 4'.*StopIteration") as caught:
        next(iterator)
    assert isinstance(caught.value.__cause__, StopIteration)


def test_stop_iteration_inside_a_generator_source_is_an_error_too() -> None:
    def source() -> Iterator[int]:
        yield 0
        yield next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Prefetcher(source(), depth=2))


def test_exhaustion_inside_a_generator_ends_that_generator_quietly() -> None:
    def wrapper() -> Iterator[int]:
        yield from Prefetcher(range(3), depth=2)

    assert list(wrapper()) == [0, 1, 2]


def leave_by_break(iterator: Iterator[int]) -> None:
    for _ in iterator:
        break


def leave_by_close(iterator: Iterator[int]) -> None:
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]


def leave_by_with(iterator: Iterator[int]) -> None:
    with iterator:  # type: ignore[attr-defined]
        next(iterator)


def leave_by_exception(iterator: Iterator[int]) -> None:
    try:
        for _ in iterator:
            raise ValueError("in the training loop")
    except ValueError:
        pass


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_close, leave_by_with, leave_by_exception])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.report("fgnt/lazy_dataset#58")
@pytest.mark.report("google/grain#1069")
def test_leaving_early_ends_the_threads_within_a_second_and_reads_no_more(
    leave: Callable[[Iterator[int]], None], depth: int, threads: int
) -> None:
    source = CountingSource(100, seconds=0.01)
    started = time.monotonic()
    leave(iter(Prefetcher(source, depth=depth, threads=threads)))
    assert wait_until(lambda: not prefetch_threads())
    assert time.monotonic() - started < 1.0
    assert source.taken <= 1 + depth
    taken = source.taken
    time.sleep(0.05)
    assert source.taken == taken


@pytest.mark.report("google/grain#1021")
def test_dropped_iterators_leave_no_thread() -> None:
    iterators = [iter(Prefetcher(range(100), depth=3)) for _ in range(50)]
    for iterator in iterators:
        next(iterator)
    assert len(prefetch_threads()) == 50
    del iterator, iterators
    gc.collect()
    assert wait_until(lambda: not prefetch_threads())


def test_an_iterator_in_a_reference_cycle_is_collected() -> None:
    class Holder:
        pass

    holder = Holder()
    holder.iterator = iter(Prefetcher(range(100), depth=3))  # type: ignore[attr-defined]
    holder.me = holder  # type: ignore[attr-defined]
    next(holder.iterator)  # type: ignore[attr-defined]
    del holder
    gc.collect()
    assert wait_until(lambda: not prefetch_threads())


def test_closing_the_prefetcher_closes_its_iterators() -> None:
    with Prefetcher(range(100), depth=3) as prefetcher:
        first, second = iter(prefetcher), iter(prefetcher)
        assert (next(first), next(second)) == (0, 0)
    assert next(first, "end") == next(second, "end") == "end"
    assert not prefetch_threads()


def test_closing_the_outer_closes_the_inner() -> None:
    source = CountingSource(1000)
    outer = iter(Prefetcher(Prefetcher(source, depth=2), depth=2))
    assert next(outer) == 0
    assert len(prefetch_threads()) == 2
    outer.close()
    assert wait_until(lambda: not prefetch_threads())
    assert source.taken <= 1 + 2 + 2


def test_closing_the_outer_ends_an_inner_that_waits_for_a_hanging_source() -> None:
    release = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        release.wait()

    outer = iter(Prefetcher(Prefetcher(source(), depth=2), depth=2))
    assert next(outer) == 0
    time.sleep(0.02)
    outer.close()
    assert wait_until(lambda: len(prefetch_threads()) == 1)  # only the one inside release.wait()
    release.set()


def test_close_from_another_thread_ends_a_waiting_consumer() -> None:
    release = threading.Event()

    def source() -> Iterator[int]:
        release.wait()
        yield 0

    iterator = iter(Prefetcher(source(), depth=1))
    threading.Timer(0.05, lambda: (release.set(), iterator.close())).start()
    assert list(iterator) in ([], [0])


@pytest.mark.parametrize("depth", [0, 2])
def test_the_source_is_closed_when_the_iteration_ends_early(depth: int) -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.set()

    iterator = iter(Prefetcher(source(), depth=depth))
    next(iterator)
    iterator.close()
    assert closed.wait(1.0)


def test_a_plain_iterator_of_the_caller_is_not_closed() -> None:
    with open(__file__) as lines:
        iterator = iter(Prefetcher(lines, depth=1))
        next(iterator)
        iterator.close()
        assert not lines.closed


def test_a_silent_source_raises_after_timeout_with_its_stack() -> None:
    release = threading.Event()

    def where_it_hangs() -> None:
        release.wait()

    def source() -> Iterator[int]:
        yield 0
        where_it_hangs()

    iterator = iter(Prefetcher(source(), depth=2, timeout=0.1))
    assert next(iterator) == 0
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Item 1 .* 0\.1 s") as caught:
        next(iterator)
    release.set()
    assert 0.1 <= time.monotonic() - started < 2.0
    assert "where_it_hangs" in str(caught.value)
    assert "release.wait()" in str(caught.value)
    assert next(iterator, "end") == "end"


def test_a_source_that_is_slow_but_within_timeout_is_left_alone() -> None:
    assert list(Prefetcher(CountingSource(4, seconds=0.03), depth=1, timeout=0.5)) == [0, 1, 2, 3]


def test_a_batch_is_not_kept_alive_by_the_threads() -> None:
    class Batch:
        alive = 0

        def __init__(self, _: int) -> None:
            Batch.alive += 1

        def __del__(self) -> None:
            Batch.alive -= 1

    iterator = iter(Prefetcher(range(100), depth=3, threads=2, map=Batch))
    for _ in range(20):
        batch = next(iterator)
        del batch
        assert wait_until(lambda: iterator.ready == 3)
        assert Batch.alive == 3
    iterator.close()
    assert wait_until(lambda: Batch.alive == 0)


def test_waiting_costs_no_cpu() -> None:
    release = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        release.wait(0.4)
        yield 1

    iterator = iter(Prefetcher(source(), depth=2))
    next(iterator)
    cpu = time.process_time()
    next(iterator)
    assert time.process_time() - cpu < 0.1


def test_busy_seconds_counts_the_work_of_the_yielded_items() -> None:
    iterator = iter(Prefetcher(range(5), depth=2, map=lambda item: time.sleep(0.02)))
    for _ in iterator:
        pass
    assert 0.1 <= iterator.busy_seconds < 0.5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_refuses_the_running_iterator_and_makes_new_ones() -> None:
    prefetcher = Prefetcher(range(100), depth=2, threads=2)
    iterator = iter(prefetcher)
    assert next(iterator) == 0
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                next(iterator)
            except RuntimeError as error:
                code = 2 if "Make a new iterator" in str(error) else 3
            iterator.close()
            del iterator
            gc.collect()
            if list(prefetcher) == list(range(100)) and code == 2:
                code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert list(iterator) == list(range(1, 100))


def test_traceback_frames_do_not_keep_the_iterator_alive() -> None:
    iterator = iter(Prefetcher(failing_at_two(ValueError("bad")), depth=1))
    before = sys.getrefcount(iterator)
    with pytest.raises(ValueError):
        list(iterator)
    gc.collect()
    assert sys.getrefcount(iterator) == before
