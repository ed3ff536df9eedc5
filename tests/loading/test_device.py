"""Copies to a device, against a simulated one whose copies are late: data is there only after the right
waits."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from multipack.loading.device import DeviceCopier, device_copier, map_tensors
from multipack.loading.loader import DataLoader

CPU = torch.device("cpu")


class FakeStream:
    """A queue of work that runs only when somebody waits for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pending: list[Any] = []
        self.done = 0

    def run_until(self, position: int) -> None:
        while self.done < position:
            self.pending[self.done]()
            self.done += 1


class FakeStreams:
    """A device of which every copy is late. Unwritten memory holds -1."""

    def __init__(self) -> None:
        self.consumer = FakeStream("consumer")
        self.made: list[FakeStream] = []
        self.current: FakeStream | None = None
        self.pinned: list[int] = []
        self.kept: list[tuple[int, str]] = []

    def new_stream(self) -> FakeStream:
        self.made.append(FakeStream(f"side {len(self.made)}"))
        return self.made[-1]

    def consumer_stream(self) -> FakeStream:
        return self.consumer

    @contextlib.contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = None

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.clone()
        self.pinned.append(pinned.data_ptr())
        return pinned

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.data_ptr() in self.pinned, "only copies from pinned memory run beside the CPU"
        assert self.current is not None, "a copy outside the side stream would wait in the consumer's queue"
        there = torch.full_like(tensor, -1)
        self.current.pending.append(lambda: there.copy_(tensor))
        return there

    def record(self, stream: FakeStream) -> tuple[FakeStream, int]:
        return stream, len(stream.pending)

    def wait(self, stream: FakeStream, event: tuple[FakeStream, int]) -> None:
        assert stream is self.consumer
        side, position = event
        side.run_until(position)

    def keep(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.kept.append((id(tensor), stream.name))


def test_a_batch_is_there_when_received_and_not_before() -> None:
    streams = FakeStreams()
    copier = DeviceCopier(CPU, streams)
    first, second = (copier.send({"input_ids": torch.arange(4) + k}) for k in (0, 10))
    assert first.batch["input_ids"].tolist() == [-1, -1, -1, -1]
    assert copier.receive(first)["input_ids"].tolist() == [0, 1, 2, 3]
    assert second.batch["input_ids"].tolist() == [
        -1,
        -1,
        -1,
        -1,
    ]  # the consumer waited for its own batch only
    assert copier.receive(second)["input_ids"].tolist() == [10, 11, 12, 13]


def test_all_copies_share_one_side_stream_that_is_made_with_the_first_batch() -> None:
    streams = FakeStreams()
    copier = DeviceCopier(CPU, streams)
    assert streams.made == []
    for _ in range(5):
        copier.receive(copier.send(torch.ones(2)))
    assert [stream.name for stream in streams.made] == ["side 0"]


def test_each_tensor_is_kept_for_the_consumers_stream() -> None:
    # Without it the allocator would reuse the memory for the next copy while the consumer's kernels still
    # read it.
    streams = FakeStreams()
    copier = DeviceCopier(CPU, streams)
    batch = copier.receive(copier.send({"a": torch.ones(2), "b": [torch.ones(3)]}))
    assert sorted(streams.kept) == sorted([(id(batch["a"]), "consumer"), (id(batch["b"][0]), "consumer")])


def test_a_tensor_that_occurs_twice_is_copied_once() -> None:
    streams = FakeStreams()
    copier = DeviceCopier(CPU, streams)
    shared = torch.arange(3)
    batch = copier.receive(copier.send({"cu_seq_lens_q": shared, "cu_seq_lens_k": shared, "max_length_q": 2}))
    assert batch["cu_seq_lens_q"] is batch["cu_seq_lens_k"]
    assert batch["max_length_q"] == 2
    assert len(streams.pinned) == 1


class Pair(NamedTuple):
    x: torch.Tensor
    y: str


class OwnDict(collections.UserDict[str, Any]):
    """What transformers' BatchEncoding is."""


def test_containers_keep_their_types() -> None:
    batch = {
        "pair": Pair(torch.ones(1), "y"),
        "tuple": (torch.ones(1), 2),
        "own": OwnDict(z=torch.ones(1)),
        "ordered": collections.OrderedDict(k=[torch.ones(1), None]),
        "bytes": b"raw",
    }
    mapped = map_tensors(batch, lambda tensor: tensor + 1)
    assert [type(value) for value in mapped.values()] == [
        Pair,
        tuple,
        OwnDict,
        collections.OrderedDict,
        bytes,
    ]
    assert mapped["pair"] == Pair(torch.tensor([2.0]), "y")
    assert mapped["tuple"] == (torch.tensor([2.0]), 2)
    assert (mapped["own"]["z"], mapped["ordered"]["k"]) == (torch.tensor([2.0]), [torch.tensor([2.0]), None])
    assert batch["own"]["z"] == torch.tensor([1.0])


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_the_cpu_needs_no_copier(device: Any) -> None:
    assert device_copier(device) is None


def test_a_device_that_is_not_there_is_an_error_before_any_batch() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises((RuntimeError, AssertionError)):
        iter(DataLoader([1, 2], device="cuda"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_yields_batches_that_have_arrived(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = FakeStreams()
    copier = DeviceCopier(CPU, streams)
    monkeypatch.setattr(
        "multipack.loading.loader.device_copier", lambda device: copier if device == "fake" else None
    )
    loader = DataLoader(list(range(23)), batch_size=4, num_workers=workers, device="fake")
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [
            list(range(k, min(k + 4, 23))) for k in range(0, 23, 4)
        ]
    assert len(streams.made) == 1
