"""Dealing: every rank the same number of batches, every row once, positions that can be resumed anywhere."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from multipack import DistributedBatchSampler, MultipackBatchSampler
from multipack.order.balance import BALANCE_MODES
from multipack.order.batch import Place
from multipack.order.dealing import TAILS

LENGTHS = np.random.default_rng(0).integers(1, 60, 400)


def ranks_of(batch_sampler_of, num_replicas, **arguments):
    """One sampler a rank, each over a batch sampler of its own, as in separate processes."""
    return [
        DistributedBatchSampler(batch_sampler_of(), num_replicas=num_replicas, rank=rank, **arguments)
        for rank in range(num_replicas)
    ]


def packed(**arguments):
    return MultipackBatchSampler(LENGTHS, 64, **arguments)


def bins_sampler(batches):
    """A foreign batch sampler with the given batches."""

    class Listed:
        def __len__(self):
            return len(batches)

        def __iter__(self):
            return iter(batches)

    return Listed()


def rows(batches_of_ranks):
    return sorted(
        row for batches in batches_of_ranks for batch in batches if not batch.repeated for row in batch
    )


def test_last_micro_step_gives_every_rank_some_sequences():
    # 5 bins on 4 ranks: the fifth bin holds rows 8, 9, 10, 11, so each rank gets one of them.
    sampler = bins_sampler([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9, 10, 11]])
    last = [list(DistributedBatchSampler(sampler, num_replicas=4, rank=r))[-1] for r in range(4)]
    assert sorted(row for batch in last for row in batch) == [8, 9, 10, 11]
    assert all(len(batch) == 1 for batch in last)


def test_micro_step_s_gives_rank_r_batch_s_times_ranks_plus_r():
    everything = list(packed())
    for rank, sampler in enumerate(ranks_of(packed, 3, tail="drop")):
        assert list(sampler) == everything[rank::3][: len(sampler)]


@given(
    num_replicas=st.integers(1, 9),
    accumulate=st.integers(1, 4),
    bins_per_batch=st.integers(1, 3),
    tail=st.sampled_from(TAILS),
    balance=st.sampled_from(BALANCE_MODES),
    balance_window=st.integers(1, 3),
    num_rows=st.integers(1, 60),
    epoch=st.integers(0, 2),
)
def test_equal_counts_and_each_row_once(
    num_replicas, accumulate, bins_per_batch, tail, balance, balance_window, num_rows, epoch
):
    lengths = LENGTHS[:num_rows]
    arguments = dict(
        tail=tail,
        accumulate=accumulate,
        balance=balance,
        balance_window=1 if balance == "none" else balance_window,
    )

    def batch_sampler():
        return MultipackBatchSampler(lengths, 64, bins_per_batch=bins_per_batch)

    total = len(batch_sampler())
    try:
        samplers = ranks_of(batch_sampler, num_replicas, **arguments)
        for sampler in samplers:
            sampler.set_epoch(epoch)
        total = len(samplers[0].batch_sampler)
        dealt = [list(sampler.read()) for sampler in samplers]
    except ValueError:
        assert tail in ("drop", "error")
        assert (total < num_replicas) if tail == "drop" else total % num_replicas
        return
    steps = total // num_replicas if tail == "drop" else -(-total // num_replicas)
    assert [len(batches) for batches in dealt] == [steps] * num_replicas
    assert all(len(sampler) == sampler.remaining == steps for sampler in samplers)
    for batches in dealt:
        for batch in batches:
            assert 1 <= batch.num_bins <= bins_per_batch
            assert all(sum(lengths[row] for row in content) <= 64 for content in batch.bins)
    seen = rows(dealt)
    assert len(set(seen)) == len(seen)
    if tail != "drop":
        assert seen == list(range(num_rows))
    assert not any(batch.repeated for batches in dealt for batch in batches[:-1])
    last = [batches[-1] for batches in dealt]
    if tail == "split":  # repeats only when the last micro-step has fewer sequences than there are ranks
        assert any(batch.repeated for batch in last) == (len(rows([last])) < num_replicas)


@pytest.mark.parametrize("num_replicas", range(1, 7))
def test_even_tails_for_every_small_number_of_bins(num_replicas):
    """Two rows of half a bin each: n bins hold rows 0..2n-1."""
    for num_bins in range(1, 15):
        for accumulate in (1, 2, 3):
            dealt = [
                list(sampler)
                for sampler in ranks_of(
                    lambda: MultipackBatchSampler([4] * (2 * num_bins), 8),  # noqa: B023
                    num_replicas,
                    accumulate=accumulate,
                )
            ]
            assert [len(batches) for batches in dealt] == [-(-num_bins // num_replicas)] * num_replicas
            assert rows(dealt) == list(range(2 * num_bins))
            last = [batches[-1] for batches in dealt]
            left = num_bins % num_replicas or num_replicas
            assert sum(batch.repeated for batch in last) == max(0, num_replicas - 2 * left)


@pytest.mark.parametrize("balance", BALANCE_MODES)
def test_an_optimizer_step_holds_the_same_rows_for_any_number_of_ranks(balance):
    def steps(num_replicas, accumulate):
        dealt = [
            list(s.read()) for s in ranks_of(packed, num_replicas, accumulate=accumulate, balance=balance)
        ]
        return [
            sorted(row for batches in dealt for batch in batches[i : i + accumulate] for row in batch)
            for i in range(0, len(dealt[0]), accumulate)
        ]

    assert steps(1, 24) == steps(3, 8) == steps(8, 3) == steps(24, 1)


def run(samplers, num_steps, accumulate):
    """Take whole optimizer steps on every rank; returns the rows and the state."""
    iterators = [iter(sampler) for sampler in samplers]
    taken = []
    for _ in range(num_steps * accumulate):
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            break
        taken += [row for batch in batches if not batch.repeated for row in batch]
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states)
    return taken, json.loads(json.dumps(states[0]))


@given(
    chain=st.lists(
        st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=6
    ),
    balance=st.sampled_from(BALANCE_MODES),
    epoch=st.integers(0, 2),
)
@pytest.mark.report("PrimeIntellect-ai/prime-rl#1035")
def test_each_row_once_over_any_chain_of_resumes(chain, balance, epoch):
    """Stop after any optimizer step on R ranks and go on with other ranks and another accumulate, again and
    again."""
    state, seen = None, []
    for num_replicas, accumulate, num_steps in [*chain, (2, 1, 10**6)]:
        samplers = ranks_of(packed, num_replicas, accumulate=accumulate, balance=balance)
        for sampler in samplers:
            sampler.set_epoch(epoch)
            if state is not None:
                sampler.load_state_dict(state)
                sampler.set_epoch(epoch)  # as a training loop would: keeps the position
        taken, state = run(samplers, num_steps, accumulate)
        seen += taken
        if state["epoch"] != epoch:
            break
    assert sorted(seen) == list(range(len(LENGTHS)))
    assert state["epoch"] == epoch + 1
    assert state["batches"] == 0


@pytest.mark.parametrize("balance", BALANCE_MODES)
@pytest.mark.parametrize("stop", [0, 1, 5, 17, 32])
@pytest.mark.report("google/grain#1178")
def test_resumed_goes_on_as_if_never_stopped(balance, stop):
    arguments = dict(num_replicas=2, rank=1, accumulate=4, balance=balance)
    whole = DistributedBatchSampler(packed(), **arguments)
    batches = [list(batch) for batch in whole] + [list(batch) for batch in whole]
    first = DistributedBatchSampler(packed(), **arguments)
    iterator = iter(first)
    taken = [list(next(iterator)) for _ in range(stop)]
    second = DistributedBatchSampler(packed(), **arguments)
    second.load_state_dict(first.state_dict())
    assert second.remaining == len(whole) - stop
    rest = [list(batch) for batch in second] + [list(batch) for batch in second]
    assert taken + rest == batches


@pytest.mark.report("EleutherAI/bergson#352")
def test_epochs_move_on_by_themselves_once_all_was_yielded():
    sampler = packed()
    first, second = list(sampler), list(sampler)
    assert sampler.epoch == 2
    assert first != second
    assert rows([first]) == rows([second]) == list(range(400))
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_looking_moves_nothing_also_in_mid_pass():
    sampler = DistributedBatchSampler(packed(), num_replicas=2, rank=0)
    batches = list(sampler.read())
    taking = iter(sampler)
    for taken in range(4):
        before = sampler.state_dict()
        assert before["batches"] == 2 * taken
        assert list(sampler.read()) == batches
        assert list(sampler.sampler._batch_sampler.read(Place(2)))
        assert (len(sampler), sampler.remaining, sampler.num_batches(1) > 0) == (
            len(batches),
            len(batches),
            True,
        )
        assert sampler.fingerprint
        iter(sampler)
        assert sampler.state_dict() == before
        assert next(taking) == batches[taken]


def test_each_batch_carries_the_place_behind_it():
    for balance, accumulate in (("none", 3), ("step", 3), ("micro_step", 2)):
        options = {"num_replicas": 2, "rank": 1, "balance": balance, "accumulate": accumulate}
        sampler = DistributedBatchSampler(packed(), **options)
        batches = list(sampler.read())
        for number, batch in enumerate(batches, 1):
            assert batch.ends_epoch == (number == len(batches))
            rest = list(sampler.read(batch.after))
            if batch.ends_epoch:
                assert batch.after == Place(1)
            else:
                assert rest == batches[number:]


def test_a_broken_off_epoch_starts_again():
    sampler = packed()
    everything = list(sampler.read())
    iterator = iter(sampler)
    next(iterator)
    assert sampler.state_dict()["batches"] == 1
    assert list(sampler) == everything
    assert sampler.epoch == 1


def test_a_loaded_position_is_used_once():
    sampler = packed()
    everything = list(sampler.read())
    sampler.load_state_dict({**sampler.state_dict(), "batches": 10})
    iterator = iter(sampler)
    assert next(iterator) == everything[10]
    assert list(sampler) == everything  # broken off: the epoch starts again


def test_an_older_pass_that_is_read_on_does_not_count():
    sampler = packed()
    older = iter(sampler)
    next(older)
    newer = iter(sampler)
    next(newer)
    list(older)
    assert (sampler.epoch, sampler.state_dict()["batches"]) == (0, 1)
    list(newer)
    assert (sampler.epoch, sampler.state_dict()["batches"]) == (1, 0)


def test_a_pass_read_on_after_going_to_another_epoch_does_not_count():
    sampler = packed()
    iterator = iter(sampler)
    next(iterator)
    sampler.set_epoch(3)
    list(iterator)
    assert (sampler.epoch, sampler.state_dict()["batches"]) == (3, 0)


def test_an_open_pass_obeys_a_loaded_state_with_its_next_batch():
    sampler = packed()
    everything = list(sampler.read())
    iterator = iter(sampler)
    next(iterator)
    state = sampler.state_dict()
    next(iterator)
    sampler.load_state_dict(state)
    assert next(iterator) == everything[1]
    assert sampler.state_dict()["batches"] == 2
    assert list(iterator) == everything[2:]
    assert sampler.epoch == 1


def test_numbers_of_numpy_are_those_of_python():
    def sampler(number):
        return DistributedBatchSampler(
            packed(
                seed=number(3),
                bins_per_batch=number(2),
                window=number(9),
                shuffle_block=number(2),
                max_sequences_per_bin=number(4),
            ),
            num_replicas=number(2),
            rank=number(1),
            accumulate=number(2),
            balance="step",
            balance_window=number(2),
            hidden_size=number(64),
        )

    ours, plain = sampler(np.int64), sampler(int)
    ours.set_epoch(np.int64(5))
    plain.set_epoch(5)
    assert list(ours.read()) == list(plain.read())
    assert json.dumps(ours.state_dict()) == json.dumps(plain.state_dict())
    assert list(MultipackBatchSampler(LENGTHS, np.int64(64), seed=np.uint8(3))) == list(packed(seed=3))


@pytest.mark.parametrize("seed", [-1, -(2**80), 2**64 + 5])
@pytest.mark.report("meta-pytorch/torchtune#2339")
def test_seeds_of_any_size_and_sign_name_an_order(seed):
    assert rows([packed(seed=seed)]) == list(range(400))
    assert list(packed(seed=seed)) == list(packed(seed=seed)) != list(packed(seed=seed + 1))


def test_state_behind_the_last_batch_is_the_next_epoch():
    sampler = ranks_of(packed, 4, tail="drop")[0]
    total = len(sampler.batch_sampler)
    sampler.load_state_dict({**sampler.state_dict(), "batches": total - 1})
    assert (sampler.epoch, sampler.remaining) == (1, len(sampler))


@pytest.mark.report("ray-project/ray_lightning#252")
def test_frameworks_find_what_they_look_for():
    for sampler in (packed(), DistributedBatchSampler(packed(), num_replicas=2, rank=0)):
        assert isinstance(sampler, torch.utils.data.Sampler)
        assert sampler.batch_size is None
        assert sampler.drop_last is False
        sampler.sampler.set_epoch(3)
        assert sampler.epoch == 3
        assert sampler.capacity == 64
        assert (
            getattr(sampler, "batch_sampler", sampler).plan is getattr(sampler, "batch_sampler", sampler).plan
        )
        copy = pickle.loads(pickle.dumps(sampler))
        assert list(copy.read()) == list(sampler.read())


def test_an_inner_sampler_follows_the_epoch():
    # 10 rows, batches of 2, torch's own sampler with set_epoch.
    inner = BatchSampler(DistributedSampler(range(10), num_replicas=1, rank=0, seed=1), 2, drop_last=False)
    sampler = DistributedBatchSampler(inner, num_replicas=1, rank=0)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    state = {**sampler.state_dict(), "epoch": 1, "batches": 2}
    sampler.load_state_dict(state)
    assert list(sampler) == second[2:]


def test_a_row_sampler_with_a_seed_can_be_dealt_but_not_resumed():
    inner = BatchSampler(
        RandomSampler(range(9), generator=torch.Generator().manual_seed(0)), 2, drop_last=False
    )
    sampler = DistributedBatchSampler(inner, num_replicas=2, rank=0)
    assert len(list(sampler)) == len(sampler) == 3
    with pytest.raises(ValueError, match="draws its order from a random generator"):
        sampler.state_dict()


@pytest.mark.report("pytorch/pytorch#49172")
def test_pad_repeats_the_first_batches_and_marks_them():
    batches = [[0], [1], [2]]
    dealt = [list(s) for s in ranks_of(lambda: bins_sampler(batches), 7, tail="pad")]
    assert dealt == [[[0]], [[1]], [[2]], [[0]], [[1]], [[2]], [[0]]]
    assert [batches[0].repeated for batches in dealt] == [False] * 3 + [True] * 4


def test_one_sequence_on_four_ranks_counts_once():
    dealt = [list(s) for s in ranks_of(lambda: MultipackBatchSampler([5], 8), 4)]
    assert dealt == [[[0]]] * 4
    assert [batches[0].repeated for batches in dealt] == [False, True, True, True]


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: MultipackBatchSampler([], 8), ValueError, "no sequences to pack"),
        (lambda: MultipackBatchSampler([5], 8, bins_per_batch=0), ValueError, "bins_per_batch is 0"),
        (
            lambda: MultipackBatchSampler([5], 8, bins_per_batch=2.0),
            TypeError,
            "bins_per_batch must be a whole",
        ),
        (lambda: packed(max_sequences_per_bin=0), ValueError, "max_sequences_per_bin is 0, below 1"),
        (
            lambda: packed(max_sequences_per_bin=2.0),
            TypeError,
            "max_sequences_per_bin must be a whole number",
        ),
        (lambda: packed().set_epoch(1.0), TypeError, r"epoch must be a whole number, not 1\.0"),
        (lambda: packed().set_epoch(-1), ValueError, "epoch is -1, below 0"),
        (
            lambda: DistributedBatchSampler(packed(), num_replicas=2.0, rank=0),
            TypeError,
            "num_replicas must be a whole number",
        ),
        (
            lambda: DistributedBatchSampler(packed(), num_replicas=1, rank=0, accumulate=1.5),
            TypeError,
            "accumulate must be a whole number",
        ),
        (
            lambda: MultipackBatchSampler([5, 5], 8, bins_per_batch=3, drop_last=True),
            ValueError,
            "2 bins do not fill one batch of bins_per_batch=3.*Use bins_per_batch <= 2",
        ),
        (
            lambda: DistributedBatchSampler(packed(), num_replicas=2000, rank=0, tail="drop", accumulate=2),
            ValueError,
            r"400 sequences of \d+ tokens make (\d+) bins.*2000 ranks \(accumulate=2\).*zero steps.*at most \1 ranks",
        ),
        (
            lambda: DistributedBatchSampler(
                MultipackBatchSampler([5] * 5, 8), num_replicas=2, rank=0, tail="error"
            ),
            ValueError,
            "5 batches cannot be dealt to 2 ranks evenly: 1 are left over",
        ),
        (
            lambda: DistributedBatchSampler(bins_sampler([]), num_replicas=1, rank=0),
            ValueError,
            "has 0 batches: there is nothing to train on",
        ),
        (
            lambda: DistributedBatchSampler(packed(), num_replicas=2, rank=2),
            ValueError,
            r"rank 2 is outside 0\.\.1",
        ),
        (
            lambda: DistributedBatchSampler(packed(), num_replicas=4, rank=-1),
            ValueError,
            "rank -1 is outside",
        ),
        (
            lambda: DistributedBatchSampler(packed(), num_replicas=1, rank=0, tail="x"),
            ValueError,
            "tail 'x' is none",
        ),
        (
            lambda: DistributedBatchSampler(packed(), num_replicas=1, rank=0, balance="x"),
            ValueError,
            "balance 'x'",
        ),
        (
            lambda: DistributedBatchSampler(packed(), num_replicas=1, rank=0, accumulate=0),
            ValueError,
            "accumulate is 0",
        ),
        (
            lambda: DistributedBatchSampler(packed(), num_replicas=1, rank=0, balance_window=2),
            ValueError,
            "balance_window is 2 but balance is 'none'",
        ),
        (
            lambda: DistributedBatchSampler(bins_sampler([[0]]), num_replicas=1, rank=0, balance="step"),
            ValueError,
            "needs the costs of batches",
        ),
        (
            lambda: DistributedBatchSampler(ranks_of(packed, 2)[0], num_replicas=2, rank=0),
            TypeError,
            "already dealt to ranks",
        ),
        (lambda: DistributedBatchSampler(iter([[0]]), num_replicas=1, rank=0), TypeError, "has no length"),
        (
            lambda: DistributedBatchSampler(
                BatchSampler(RandomSampler(range(4)), 2, drop_last=False), num_replicas=2, rank=0
            ),
            ValueError,
            "another order on each rank.*manual_seed",
        ),
        (
            lambda: DistributedBatchSampler(
                BatchSampler(DistributedSampler(range(4), num_replicas=2, rank=0), 2, drop_last=False),
                num_replicas=2,
                rank=0,
            ),
            ValueError,
            "a share of its share",
        ),
    ],
)
def test_what_cannot_work_is_refused(build, error, text):
    with pytest.raises(error, match=text):
        build()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "not the state of a multipack sampler"),
        ("nonsense", "not the state of a multipack sampler"),
        ({"version": 99, "fingerprint": "{}"}, "version 99"),
        (
            MultipackBatchSampler(LENGTHS, 65, seed=7).state_dict(),
            r"capacity \(65 in the state, 64 here\), seed \(7",
        ),
        (
            MultipackBatchSampler(LENGTHS[:-1], 64).state_dict(),
            r"lengths \(.*num_sequences \(399 in the state, 400",
        ),
    ],
)
def test_foreign_states_are_refused(state, text):
    for sampler in (packed(), DistributedBatchSampler(packed(), num_replicas=2, rank=0)):
        with pytest.raises(ValueError, match=text):
            sampler.load_state_dict(state)


def test_a_state_from_inside_a_balanced_step_needs_the_same_dealing():
    sampler = DistributedBatchSampler(packed(), num_replicas=2, rank=0, accumulate=4, balance="micro_step")
    iterator = iter(sampler)
    next(iterator)
    other = DistributedBatchSampler(packed(), num_replicas=3, rank=0, accumulate=4, balance="micro_step")
    with pytest.raises(ValueError, match="1 micro-steps inside a balanced optimizer step"):
        other.load_state_dict(sampler.state_dict())


def test_a_state_from_inside_a_balanced_step_needs_ranks():
    sampler = DistributedBatchSampler(packed(), num_replicas=2, rank=0, accumulate=4, balance="step")
    iterator = iter(sampler)
    next(iterator)
    with pytest.raises(ValueError, match="1 micro-steps inside a balanced optimizer step of 2 ranks"):
        packed().load_state_dict(sampler.state_dict())
    for _ in range(3):
        next(iterator)
    bare = packed()
    bare.load_state_dict(sampler.state_dict())
    assert bare.remaining == len(bare) - 8


def test_what_a_resumed_epoch_leaves_over_is_an_error_as_well():
    # 9 bins: even for 1 and for 3 ranks, but after one micro-step of 1 rank 8 are left, and 3 ranks would
    # have repeated one.
    def nine():
        return MultipackBatchSampler([64] * 9, 64)

    first = DistributedBatchSampler(nine(), num_replicas=1, rank=0, tail="error")
    iterator = iter(first)
    next(iterator)
    for rank in range(3):
        sampler = DistributedBatchSampler(nine(), num_replicas=3, rank=rank, tail="error")
        with pytest.raises(ValueError, match="8 batches cannot be dealt to 3 ranks evenly: 2 are left over"):
            sampler.load_state_dict(first.state_dict())
    next(iterator)
    next(iterator)
    sampler = DistributedBatchSampler(nine(), num_replicas=3, rank=0, tail="error")
    sampler.load_state_dict(first.state_dict())
    assert (sampler.remaining, len(list(sampler))) == (2, 2)


def test_a_later_epoch_that_is_not_even_is_an_error_as_well():
    class Growing:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 4 + self.epoch

        def __iter__(self):
            return iter([[row] for row in range(len(self))])

    sampler = DistributedBatchSampler(Growing(), num_replicas=2, rank=1, tail="error")
    assert list(sampler) == [[1], [3]]
    with pytest.raises(ValueError, match="5 batches cannot be dealt to 2 ranks evenly: 1 are left over"):
        next(iter(sampler))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.report("meta-pytorch/torchft#292")
def test_another_size_of_the_optimizer_step_is_logged_once_for_all_ranks(caplog, accumulate):
    state = DistributedBatchSampler(packed(), num_replicas=2, rank=0, accumulate=2).state_dict()
    for sampler in ranks_of(packed, 4, accumulate=accumulate):
        sampler.load_state_dict(state)
    logged = [record.getMessage() for record in caplog.records]
    if accumulate == 1:  # 2 x 2 batches then, 4 x 1 now
        assert logged == []
    else:
        (message,) = logged
        assert "had 4 batches (2 ranks x 2 micro-steps)" in message
        assert "has 8 now (4 ranks x 2)" in message


def test_its_own_epoch_rules_wherever_the_inner_sampler_was_moved():
    def loose():  # its epochs have different numbers of bins
        return packed(method="next_fit")

    everything = list(loose())
    inner = loose()
    sampler = DistributedBatchSampler(inner, num_replicas=1, rank=0)
    shorter = next(epoch for epoch in range(40) if len(inner.plan.at_epoch(epoch)) < len(everything))
    inner.set_epoch(shorter)
    assert len(sampler) == len(everything)
    taken = []
    for batch in sampler:
        taken.append(batch)
        inner.set_epoch(shorter)
    assert taken == everything
    assert sampler.epoch == 1


def test_a_process_group_made_after_the_sampler_must_say_the_same(monkeypatch):
    discovered = [
        DistributedBatchSampler(packed(), **given) for given in ({}, {"rank": 0}, {"num_replicas": 1})
    ]
    named = DistributedBatchSampler(packed(), num_replicas=1, rank=0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for sampler in discovered:
        with pytest.raises(ValueError, match="built for rank 0 of 1, but the process group says rank 0 of 2"):
            list(sampler)
    assert rows([list(named)]) == list(range(400))


def test_sequential_rows_of_torch_can_be_resumed():
    inner = BatchSampler(SequentialSampler(range(9)), 2, drop_last=False)
    sampler = DistributedBatchSampler(inner, num_replicas=2, rank=0)
    assert list(sampler) == [[0, 1], [4, 5], [8]]
    assert sampler.capacity is None
    assert (
        len(DistributedBatchSampler(inner, num_replicas=5, rank=4, tail="drop")) == 1
    )  # as many batches as ranks
    iterator = iter(sampler)
    next(iterator)
    state = sampler.state_dict()
    assert state["batches"] == 2
    other = DistributedBatchSampler(inner, num_replicas=1, rank=0)
    other.load_state_dict(state)
    assert list(other) == [[4, 5], [6, 7], [8]]
