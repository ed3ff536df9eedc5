"""transformers' Trainer on packed batches.

The Trainer deals, counts and resumes by the number of batches of one epoch. Packing may give another epoch a
batch more or less, so every count here is asked for by epoch, of the sampler, which knows it exactly: no
batch is lost behind the Trainer's end of an epoch, and no gradient is left over for the next one.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers.trainer
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.integrations.accelerate import skip_first_batches
from multipack.integrations.attention import ATTENTION, model_inputs
from multipack.integrations.verify import verify_packing
from multipack.loading.loader import DataLoader
from multipack.loading.packed import names_of, packed_dataloader
from multipack.order.sampler import DistributedBatchSampler
from multipack.order.stream import StreamPacker

_logger = logging.getLogger(__name__)

_COLUMNS = ("labels", "loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "attention_mask")

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class PackedTrainerMixin(_Base):  # type: ignore[misc]
    """Put before `Trainer`: `class MyTrainer(PackedTrainerMixin, Trainer)`. `PackedTrainer` is just that.

    Data sets hold `input_ids` of any length, not padded, and `labels` or a mask if not every token is a
    target. Of the Trainer's arguments `per_device_train_batch_size` and `per_device_eval_batch_size` count
    bins, `dataloader_num_workers` counts threads (0, the Trainer's default, is one),
    `gradient_accumulation_steps` counts batches as ever, `seed` or `data_seed` names the order,
    `dataloader_drop_last` leaves out batches that do not fill the last micro-step of the ranks, and
    `train_sampling_strategy="sequential"` keeps the order of rows. `data_collator` is not used.

    The loss is exact over all ranks and micro-steps, in training by the Trainer's own count of targets, in
    evaluation by ours: a mean over target tokens, not over batches.

    Args:
        capacity: token slots of a bin, as for `packed_dataloader`.
        packing: any further arguments of `packed_dataloader`, such as `{"balance": "step", "overlong":
            "truncate"}`.

    Raises:
        TypeError: the class below is no Trainer that can be told its epochs one by one, as that of
            transformers 5.24 can.
        ValueError: the arguments ask for what packing excludes; names them.
    """

    def __init__(
        self, *args: Any, capacity: int, packing: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        below = super()
        if missing := [name for name in _OVERRIDDEN if not hasattr(below, name)]:
            raise TypeError(
                f"the class below PackedTrainerMixin has no {', '.join(missing)}: put the mixin before a "
                "Trainer that has what the one of transformers 5.24 has (this is "
                f"{transformers.__version__})."
            )
        self.capacity = capacity
        self.packing = dict(packing or {})
        self._datasets: dict[int, tuple[Any, TokenDataset]] = {}
        self._epochs: _Epochs | None = None
        self._evaluated = (0.0, 0)
        self._verified = False
        super().__init__(*args, **kwargs)
        self.add_callback(_SavedDealing(self))

    def get_train_dataloader(self) -> Any:
        """The loader over `train_dataset`: this rank's packed batches, in another order each epoch."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        strategy = self.args.train_sampling_strategy
        if strategy not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy is {strategy!r}, but what goes together is chosen by packing: use 'random' or "
                "'sequential', and packing={'balance': 'step'} or 'micro_step' to even out ranks."
            )
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        loader = self._packed_loader(
            self.train_dataset,
            bins_per_batch=self._train_batch_size,
            accumulate=self.args.gradient_accumulation_steps,
            shuffle=strategy == "random",
            seed=seed,
            tail="drop" if self.args.dataloader_drop_last else "split",
        )
        self._epochs = _Epochs.of(loader, self.args.gradient_accumulation_steps)
        return self.accelerator.prepare(loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader over an evaluation set: every row once over all ranks, in order."""
        named = isinstance(eval_dataset, str)
        dataset = self.eval_dataset[eval_dataset] if named else eval_dataset
        dataset = self.eval_dataset if dataset is None else dataset
        if dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        return self.accelerator.prepare(
            self._packed_loader(dataset, bins_per_batch=self.args.per_device_eval_batch_size, shuffle=False)
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The Trainer's loss over what the model takes of a packed batch; before the first, a model that
        packing is wrong for is refused."""
        if "loss_weights" in inputs:
            raise ValueError(
                "the batch has loss_weights, which the model's own loss ignores. Collate without "
                "loss_weights, or weigh the losses of the tokens in a loop of your own, see "
                "multipack.optimizer_steps."
            )
        if not self._verified and _is_ours(inputs):
            self._verified = True
            verify_packing(
                model, max_length=self.capacity, device=inputs["input_ids"].device, inputs_of=self._inputs_of
            )
        if not model.training and _is_ours(
            inputs
        ):  # the mean over this batch, which `prediction_step` weighs
            num_items_in_batch = None
        return super().compute_loss(model, self._inputs_of(inputs), return_outputs, num_items_in_batch)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """The Trainer's step; a batch without a target has loss 0, which counts for nothing."""
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None and _is_ours(inputs):
            targets = inputs["num_target_tokens"]
            loss = loss if targets else torch.zeros_like(loss)
            self._evaluated = (self._evaluated[0] + loss.item() * targets, self._evaluated[1] + targets)
        return loss, logits, labels

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """The Trainer's loop; its loss becomes the mean over all target tokens of all ranks."""
        self._evaluated = (0.0, 0)
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        key = f"{metric_key_prefix}_loss"
        if key in (output.metrics or {}) and isinstance(dataloader, DataLoader):
            sums = torch.tensor(self._evaluated, dtype=torch.float64, device=self.args.device)
            loss, targets = self.accelerator.reduce(sums).tolist()
            output.metrics[key] = loss / targets if targets else math.nan
        return output

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """The Trainer's numbers, exact for epochs of different lengths."""
        values: tuple[Any, ...] = super().set_initial_training_values(args, dataloader)
        if self._epochs is None:
            return values
        _, *between, max_steps = values
        if args.max_steps > 0:
            return (self._epochs.epochs_for(max_steps), *between, max_steps)
        return (math.ceil(args.num_train_epochs), *between, self._epochs.steps_in(args.num_train_epochs))

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        trained: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if self._epochs is None or resume_from_checkpoint is None:
            return trained
        if not self.args.ignore_data_skip:
            _check_dealing(Path(resume_from_checkpoint), self._dealing())
        epoch, steps = self._epochs.place_of(self.state.global_step)
        return epoch, 0 if self.args.ignore_data_skip else steps * self.args.gradient_accumulation_steps

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **values: Any) -> None:
        if self._epochs is not None:
            values["steps_in_epoch"] = self._epochs.num_batches(epoch)
            values["num_update_steps_per_epoch"] = self._epochs.num_steps(epoch)
            train_dataloader.set_epoch(epoch)  # before the Trainer skips into it
        with _keeping_the_loader():
            super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **values)

    def _dealing(self) -> dict[str, int]:
        """What the number of a step refers to."""
        return {
            "num_replicas": self.args.world_size,
            "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
            "per_device_train_batch_size": self._train_batch_size,
        }

    def _packed_loader(self, dataset: Any, **options: Any) -> DataLoader[Any]:
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process for {self.args.n_gpu} GPUs would cut packed batches through their sequences: "
                "start one process a GPU with torchrun, or show one GPU by CUDA_VISIBLE_DEVICES."
            )
        if isinstance(dataset, StreamPacker):
            return DataLoader(dataset, batch_size=None, collate_fn=PackedCollator())
        parallel = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()
        if parallel > 1 and not {"rank", "mesh", "group"} & self.packing.keys():
            raise ValueError(
                f"{parallel} ranks share each model replica and must get the same batches: say which replica this is by "
                "packing={'mesh': mesh['dp']}, {'group': ...}, or {'rank': ..., 'num_replicas': ...}."
            )
        options["num_workers"] = self.args.dataloader_num_workers or 1
        config = getattr(self.model, "config", None)
        hidden_size = getattr(config.get_text_config(), "hidden_size", None) if config is not None else None
        if hidden_size is not None:
            options["hidden_size"] = hidden_size
        return packed_dataloader(
            self._token_dataset(dataset), self.capacity, **options | self._loader_options
        )

    @property
    def _loader_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.packing.items() if name not in _READING}

    def _token_dataset(self, dataset: Any) -> TokenDataset:
        """The data set as one of ours, read once however often evaluation asks for it."""
        if isinstance(dataset, TokenDataset):
            return dataset
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__name__} has no length: wrap it in StreamPacker(dataset, {self.capacity}) "
                "and set max_steps, or copy it into memory by TokenDataset.from_iterable."
            )
        found = self._datasets.get(id(dataset))
        if found is None:
            reading = {name: value for name, value in self.packing.items() if name in _READING}
            reading.setdefault("max_length", self.capacity)
            names = getattr(dataset, "column_names", None)
            if names is not None and self.args.remove_unused_columns:
                wanted = {*_COLUMNS, *inspect.signature(self.model.forward).parameters}
                reading.setdefault("columns", [name for name in names if name in wanted])
            found = dataset, TokenDataset(dataset, **reading)
            self._datasets[id(dataset)] = found  # with the data set, whose id must stay its own
        return found[1]

    def _inputs_of(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What the model takes of a batch: no counts, and no cache, which would hide the boundaries from
        stock attention."""
        if not _is_ours(batch):
            return batch
        model = self.accelerator.unwrap_model(self.model)
        accepted = inspect.signature(model.forward).parameters
        own = {name: value for name, value in batch.items() if name in accepted}
        inputs = own | model_inputs(batch) | {"labels": batch["labels"]}
        if model.config._attn_implementation != ATTENTION:
            del inputs["segments"]
        return inputs


class PackedTrainer(PackedTrainerMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer on packed batches; see PackedTrainerMixin."""


class _Epochs:
    """Batches and optimizer steps of each epoch, for this rank as for all."""

    def __init__(self, sampler: DistributedBatchSampler, accumulate: int) -> None:
        self._sampler = sampler
        self._accumulate = accumulate
        self._num_batches: dict[int, int] = {}

    @classmethod
    def of(cls, loader: DataLoader[Any], accumulate: int) -> _Epochs | None:
        """None for streams, whose length is unknown."""
        sampler = loader.batch_sampler
        return cls(sampler, accumulate) if isinstance(sampler, DistributedBatchSampler) else None

    def num_batches(self, epoch: int) -> int:
        if epoch not in self._num_batches:
            self._num_batches[epoch] = self._sampler.num_batches(epoch)
        return self._num_batches[epoch]

    def num_steps(self, epoch: int) -> int:
        """Optimizer steps; the last one may have fewer batches."""
        return -(-self.num_batches(epoch) // self._accumulate)

    def steps_in(self, num_epochs: float) -> int:
        """Optimizer steps of the first `num_epochs`, the last of which may be a part of one."""
        whole = int(num_epochs)
        steps = sum(self.num_steps(epoch) for epoch in range(whole))
        part = num_epochs - whole
        return steps + (math.ceil(part * self.num_steps(whole)) if part else 0)

    def place_of(self, step: int) -> tuple[int, int]:
        """Epoch of the optimizer step that comes after `step` of them, and steps of that epoch before it."""
        epoch = 0
        while step >= self.num_steps(epoch):
            step -= self.num_steps(epoch)
            epoch += 1
        return epoch, step

    def epochs_for(self, steps: int) -> int:
        """Epochs that `steps` optimizer steps reach into."""
        epoch, rest = self.place_of(steps)
        return epoch + (rest > 0)


class _SavedDealing(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Writes beside a checkpoint what its number of steps refers to; the Trainer saves the number alone."""

    def __init__(self, trainer: PackedTrainerMixin) -> None:
        self._trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The checkpoint of this step was written."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if args.should_save and folder.is_dir():
            (folder / _DEALING_FILE).write_text(json.dumps(self._trainer._dealing()), encoding="utf-8")


def _check_dealing(checkpoint: Path, now: dict[str, int]) -> None:
    """Refuse to resume where the same number of steps means other rows.

    Raises:
        ValueError: the checkpoint was saved with another number of ranks, micro-steps or bins a batch; names
            both.
    """
    path = checkpoint / _DEALING_FILE
    if not path.is_file():
        _logger.warning(
            "%s does not say on how many ranks it was saved: resuming it on others repeats or skips rows",
            checkpoint,
        )
        return
    then = json.loads(path.read_text(encoding="utf-8"))
    differing = [
        f"{name} ({then.get(name)} then, {now[name]} now)" for name in now if then.get(name) != now[name]
    ]
    if differing:
        raise ValueError(
            f"{checkpoint} was saved with other numbers: {', '.join(differing)}. The Trainer resumes by "
            "counting steps, so rows would be repeated or skipped. Resume with the same numbers, pass "
            "ignore_data_skip=True to start the epoch again, or use a loop of your own with "
            "loader.state_dict(), which resumes on any number of ranks."
        )


@contextlib.contextmanager
def _keeping_the_loader() -> Iterator[None]:
    """The Trainer resumes by accelerate's `skip_first_batches`, which would read the rest of the epoch by a
    plain torch loader."""
    theirs = transformers.trainer.skip_first_batches
    transformers.trainer.skip_first_batches = skip_first_batches
    try:
        yield
    finally:
        transformers.trainer.skip_first_batches = theirs


def _is_ours(batch: Any) -> bool:
    return isinstance(batch, Mapping) and "num_target_tokens" in batch


_READING = names_of(TokenDataset)
"""Arguments of `packed_dataloader` that say how to read a data set."""

_DEALING_FILE = "multipack.json"

_OVERRIDDEN = ("set_initial_training_values", "_init_training_state", "_run_epoch")
