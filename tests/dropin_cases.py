"""What the drop-in tests run twice: once with torch's loader, once with ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from multipack import DataLoader

# The loader as a script has it after changing its import line, and how many workers the script asks for, if
# it asks.
ASKED = [{}, {"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2}]


class Rows(Dataset[Any]):
    """Row i is `make(i)`."""

    def __init__(self, make: Callable[[int], Any], length: int = 20) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def both(run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """`run` of our loader class and of torch's: what a test compares."""
    return run(DataLoader), run(TorchDataLoader)


def plain(value: Any) -> Any:
    """Tensors as lists, so that == compares them."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def read(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


def outcomes(iterator: Iterator[Any], limit: int = 100) -> list[Any]:
    """Every batch in turn; where `next()` raises, the kind of the error, and the pass goes on."""
    seen: list[Any] = []
    with contextlib.suppress(StopIteration):
        while len(seen) < limit:
            try:
                seen.append(plain(next(iterator)))
            except StopIteration:
                raise
            except Exception as error:  # noqa: BLE001  (any error of user code ends one next())
                seen.append(type(error).__name__)
    return seen
