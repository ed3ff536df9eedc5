"""What the integrations refuse, and what they hand on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_llama import tiny_llama
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from multipack.data.dataset import TokenDataset
from multipack.integrations.accelerate import skip_first_batches
from multipack.integrations.lightning import PackedDataModule
from multipack.integrations.transformers import PackedTrainer, PackedTrainerMixin
from multipack.loading.packed import packed_dataloader
from multipack.order.stream import StreamPacker

ROWS = [list(range(n)) for n in (3, 1, 4, 1, 5, 9, 2, 6)]


def trainer(folder: Path, rows: Any = ROWS, **more: Any) -> PackedTrainer:
    arguments = {"use_cpu": True, "report_to": [], "per_device_train_batch_size": 1} | more
    return PackedTrainer(
        model=tiny_llama(), args=TrainingArguments(str(folder), **arguments), train_dataset=rows, capacity=10
    )


def test_skipping_more_than_there_is_names_the_numbers() -> None:
    loader = packed_dataloader(ROWS, 10)
    with pytest.raises(ValueError, match=r"cannot skip 9 batches: epoch 0 has 4 left"):
        skip_first_batches(loader, 9)
    assert len(list(loader)) == 4


def test_skipping_all_of_an_epoch_begins_the_next() -> None:
    loader = skip_first_batches(packed_dataloader(ROWS, 10), 4)
    expected = packed_dataloader(ROWS, 10)
    expected.set_epoch(1)
    assert [batch["input_ids"].tolist() for batch in loader] == [
        batch["input_ids"].tolist() for batch in expected
    ]


def test_loaders_of_others_are_skipped_by_accelerate() -> None:
    Accelerator(cpu=True)
    plain: Any = TorchDataLoader(torch.arange(10), batch_size=2)
    assert [batch.tolist() for batch in skip_first_batches(plain, 3)] == [[6, 7], [8, 9]]


def test_the_mixin_needs_a_trainer_below_it() -> None:
    class NoTrainer(PackedTrainerMixin):
        pass

    with pytest.raises(TypeError, match="put the mixin before a Trainer"):
        NoTrainer(capacity=10)


def test_sampling_strategies_that_choose_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"group_by_length.*chosen by packing"):
        trainer(tmp_path, train_sampling_strategy="group_by_length").get_train_dataloader()


def test_sequential_sampling_keeps_the_order_of_rows(tmp_path: Path) -> None:
    loader = trainer(tmp_path, train_sampling_strategy="sequential").get_train_dataloader()
    assert not loader.batch_sampler.batch_sampler.plan.shuffle


def test_rows_without_length_are_refused_with_the_remedy(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter({"input_ids": row} for row in ROWS)

    with pytest.raises(TypeError, match=r"Stream has no length: wrap it in StreamPacker\(dataset, 10\)"):
        trainer(tmp_path, Stream(), max_steps=1).get_train_dataloader()


def test_a_stream_is_trained_on_for_max_steps(tmp_path: Path) -> None:
    stream = StreamPacker([{"input_ids": row} for row in ROWS], 10)
    run = trainer(tmp_path, stream, max_steps=6, save_strategy="no", disable_tqdm=True)
    assert run.train().global_step == 6  # more than the four batches of a pass


def test_several_gpus_in_one_process_are_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.args._n_gpu = 2
    with pytest.raises(ValueError, match="one process for 2 GPUs would cut packed batches"):
        run.get_train_dataloader()


def test_ranks_that_share_a_replica_must_be_named(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.model._tp_size = 2
    with pytest.raises(ValueError, match="2 ranks share each model replica"):
        run.get_train_dataloader()
    run.packing = {"rank": 0, "num_replicas": 3}
    assert run.get_train_dataloader().batch_sampler.num_replicas == 3


def test_missing_data_sets_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="training requires a train_dataset"):
        trainer(tmp_path, None).get_train_dataloader()
    with pytest.raises(ValueError, match="evaluation requires an eval_dataset"):
        trainer(tmp_path).get_eval_dataloader()


def test_evaluation_sets_by_name_are_read_once(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.eval_dataset = {"a": ROWS[:4], "b": ROWS[4:]}
    loaders = [run.get_eval_dataloader(name) for name in ("a", "a", "b")]
    assert [len(loader.dataset) for loader in loaders] == [4, 4, 4]
    assert loaders[0].dataset is loaders[1].dataset
    assert loaders[1].dataset is not loaders[2].dataset


def test_a_data_module_without_validation_rows_has_no_validation_loader() -> None:
    module = PackedDataModule(TokenDataset(ROWS), 10)
    module.setup("validate")
    assert module.val_dataloader() == []
    assert module.state_dict() == {}


def test_validation_rows_keep_their_order_and_take_no_balance() -> None:
    module = PackedDataModule(ROWS, 10, val=ROWS, balance="step", accumulate=2)
    module.setup("validate")
    loader = module.val_dataloader()
    assert not loader.batch_sampler.batch_sampler.plan.shuffle
    assert loader.batch_sampler.balance == "none"


def test_trainer_resumes_on_the_same_numbers_only(tmp_path):
    from multipack.integrations.transformers import _check_dealing

    then = {"num_replicas": 2, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}
    (tmp_path / "multipack.json").write_text(json.dumps(then))
    _check_dealing(tmp_path, then)
    with pytest.raises(ValueError, match=r"num_replicas \(2 then, 3 now\)"):
        _check_dealing(tmp_path, then | {"num_replicas": 3})
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps \(4 then, 2 now\)"):
        _check_dealing(tmp_path, then | {"gradient_accumulation_steps": 2})
