"""What is bound to a thread and must hold in the threads that work for it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Ambient:
    """Context variables, grad mode, autocast and torch's default device of a thread."""

    variables: contextvars.Context
    grad_enabled: bool
    inference_mode: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    """Kinds of devices that autocast is on for, with its dtype."""
    device: torch.device

    @classmethod
    def here(cls) -> Ambient:
        """Those of the calling thread."""
        return cls(
            contextvars.copy_context(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (kind, torch.get_autocast_dtype(kind)) for kind in _kinds() if torch.is_autocast_enabled(kind)
            ),
            torch.get_default_device(),
        )

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function` in another thread as if it were that one; for one thread at a time each call."""
        self.variables.copy().run(self._run, function, arguments)

    def _run(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        with contextlib.ExitStack() as stack:
            if self.inference_mode:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            function(*arguments)


def _kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
