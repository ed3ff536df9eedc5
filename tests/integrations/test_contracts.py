"""What frameworks make of a loader that is packed already."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_llama import tiny_llama
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
)
from torch.utils.data import DataLoader as TorchDataLoader

from multipack import DistributedBatchSampler, MultipackBatchSampler
from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader
from multipack.train.loss import causal_lm_loss_sum


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def in_order(count: int, batch_size: int, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(range(count), batch_size, drop_last)


@pytest.mark.report("Lightning-AI/pytorch-lightning#20272")
def test_the_plan_survives_lightning_or_an_error_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.trainer.states import RunningStage

    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    # As with two devices: Lightning then wants a sampler that deals to ranks, and makes one if it sees none.
    connector: Any = trainer._data_connector
    kwargs = {"num_replicas": 2, "rank": 1}
    monkeypatch.setattr(type(trainer), "distributed_sampler_kwargs", kwargs)
    monkeypatch.setattr(type(trainer._accelerator_connector), "is_distributed", True)

    def prepared(batch_sampler: Any) -> Any:
        loader = DataLoader(Numbers(64), batch_sampler=batch_sampler)
        return connector._prepare_dataloader(loader, shuffle=True, mode=RunningStage.TRAINING)

    packing = MultipackBatchSampler([1] * 64, 2)
    dealt = DistributedBatchSampler(packing, num_replicas=2, rank=1)
    expected = [list(batch) for batch in dealt.read()]
    kept = prepared(dealt)
    assert isinstance(kept.sampler, DistributedSampler)
    assert [batch.tolist() for batch in kept] == expected
    with pytest.raises(
        TypeError, match=r"MultipackBatchSampler has no batch_size.*use_distributed_sampler=False"
    ):
        prepared(MultipackBatchSampler([1] * 64, 2))
    plain: Any = TorchDataLoader(Numbers(64), batch_sampler=dealt)
    with pytest.raises(
        TypeError, match=r"DistributedBatchSampler has no batch_size.*use_distributed_sampler=False"
    ):
        connector._prepare_dataloader(plain, shuffle=True, mode=RunningStage.TRAINING)


@pytest.mark.report("huggingface/transformers#13188")
def test_evaluation_counts_batches_that_have_no_fixed_size(tmp_path: Any) -> None:
    """A packed batch has no size in rows, so batch_size is None on our loader as on torch's, and not a number
    that would be wrong."""
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    # Seven rows, each above half a bin: 7 bins.
    rows = [rng.integers(1, 60, length).tolist() for length in (20, 21, 22, 23, 24, 25, 26)]
    loader = packed_dataloader({"input_ids": rows}, 32, shuffle=False, rank=0, num_replicas=1)
    assert loader.batch_size is None
    assert TorchDataLoader(loader.dataset, batch_sampler=loader.batch_sampler).batch_size is None

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return self.accelerator.prepare(loader)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            loss = causal_lm_loss_sum(model, inputs) / inputs["num_target_tokens"]
            losses.append(loss.item())
            return (loss, {}) if return_outputs else loss

    losses: list[float] = []
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, prediction_loss_only=True
    )
    metrics = Trainer(tiny_llama(), arguments, eval_dataset=loader.dataset).evaluate()
    assert len(losses) == 7
    assert metrics["eval_loss"] == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.report("huggingface/accelerate#2007")
def test_accelerate_cuts_no_remainder_from_whole_batches() -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        accelerator = accelerate.Accelerator(cpu=True)
        for count, results in ((9, 5), (11, 10)):
            batches = DistributedBatchSampler(in_order(count, 5, drop_last=True), num_replicas=1, rank=0)
            ours = DataLoader(Numbers(count), batch_sampler=batches)
            plain = DataLoader(Numbers(count), batch_size=5, drop_last=True)
            for loader in (ours, plain):
                prepared = accelerator.prepare(loader)
                gathered = torch.cat([accelerator.gather_for_metrics(batch) for batch in prepared])
                assert gathered.tolist() == list(range(results))
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
