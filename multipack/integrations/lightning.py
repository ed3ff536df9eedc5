"""Lightning on packed batches.

The one rule: loaders are built in hooks, when the process group stands, and their lengths are asked for again
each epoch. Packing may give another epoch a batch more, and Lightning would otherwise stop where the first
epoch ended.
"""

from __future__ import annotations

from typing import Any

import lightning

from multipack.integrations.verify import packing_models, verify_packing
from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader


class PackedDataModule(lightning.LightningDataModule):  # type: ignore[misc]
    """Packed batches of this rank for `Trainer.fit` and `Trainer.validate`, on any number of ranks and with
    Lightning's default flags.

    The position inside an epoch is saved with Lightning's checkpoints; `fit(..., ckpt_path=...)` goes on with
    the next batch. A module that logs a mean over batches should weigh it: `self.log("val_loss", loss,
    batch_size=batch["num_target_tokens"], sync_dist=True)`.

    Args:
        train: the training rows: a TokenDataset or anything that one reads.
        capacity: token slots of a bin.
        val: validation rows, read in order.
        options: further arguments of `packed_dataloader`; `shuffle`, `accumulate` and `balance` are for
            training only.
    """

    def __init__(self, train: Any, capacity: int, *, val: Any = None, **options: Any) -> None:
        super().__init__()
        self._train_rows = train
        self._val_rows = val
        self._capacity = capacity
        self._options = options
        self._verified = False
        self._train: DataLoader[Any] | None = None
        self._val: DataLoader[Any] | None = None

    def setup(self, stage: str) -> None:
        """Build the loaders, on every rank; Lightning calls it."""
        if stage == "fit":
            assert self.trainer is not None
            self.trainer.reload_dataloaders_every_n_epochs = (
                1  # has it ask for the length, and get the same loader
            )
            if self._train is None:
                self._train = packed_dataloader(self._train_rows, self._capacity, **self._options)
        if self._val_rows is not None and self._val is None:
            shared = {name: value for name, value in self._options.items() if name not in _TRAINING_ONLY}
            self._val = packed_dataloader(self._val_rows, self._capacity, shuffle=False, **shared)

    def state_dict(self) -> dict[str, Any]:
        """The place in the training data."""
        return {} if self._train is None else {"train": self._train.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go there before Lightning asks for the length of the epoch; it restores loaders only afterwards."""
        if self._train is not None and "train" in state_dict:
            self._train.load_state_dict(state_dict["train"])

    def train_dataloader(self) -> Any:
        """The loader of this rank, the same one every epoch; before the first, models that packing is wrong
        for are refused."""
        if not self._verified and self.trainer is not None:
            self._verified = True
            with self.trainer.strategy.precision_plugin.forward_context():
                for model in packing_models(self.trainer.lightning_module):
                    verify_packing(model, max_length=self._capacity, device=self.trainer.strategy.root_device)
        return self._train

    def val_dataloader(self) -> Any:
        """The loader of the validation rows, or none."""
        return [] if self._val is None else self._val


_TRAINING_ONLY = ("shuffle", "accumulate", "balance")
