"""`multipack inspect` and `multipack bench`: what packing does with your data, and how fast this machine
feeds it."""

from multipack.cli.commands import main

__all__ = ["main"]
