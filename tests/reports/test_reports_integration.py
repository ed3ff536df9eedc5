"""Public bug reports on Arrow, datasets and training frameworks. The name of a test is repository and number."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from tiny_llama import tiny_llama
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, DistributedSampler, Sampler

from multipack import DistributedBatchSampler, MultipackBatchSampler
from multipack.data.collate import PackedCollator
from multipack.data.dataset import TokenDataset
from multipack.loading.loader import DataLoader
from multipack.loading.packed import packed_dataloader
from multipack.train.loss import causal_lm_loss_sum


def tokens(dataset: TokenDataset) -> list[list[int]]:
    return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]


def test_datasets_615_more_elements_than_32_bits_count() -> None:
    """The report's element type is null, whose elements are nulls and hence an error here; bits need little memory as well."""
    elements = 1_000_000_000
    bits = np.zeros(2 * elements // 8, np.uint8)
    bits[-1] = 0b10100000  # the last eight elements of each chunk: 0, 0, 0, 0, 0, 1, 0, 1
    values = pa.Array.from_buffers(pa.bool_(), 2 * elements, [None, pa.py_buffer(bits)], null_count=0)
    chunk = pa.ListArray.from_arrays(pa.array([0, elements, 2 * elements], pa.int32()), values)
    column = pa.chunked_array([chunk, chunk])
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        column.combine_chunks()
    dataset = TokenDataset(pa.table({"input_ids": column}))
    assert dataset.lengths.tolist() == [elements] * 4
    assert dataset.report.num_tokens == 4_000_000_000
    # The last tokens of row 3, which are elements 3,999,999,992 and on.
    tails = TokenDataset(pa.table({"input_ids": column}), max_length=elements - 8, overlong="split")
    batch = PackedCollator()(tails.__getitems__([7]))
    assert batch["input_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 0, 1]]


def test_arrow_37733_a_slice_of_a_list_column_counts() -> None:
    table = pa.table({"input_ids": [[1], [1, 2], [1, 2, 3]]}).slice(1)
    assert tokens(TokenDataset(table)) == [[1, 2], [1, 2, 3]]


def test_arrow_41672_a_slice_of_a_fixed_size_list_counts() -> None:
    column = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)).slice(1)
    assert tokens(TokenDataset(pa.table({"input_ids": column}))) == [[3, 4], [5, 6]]


@pytest.mark.parametrize("data_type", [pa.list_(pa.int64(), 1), pa.list_(pa.int64()), pa.list_(pa.null(), 1)])
def test_arrow_35359_rows_of_nulls_name_the_first(data_type: pa.DataType) -> None:
    column = pa.array([None, None], data_type)
    with pytest.raises(ValueError, match="row 0 of column 'input_ids' is null"):
        TokenDataset(pa.table({"input_ids": column}))


@pytest.mark.parametrize("views", [pa.ListViewArray, pa.LargeListViewArray])
def test_arrow_39813_list_views_are_refused_by_name(views: Any) -> None:
    column = views.from_arrays([0, 1, 2], [2, 2, 2], [1, 2, 3, 4])
    with pytest.raises(TypeError, match="list_view"):
        TokenDataset(pa.table({"input_ids": column}))


def test_datasets_3459_the_index_map_counts() -> None:
    rows = [[0] * 3, [1] * 5, [2] * 2, [3] * 7]
    source = datasets.Dataset.from_dict({"input_ids": rows})
    assert TokenDataset(source.select([3, 0])).lengths.tolist() == [7, 3]
    shuffled = source.shuffle(seed=0)
    assert TokenDataset(shuffled).lengths.tolist() == [2, 3, 5, 7]
    assert tokens(TokenDataset(shuffled)) == shuffled["input_ids"][:]
    kept = source.filter(lambda row: len(row["input_ids"]) != 5)
    assert TokenDataset(kept).lengths.tolist() == [3, 2, 7]


