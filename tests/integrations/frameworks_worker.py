"""Started on one or several ranks: each framework trains a tiny Llama, and writes down which batches it got.

argv: folder for the answers (`rank0.json`, ...), then the names of cells.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import (
    CAPACITY,
    OPTIONS,
    Seen,
    largest_difference,
    look,
    loss_of,
    next_token_loss,
    our_loader,
    plain_loop,
    rows,
    summed_loss,
)
from tiny_llama import tiny_llama

from multipack.train.process import leave_process_group

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
Answer = dict[str, Any]


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def accumulate(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> bool:
    """One batch as accelerate's users accumulate it; whether it ended an optimizer step."""
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        return bool(accelerator.sync_gradients)


def accelerate_cell(folder: Path) -> Answer:
    """Accumulation over an odd number of batches, save_state and load_state, skip_first_batches,
    gather_for_metrics."""
    from accelerate import Accelerator

    from multipack.integrations.accelerate import skip_first_batches

    def start() -> tuple[Any, Any, Any, Any]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        model = tiny_llama()
        return accelerator, *accelerator.prepare(model, sgd(model), our_loader())

    def train(
        accelerator: Any, model: Any, optimizer: Any, loader: Any, save_after: int | None = None
    ) -> Any:
        seen: Seen = []
        synchronised = []
        for batch in loader:
            seen.append(look(batch))
            synchronised.append(accumulate(accelerator, model, optimizer, batch))
            if len(seen) == save_after:
                accelerator.save_state(str(folder / f"accelerate{RANKS}"))
        return seen, synchronised

    first = start()
    epochs = [train(*first), train(*first, save_after=4)]

    resumed = start()
    resumed[0].load_state(str(folder / f"accelerate{RANKS}"))
    rest, _ = train(*resumed)

    skipping = start()
    skipping[3].set_epoch(1)
    skipped, synchronised = train(*skipping[:3], skip_first_batches(skipping[3], 4))

    accelerator, _, _, loader = first
    gathered = 0
    for batch in loader:
        gathered += int(accelerator.gather_for_metrics(torch.tensor([batch["num_target_tokens"]])).sum())
    return {
        "same_loader": isinstance(loader, type(our_loader())),
        "epochs": [seen for seen, _ in epochs],
        "synchronised": [flags for _, flags in epochs],
        "resumed": {"1/4": rest},
        "skipped": skipped,
        "skipped_synchronised": synchronised,
        "targets_gathered": gathered,
    }


def accelerate_stream_cell(folder: Path) -> Answer:
    """A stream is this rank's share already, and its last batch is known only by the lack of another."""
    from accelerate import Accelerator

    from multipack.data.collate import PackedCollator
    from multipack.loading.loader import DataLoader
    from multipack.order.stream import StreamPacker

    def loader() -> Any:
        stream = StreamPacker(rows(), CAPACITY, pool_size=16)
        return DataLoader(stream, batch_size=None, collate_fn=PackedCollator())

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = tiny_llama()
    model, optimizer, prepared = accelerator.prepare(model, sgd(model), loader())
    seen, synchronised = [], []
    for batch in prepared:
        seen.append(look(batch))
        synchronised.append(accumulate(accelerator, model, optimizer, batch))
    return {"seen": seen, "plain": [look(batch) for batch in loader()], "synchronised": synchronised}


