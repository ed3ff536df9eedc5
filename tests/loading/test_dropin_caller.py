"""What is bound to the calling thread holds where the rows are made.

Without `num_workers` rows and batches are made in the caller's thread, as torch does; in threads that were
asked for, the caller's grad mode, autocast, default device and context variables hold.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import sqlite3
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from dropin_cases import Rows, both, plain
from torch.utils.data import IterableDataset

from multipack import DataLoader

SPLIT = contextvars.ContextVar("split", default="unset")
WEIGHTS = torch.nn.Parameter(torch.ones(3))


def first(loader: Any) -> Any:
    return plain(next(iter(loader)))


def in_thread_of_caller(index: int) -> bool:
    return threading.current_thread() is threading.main_thread()


def with_a_signal(index: int) -> int:
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.signal(signal.SIGALRM, previous)
    return index


def with_an_event_loop(index: int) -> int:
    async def get() -> int:
        return index

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            return asyncio.get_event_loop().run_until_complete(get())
        finally:
            loop.close()
            asyncio.set_event_loop(None)


@pytest.mark.parametrize("asked", [{}, {"num_workers": 0}], ids=str)
@pytest.mark.parametrize("make", [in_thread_of_caller, with_a_signal, with_an_event_loop])
def test_rows_are_made_in_the_callers_thread(make: Callable[[int], Any], asked: dict[str, Any]) -> None:
    ours, torchs = both(lambda c: [plain(batch) for batch in c(Rows(make), batch_size=4, **asked)])
    assert ours == torchs
    if make is in_thread_of_caller:
        assert ours == [[True] * 4] * 5


def test_a_database_opened_by_the_caller_is_read_by_it() -> None:
    with sqlite3.connect(":memory:") as base:
        base.execute("create table rows (number)")
        base.executemany("insert into rows values (?)", [(i * i,) for i in range(8)])

        def row(index: int) -> int:
            return int(base.execute("select number from rows where rowid = ?", (index + 1,)).fetchone()[0])

        ours, torchs = both(lambda c: [plain(batch) for batch in c(Rows(row, 8), batch_size=4)])
    base.close()
    assert ours == torchs == [[0, 1, 4, 9], [16, 25, 36, 49]]


def needs_grad(index: int) -> bool:
    return (WEIGHTS * index).requires_grad


def is_inference(index: int) -> bool:
    return torch.is_inference_mode_enabled()


def product_dtype(index: int) -> str:
    return str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)


def device(index: int) -> str:
    return str(torch.empty(1).device)


def split(index: int) -> str:
    return SPLIT.get()


def sees_detection(index: int) -> bool:
    return torch.is_anomaly_enabled()


CONTEXTS: dict[str, tuple[Callable[[int], Any], Callable[[], AbstractContextManager[Any]], Any]] = {
    "no_grad": (needs_grad, torch.no_grad, False),
    "with grad": (needs_grad, nullcontext, True),
    "inference_mode": (is_inference, torch.inference_mode, True),
    "autocast": (product_dtype, lambda: torch.autocast("cpu", torch.bfloat16), "torch.bfloat16"),
    "anomaly detection": (sees_detection, lambda: torch.autograd.detect_anomaly(check_nan=False), True),
    "context variable": (split, nullcontext, "train"),
}
WAYS: list[dict[str, Any]] = [
    {},
    {"num_workers": 0},
    {"num_workers": 1, "worker_type": "thread"},
    {"num_workers": 3, "worker_type": "thread"},
]


class OneByOne(IterableDataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(8))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("where", ["rows", "collator", "stream"])
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_callers_modes_hold_where_rows_are_made(name: str, where: str, way: dict[str, Any]) -> None:
    make, context, expected = CONTEXTS[name]

    def in_collator(rows: list[int]) -> list[Any]:
        return [make(row) for row in rows]

    token = SPLIT.set("train")
    with ExitStack() as stack:
        stack.callback(SPLIT.reset, token)
        stack.enter_context(context())
        if where == "collator":
            loader = DataLoader(range(8), batch_size=4, collate_fn=in_collator, **way)
        else:
            source: Any = Rows(make, 8) if where == "rows" else OneByOne(make)
            loader = DataLoader(source, batch_size=4, collate_fn=list, **way)
        assert list(loader) == [[expected] * 4] * 2


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("where", ["rows", "stream"])
def test_the_callers_default_device_holds_where_rows_are_made(where: str, way: dict[str, Any]) -> None:
    # torch's own iter() draws a seed, which it cannot on this device; rows it makes as they are asked for.
    source: Any = Rows(device, 8) if where == "rows" else OneByOne(device)
    iterator = iter(DataLoader(source, batch_size=4, collate_fn=list, **way))
    with torch.device("meta"):
        assert list(iterator) == [["meta"] * 4] * 2


@pytest.mark.parametrize("way", WAYS[2:], ids=str)
def test_what_rows_set_in_a_thread_does_not_reach_the_caller(way: dict[str, Any]) -> None:
    def changes(index: int) -> int:
        SPLIT.set("changed")
        torch.set_grad_enabled(False)
        return index

    token = SPLIT.set("train")
    assert len(list(DataLoader(Rows(changes), batch_size=4, **way))) == 5
    assert torch.is_grad_enabled()
    assert SPLIT.get() == "train"
    SPLIT.reset(token)


def test_a_new_pass_takes_the_modes_of_its_own_caller() -> None:
    loader = DataLoader(Rows(needs_grad, 8), batch_size=4, num_workers=1, worker_type="thread")
    with torch.no_grad():
        assert first(loader) == [False] * 4
    assert first(loader) == [True] * 4