def test_datasets_5541_five_million_shuffled_rows_in_a_second_and_80_megabytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(datasets.Dataset, "flatten_indices")
    num_rows = 5_000_000
    values = pa.array(np.zeros(num_rows, np.uint8))
    column = pa.ListArray.from_arrays(pa.array(np.arange(num_rows + 1, dtype=np.int32)), values)
    order = np.random.default_rng(1).permutation(num_rows)
    source = datasets.Dataset(
        datasets.table.InMemoryTable(pa.table({"input_ids": column})),
        indices_table=datasets.table.InMemoryTable(pa.table({"indices": pa.array(order, pa.uint64())})),
        fingerprint="x",
    )
    arrow_bytes = pa.total_allocated_bytes()
    tracemalloc.start()
    started = time.process_time()
    dataset = TokenDataset(source)
    seconds = time.process_time() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(dataset) == num_rows
    assert dataset.__getitems__([5]).source_rows().tolist() == [5]
    assert seconds < 1
    assert peak < 80e6
    assert pa.total_allocated_bytes() == arrow_bytes


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield accelerate.Accelerator(cpu=True)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_accelerate_4199_a_rank_aware_loader_is_not_dealt_again(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ours(rank: int) -> DataLoader[Any]:
        sampler = DistributedBatchSampler(MultipackBatchSampler([1] * 64, 2), num_replicas=4, rank=rank)
        return DataLoader(Numbers(64), batch_sampler=sampler)

    # As on four ranks, on which accelerate deals whatever it is not kept from dealing.
    prepared = []
    monkeypatch.setattr(type(accelerator), "num_processes", 4)
    for rank in range(4):
        monkeypatch.setattr(type(accelerator), "process_index", rank)
        prepared.append(accelerator.prepare(ours(rank)))
    batches = [[batch.tolist() for batch in loader] for loader in prepared]
    assert [len(rank) for rank in batches] == [8] * 4
    assert sorted(row for rank in batches for batch in rank for row in batch) == list(range(64))
    # Without ranks of its own the order is accelerate's to deal.
    from accelerate.data_loader import prepare_data_loader

    seen = []
    for rank in range(4):
        loader = DataLoader(Numbers(64), batch_sampler=MultipackBatchSampler([1] * 64, 2))
        dealt = prepare_data_loader(loader, num_processes=4, process_index=rank, put_on_device=False)
        seen += [row for batch in dealt for row in batch.tolist()]
    assert sorted(seen) == list(range(64))
    # Dealing a share once more is refused where accelerate does not ask first.
    with pytest.raises(
        ValueError,
        match="accelerate would deal them to 4 processes once more: 3 of 4 batches would never be seen",
    ):
        list(prepare_data_loader(ours(0), num_processes=4, process_index=0, put_on_device=False))


def test_pytorch_lightning_20272_the_plan_survives_or_an_error_says_so(
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


@pytest.mark.parametrize("dealt", [False, True])
def test_ray_lightning_252_samplers_have_what_frameworks_read(dealt: bool) -> None:
    sampler: Any = MultipackBatchSampler([1] * 64, 2, drop_last=True)
    if dealt:
        sampler = DistributedBatchSampler(sampler, num_replicas=2, rank=0, tail="drop")
    assert isinstance(sampler, Sampler)
    assert sampler.batch_size is None
    assert sampler.drop_last is True
    assert len(sampler) == (16 if dealt else 32)
    sampler.sampler.set_epoch(3)
    assert sampler.epoch == 3
    sampler.set_epoch(4)
    assert sampler.epoch == 4
    plain = TorchDataLoader(Numbers(64), batch_sampler=sampler)
    assert len(list(plain)) == len(sampler)


def test_transformers_13188_evaluation_counts_batches_that_have_no_fixed_size(tmp_path: Any) -> None:
    """A packed batch has no size in rows, so batch_size is None on our loader as on torch's, and not a number that would be wrong."""
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


@pytest.mark.parametrize(
    ("option", "value"), [("batch_size", 8), ("shuffle", True), ("sampler", [0, 1]), ("drop_last", True)]
)
def test_catalyst_271_a_plan_and_a_batch_size_contradict_each_other(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"batch_sampler.*{option}"):
        DataLoader(Numbers(64), batch_sampler=MultipackBatchSampler([1] * 64, 2), **{option: value})
    loader = packed_dataloader((np.zeros(64, np.int32), np.arange(65)), 2, rank=0, num_replicas=1)
    assert len(list(loader)) == 32


class Drawing(Numbers):
    def __getitem__(self, index: int) -> int:
        return int(np.random.randint(2**31))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_pytorch_5059_workers_and_epochs_draw_other_numbers(worker_type: Any) -> None:
    """The row's own generator is seeded by whoever wrote the data set; ours draws nothing. Threads share one stream, so which row gets
    which number may depend on their number; worker processes are seeded by torch."""
    loader = DataLoader(Drawing(8), batch_size=None, num_workers=4, worker_type=worker_type)
    drawn = [value for _ in range(2) for value in loader]
    assert len(set(drawn)) == len(drawn) == 16


def test_transformers_46634_a_packed_batch_has_no_mask_of_ones() -> None:
    for layout in ("flat", "rows"):
        collator = PackedCollator(layout=layout, capacity=8)
        batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
        assert "attention_mask" not in batch
        assert batch["position_ids"][0, :5].tolist() == [0, 1, 2, 0, 1]
        assert batch["cu_seq_lens_q"][:3].tolist() == [0, 3, 5]
    # An all-ones mask that comes with the rows is not passed on; one with zeros is padding that would be trained on.
    rows = [{"input_ids": [1, 2], "attention_mask": [1, 1]}]
    assert "attention_mask" not in PackedCollator()(rows)
    with pytest.raises(ValueError, match="attention_mask is 0 in sequence 0"):
        PackedCollator()([{"input_ids": [1, 2], "attention_mask": [1, 0]}])