def trainer_cell(folder: Path) -> Answer:
    """transformers: two epochs with accumulation, resumed inside each of them, and an evaluation."""
    from datasets import Dataset
    from transformers import TrainingArguments

    from multipack.integrations.transformers import PackedTrainer

    class Watched(PackedTrainer):
        seen: Seen

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(look(inputs))
            return super().training_step(model, inputs, *args, **kwargs)

    def trainer(**more: Any) -> Watched:
        arguments = TrainingArguments(
            str(folder / f"trainer{RANKS}"),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            num_train_epochs=3,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=2,
            gradient_accumulation_steps=4,
            learning_rate=1e-2,
            seed=OPTIONS["seed"],
            remove_unused_columns=False,
            ddp_find_unused_parameters=False,
            save_strategy="steps",
            save_steps=1,
            save_only_model=False,
            **more,
        )
        made = Watched(
            model=tiny_llama(),
            args=arguments,
            train_dataset=Dataset.from_list(rows()),
            eval_dataset=Dataset.from_list(rows(17)),
            capacity=CAPACITY,
            packing={"method": OPTIONS["method"]},
        )
        made.seen = []
        return made

    whole = trainer()
    steps = whole.train().global_step
    resumed, parameters = {}, {}
    for step in (1, steps // 2, steps - 1):
        again = trainer()
        again.train(resume_from_checkpoint=str(folder / f"trainer{RANKS}" / f"checkpoint-{step}"))
        resumed[str(step)] = again.seen
        parameters[str(step)] = largest_difference(whole.model, again.model)
    by_max_steps = trainer(max_steps=steps)
    by_max_steps.train()
    evaluated = whole.evaluate()["eval_loss"]
    with torch.no_grad():
        losses = [summed_loss(whole.model, row["input_ids"]) for row in rows(17)]
    return {
        "flat": whole.seen,
        "flat_by_max_steps": by_max_steps.seen,
        "steps": steps,
        "resumed": resumed,
        "parameters": parameters,
        "evaluated": evaluated,
        "exactly": sum(losses) / sum(len(row["input_ids"]) - 1 for row in rows(17)),
    }


def lightning_cell(folder: Path) -> Answer:
    """Three epochs by a data module and by a bare loader, with Lightning's default flags; resumed inside two
    of them."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from multipack.integrations.lightning import PackedDataModule

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_llama()
            self.seen: Seen = []
            self.epochs: list[int] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.seen.append(look(batch))
            self.epochs.append(self.current_epoch)
            return loss_of(self.model, batch)

        def validation_step(self, batch: Any, index: int) -> None:
            loss, weight = loss_of(self.model, batch), batch["num_target_tokens"]
            self.log("val_loss", loss, batch_size=weight, sync_dist=True, on_epoch=True)

        def configure_optimizers(self) -> Any:
            return sgd(self)

    def fit(data: Any, *, resume: Path | None = None, callbacks: Any = (), **more: Any) -> tuple[Module, Any]:
        module = Module()
        trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            devices=RANKS,
            strategy="ddp" if RANKS > 1 else "auto",
            logger=False,
            enable_checkpointing=bool(callbacks),
            callbacks=list(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **more,
        )
        if isinstance(data, lightning.LightningDataModule):
            trainer.fit(module, datamodule=data, ckpt_path=resume)
        else:
            trainer.fit(module, data, ckpt_path=resume)
        return module, trainer

    saved = folder / f"lightning{RANKS}"
    keep_all = ModelCheckpoint(saved, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    module, trainer = fit(PackedDataModule(rows(), CAPACITY, val=rows(17), **OPTIONS), callbacks=[keep_all])
    steps = trainer.global_step
    resumed = {}
    for step in (2, steps // 2, steps - 1):
        again, _ = fit(PackedDataModule(rows(), CAPACITY, **OPTIONS), resume=saved / f"step={step}.ckpt")
        resumed[str(step)] = again.seen
    bare, _ = fit(our_loader(), reload_dataloaders_every_n_epochs=1)
    with torch.no_grad():
        losses = [summed_loss(module.model, row["input_ids"]) for row in rows(17)]
    return {
        "flat": module.seen,
        "epoch_of": module.epochs,
        "flat_bare": bare.seen,
        "steps": steps,
        "resumed": resumed,
        "evaluated": float(trainer.callback_metrics["val_loss"]),
        "exactly": sum(losses) / sum(len(row["input_ids"]) - 1 for row in rows(17)),
    }


def deepspeed_cell(folder: Path) -> Answer:
    """A loop of one's own, RepeatingLoader, and a pipeline engine's train_batch."""
    import deepspeed
    from deepspeed.runtime.dataloader import RepeatingLoader

    if RANKS == 1:  # it looks for MPI otherwise
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # It would compile an all-reduce through shared memory first, for a minute.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo", verbose=False)

    def start(loader: Any) -> Any:
        model = tiny_llama()
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
        config["zero_allow_untested_optimizer"] = True
        return deepspeed.initialize(model=model, optimizer=sgd(model), config=config)[0], loader

    def step(engine: Any, batch: Any, seen: Seen) -> None:
        seen.append(look(batch))
        engine.backward(loss_of(engine, batch))
        engine.step()

    engine, loader = start(our_loader())
    epochs: list[Seen] = []
    for epoch in range(2):
        epochs.append([])
        for batch in loader:
            step(engine, batch, epochs[-1])
            if (epoch, len(epochs[-1])) == (1, 4):
                engine.save_checkpoint(
                    str(folder / f"deepspeed{RANKS}"), client_state={"loader": loader.state_dict()}
                )
    engine, loader = start(our_loader())
    loader.load_state_dict(engine.load_checkpoint(str(folder / f"deepspeed{RANKS}"))[1]["loader"])
    rest: Seen = []
    for batch in loader:
        step(engine, batch, rest)

    repeating = iter(RepeatingLoader(our_loader()))
    engine, _ = start(None)
    repeated: Seen = []
    for _ in range(sum(map(len, epochs)) + 1):
        step(engine, next(repeating), repeated)
    return {
        "epochs": epochs,
        "resumed": {"1/4": rest},
        "repeated": repeated,
        "train_batch": pipeline_batches(num_steps=12),
    }


def pipeline_batches(num_steps: int) -> Seen:
    """What a pipeline engine takes by `train_batch`, two micro-batches a step. It wants pairs (inputs,
    labels)."""
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.dataloader import RepeatingLoader

    seen: Seen = []

    class Pairs:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __iter__(self) -> Any:
            for batch in self.loader:
                seen.append(look(batch))
                yield batch["input_ids"], batch["labels"]

    layers = [torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)]
    model = PipelineModule(layers, num_stages=1, loss_fn=next_token_loss, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    engine = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)[0]
    batches = iter(RepeatingLoader(Pairs(our_loader())))
    for _ in range(num_steps):
        engine.train_batch(data_iter=batches)
    return seen


def stateful_cell(folder: Path) -> Answer:
    """As torchtitan does: the loader is one of the objects of torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.stateful import Stateful

    place = str(folder / f"stateful{RANKS}")
    loader, model = our_loader(), tiny_llama()
    optimizer = sgd(model)
    epochs: list[Seen] = []
    for epoch in range(2):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(look(batch))
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (epoch, len(epochs[-1])) == (1, 4):
                dcp.save({"model": model.state_dict(), "loader": loader}, checkpoint_id=place)
    again = our_loader()
    dcp.load({"model": model.state_dict(), "loader": again}, checkpoint_id=place)
    answer = {
        "is_stateful": isinstance(again, Stateful),
        "epochs": epochs,
        "resumed": {"1/4": [look(batch) for batch in again]},
    }
    other = folder / "stateful2"
    if RANKS == 1 and other.exists():  # what two ranks saved goes on with one
        dcp.load({"loader": again}, checkpoint_id=str(other))
        answer["of_two_ranks"] = [look(batch) for batch in again]
    return answer


CELLS: dict[str, Callable[[Path], Answer]] = {
    "stateful": stateful_cell,
    "accelerate": accelerate_cell,
    "accelerate_stream": accelerate_stream_cell,
    "trainer": trainer_cell,
    "lightning": lightning_cell,
    "deepspeed": deepspeed_cell,
}


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    answers: Answer = {}
    if RANKS > 1:
        dist.init_process_group("gloo")
    answers["plain"] = plain_loop(4)
    for name in names:
        answers[name] = CELLS[name](folder)
    (folder / f"rank{RANK}of{RANKS}.json").write_text(json.dumps(answers))
    if dist.is_initialized():
        leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
