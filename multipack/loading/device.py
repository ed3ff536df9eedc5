"""Copy batches to a device beside the training step.

Three rules keep that right. One side stream per loader, made once: the allocator keeps memory per stream, so
a new stream a pass would pin more and more. The consumer's stream waits for the copy's event before it may
read a batch, and each tensor is recorded on that stream, so that its memory is not reused for a later copy
while the consumer's kernels still read it. Nothing is made, and no device touched, before there is a batch to
copy: an empty loader costs nothing.

The pinned memory comes from torch's caching allocator, which itself holds a block back until the copies out
of it are done.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

DeviceLike: TypeAlias = torch.device | str | int


class Streams(Protocol):
    """What a copy needs of a device. Streams and events are opaque; tests put a simulated device here."""

    def new_stream(self) -> Any: ...
    def consumer_stream(self) -> Any: ...
    def use(self, stream: Any) -> AbstractContextManager[Any]: ...
    def pin(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def copy(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def record(self, stream: Any) -> Any: ...
    def wait(self, stream: Any, event: Any) -> None: ...
    def keep(self, tensor: torch.Tensor, stream: Any) -> None: ...


class AcceleratorStreams:
    """Streams of a real device, by its torch module (`torch.cuda`, `torch.xpu`, ...)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    def new_stream(self) -> Any:
        return self._module.Stream(self._device)

    def consumer_stream(self) -> Any:
        return self._module.current_stream(self._device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return self._module.stream(stream)  # type: ignore[no-any-return]

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    def record(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


class InFlight(NamedTuple):
    """A batch whose copy was started: not to be read before `DeviceCopier.receive`."""

    batch: Any
    event: Any


class DeviceCopier:
    """Start copies in the threads of a loader, and hand the batches over in the consumer.

    Args:
        device: where batches go. A device without number is the current one of the thread that makes the
            copier.
        streams: for tests only.
    """

    def __init__(self, device: DeviceLike, streams: Streams | None = None) -> None:
        self.device = _with_index(torch.device(device)) if streams is None else torch.device(device)
        self._streams = AcceleratorStreams(self.device) if streams is None else streams
        self._side: Any = None
        self._making = threading.Lock()

    def send(self, batch: Any) -> InFlight:
        """Pin the tensors of a batch and start their copies on the side stream; called in a thread of the
        loader."""
        streams = self._streams
        with self._making:
            if self._side is None:
                self._side = streams.new_stream()
        with streams.use(self._side):
            sent = map_tensors(batch, lambda tensor: streams.copy(streams.pin(tensor)))
            return InFlight(sent, streams.record(self._side))

    def receive(self, in_flight: InFlight) -> Any:
        """The batch, ready for kernels of the current stream of the caller. Does not block the CPU."""
        streams = self._streams
        consumer = streams.consumer_stream()
        streams.wait(consumer, in_flight.event)
        map_tensors(in_flight.batch, lambda tensor: _kept(streams, tensor, consumer))
        return in_flight.batch


def device_copier(device: DeviceLike | None) -> DeviceCopier | None:
    """The copier for `device`; None for the CPU, where batches already are.

    Raises:
        RuntimeError: torch has no such device, or it is not available here.
    """
    if device is None or torch.device(device).type == "cpu":
        return None
    return DeviceCopier(device)


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same batch with each tensor replaced; one that occurs twice is mapped once, so that views of it
    stay shared.

    Mappings keep their type, named tuples theirs; sequences become lists or tuples; anything else is passed
    on.
    """
    done: dict[int, torch.Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in done:
                done[id(value)] = function(value)
            return done[id(value)]
        if isinstance(value, Mapping):
            mapped = {key: walk(item) for key, item in value.items()}
            return mapped if type(value) is dict else _mapping_like(value, mapped)
        if isinstance(value, tuple):
            items = tuple(walk(item) for item in value)
            return type(value)(*items) if hasattr(value, "_fields") else items
        if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
            return [walk(item) for item in value]
        return value

    return walk(batch)


def _mapping_like(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    clone: Any = copy.copy(like)
    if hasattr(clone, "update"):
        clone.update(items)
        return clone
    return items


def _kept(streams: Streams, tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    streams.keep(tensor, stream)
    return tensor


def _with_index(device: torch.device) -> torch.device:
    number: int | None = device.index
    return torch.device(
        device.type, torch.get_device_module(device).current_device() if number is None else number
    )
