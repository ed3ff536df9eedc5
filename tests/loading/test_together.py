"""Groups in the whole loader: pairs share a bin on every rank, through tails, balance and resumes, and the
batch names them."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipack import DistributedBatchSampler, MultipackBatchSampler, TokenDataset, packed_dataloader

PAIRS = [3, 4, 5, 1, 2, 2]


def source(lengths, **columns):
    return {"input_ids": [[row + 1] * length for row, length in enumerate(lengths)], **columns}


def rows_of(batch):
    """Rows of a batch by its tokens, which are the rows' numbers plus one."""
    ids, ends = batch["input_ids"][0].tolist(), batch["cu_seq_lens_q"].tolist()
    return [ids[end] - 1 for end in ends[:-1]]


@pytest.mark.parametrize(
    ("together", "columns"),
    [
        ("pair_id", {"pair_id": [10, 10, 7, 7, 8, 8]}),
        ("pair_id", {"pair_id": ["x", "x", "y", "y", "z", "z"]}),
        ([10, 10, 7, 7, 8, 8], {}),
        (np.array(["x", "x", "y", "y", "z", "z"]), {}),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pairs_share_a_bin_and_the_batch_names_them(together, columns, num_workers):
    # Groups of 7, 6 and 4 tokens in bins of 10.
    loader = packed_dataloader(source(PAIRS, **columns), 10, together=together, num_workers=num_workers)
    batches = list(loader)
    assert len(loader) == len(batches) == 2
    assert sorted(sorted(rows_of(batch)) for batch in batches) == [[0, 1], [2, 3, 4, 5]]
    for batch in batches:
        rows = rows_of(batch)
        assert batch["group"].tolist() == [row // 2 for row in rows]
        assert all(a % 2 == 0 and b == a + 1 for a, b in zip(rows[::2], rows[1::2], strict=True))


def test_a_column_named_group_stays_what_it_is():
    data = source(PAIRS, group=[10, 10, 7, 7, 8, 8])
    for batch in packed_dataloader(data, 10, together="group"):
        assert batch["group"].tolist() == [data["group"][row] for row in rows_of(batch)]


def test_batches_without_groups_name_none():
    assert all("group" not in batch for batch in packed_dataloader(source(PAIRS), 10))


@pytest.mark.report("meta-pytorch/torchtune#2177")
def test_five_pairs_on_two_ranks_are_three_and_two():
    # All five fit one bin, which the tail cuts between pairs.
    pairs = np.repeat(np.arange(5), 2)
    seen = []
    for rank in range(2):
        (batch,) = packed_dataloader(source([3] * 10), 30, together=pairs, num_replicas=2, rank=rank)
        assert batch["num_sequences"] == len(rows_of(batch))
        seen.append(rows_of(batch))
    assert sorted(map(len, seen)) == [4, 6]
    assert sorted(seen[0] + seen[1]) == list(range(10))
    assert all(a + 1 == b for rows in seen for a, b in zip(rows[::2], rows[1::2], strict=True))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=4, max_size=40),
    spare=st.integers(0, 25),
    bins_per_batch=st.integers(1, 2),
    ranks=st.integers(1, 3),
    resumed_on=st.integers(1, 3),
    tail=st.sampled_from(["split", "pad"]),
    balance=st.sampled_from(["none", "micro_step", "step"]),
    accumulate=st.integers(1, 2),
    steps=st.integers(0, 3),
)
def test_no_group_is_split_by_ranks_tails_balance_and_resumes(
    rows, spare, bins_per_batch, ranks, resumed_on, tail, balance, accumulate, steps
):
    lengths, keys = [length for length, _ in rows], [key for _, key in rows]
    capacity = max(sum(length for length, k in rows if k == key) for key in keys) + spare
    sampler = MultipackBatchSampler(lengths, capacity, together=keys, bins_per_batch=bins_per_batch)

    def dealt(num_replicas, state=None):
        every = []
        for rank in range(num_replicas):
            mine = DistributedBatchSampler(
                sampler,
                num_replicas=num_replicas,
                rank=rank,
                tail=tail,
                balance=balance,
                accumulate=accumulate,
            )
            if state is not None:
                mine.load_state_dict(state)
            every.append(mine)
        return every

    first = dealt(ranks)
    taken, state = [], None
    for mine in first:
        batches = iter(mine)
        count = min(steps * accumulate, len(mine))
        taken += [next(batches) for _ in range(count)]
        state = mine.state_dict()
    rest = dealt(resumed_on, state)
    if state["epoch"] == 0:
        lists = [list(mine) for mine in rest]
        assert len({len(batches) for batches in lists}) == 1
        taken += [batch for batches in lists for batch in batches]
    counting = [batch for batch in taken if not batch.repeated]
    assert Counter(row for batch in counting for row in batch) == Counter(range(len(rows)))
    homes = Counter()
    for batch in counting:
        assert [keys[row] for row in batch] == [
            next(k for r, k in enumerate(keys) if sampler.plan.groups.of(r) == g) for g in batch.groups
        ]
        for content in batch.bins:
            assert sum(lengths[row] for row in content) <= capacity
            for key, members in groupby(content, keys.__getitem__):
                assert list(members) == [row for row, k in enumerate(keys) if k == key]
                homes[key] += 1
    assert set(homes.values()) == {1}


def test_groups_of_which_a_row_was_left_out_are_refused():
    data = {**source([3, 4, 5, 9, 2, 2], pair_id=[0, 0, 1, 1, 2, 2])}
    options = {"max_length": 8, "overlong": "drop"}
    with pytest.raises(ValueError, match=r"row 3 was left out .* and others of its group 1 were not: 1 rows"):
        packed_dataloader(data, 10, together=[0, 0, 1, 1, 2, 2], **options)
    with pytest.raises(ValueError, match="together='pair_id', but 1 of 6 rows were left out"):
        packed_dataloader(data, 10, together="pair_id", **options)
    # A group that was left out as a whole breaks nothing, and the keys are still those of the source.
    loader = packed_dataloader(
        source([3, 4, 9, 9, 2, 2]), 10, together=["x", "x", "y", "y", "z", "z"], **options
    )
    assert sorted(row for batch in loader for row in rows_of(batch)) == [0, 1, 4, 5]
    # Cut ones stay, and fragments of a row belong to its group.
    loader = packed_dataloader(data, 20, together="pair_id", max_length=8, overlong="split")
    assert sorted(Counter(row for batch in loader for row in rows_of(batch)).items()) == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 1),
        (5, 1),
    ]


@pytest.mark.parametrize(
    ("together", "text"),
    [
        (
            "nothing",
            "together='nothing' is no column with a number or a string a row; there are pair_id, name",
        ),
        ("input_ids", "together='input_ids' is no column"),
        ([0, 1], "together has 2 keys for the 3 rows of the source"),
    ],
)
def test_bad_keys_are_named(together, text):
    data = source([1, 2, 3], pair_id=[0, 0, 1], name=["a", "a", "b"], extra=[{"a": 1}] * 3)
    with pytest.raises(ValueError, match=text):
        packed_dataloader(data, 8, together=together)


def test_a_group_above_the_capacity_is_named_by_the_loader():
    with pytest.raises(ValueError, match=r"group y has 17 tokens in 2 rows .* above the capacity of 16"):
        packed_dataloader(source([1, 8, 9]), 16, together=["x", "y", "y"])


def test_a_dataset_says_how_many_rows_its_source_has():
    assert TokenDataset(source([1, 9, 2]), max_length=8, overlong="drop").num_rows == 3
