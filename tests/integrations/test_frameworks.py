"""Each framework trains on the batches of the plain loop, bit for bit: from the start, in later epochs, and
resumed."""

from __future__ import annotations

import json
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from train.ranks import run_ranks

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).with_name("frameworks_worker.py")
CELLS = ("stateful", "accelerate", "accelerate_stream", "trainer", "lightning", "deepspeed")
NUM_ROWS = 60
Answers = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What each rank wrote down, by number of ranks. All cells share one start, which costs more than they
    do."""
    folder = tmp_path_factory.mktemp("frameworks")
    for ranks in (2, 1):
        run_ranks(ranks, WORKER, folder, *CELLS, timeout_s=300)
    return {
        ranks: [json.loads((folder / f"rank{rank}of{ranks}.json").read_text()) for rank in range(ranks)]
        for ranks in (1, 2)
    }


def flat(epochs: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(epochs))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_plain_loop_has_every_row_and_epochs_of_different_lengths(answers: Answers, ranks: int) -> None:
    # Otherwise the tests below would compare less than they say.
    plain = [answer["plain"] for answer in answers[ranks]]
    for epochs in zip(*plain, strict=True):
        assert sorted({row for batch in flat(list(epochs)) for row in batch[1]}) == list(range(NUM_ROWS))
    lengths = [len(epoch) for epoch in plain[0]]
    assert lengths[0] < lengths[1] < lengths[2]
    assert [len(epoch) for epoch in plain[-1]] == lengths
    assert lengths[0] % 4  # the last window of four is not full


@pytest.mark.parametrize("framework", ["stateful", "accelerate", "deepspeed"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_epochs_are_the_plain_loops(answers: Answers, framework: str, ranks: int) -> None:
    for answer in answers[ranks]:
        assert answer[framework]["epochs"] == answer["plain"][:2]


@pytest.mark.parametrize("framework", ["stateful", "accelerate", "deepspeed"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_saved_behind_the_fourth_batch_of_the_second_epoch(
    answers: Answers, framework: str, ranks: int
) -> None:
    for answer in answers[ranks]:
        assert answer[framework]["resumed"]["1/4"] == answer["plain"][1][4:]


@pytest.mark.parametrize("framework", ["trainer", "lightning"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_three_epochs_are_the_plain_loops(answers: Answers, framework: str, ranks: int) -> None:
    # Epochs two and three are longer than the first, by which these frameworks would count.
    for answer in answers[ranks]:
        assert answer[framework]["flat"] == flat(answer["plain"][:3])


@pytest.mark.parametrize("framework", ["trainer", "lightning"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_resumed_inside_each_epoch(answers: Answers, framework: str, ranks: int) -> None:
    for answer in answers[ranks]:
        whole = flat(answer["plain"][:3])
        places = {len(whole) - len(rest): rest for rest in answer[framework]["resumed"].values()}
        ends = [0, *(len(flat(answer["plain"][:n])) for n in (1, 2, 3))]
        assert [sum(a < place < b for place in places) for a, b in pairwise(ends)] == [1] * 3
        for place, rest in places.items():
            assert rest == whole[place:]


@pytest.mark.parametrize("framework", ["trainer", "lightning"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_is_the_mean_over_all_targets(answers: Answers, framework: str, ranks: int) -> None:
    for answer in answers[ranks]:
        assert answer[framework]["evaluated"] == pytest.approx(answer[framework]["exactly"], rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_keeps_our_loader_and_steps_the_last_window(answers: Answers, ranks: int) -> None:
    for answer in answers[ranks]:
        seen = answer["accelerate"]
        assert seen["same_loader"]
        for epoch, flags in zip(answer["plain"], seen["synchronised"], strict=False):
            places = range(1, len(epoch) + 1)
            assert flags == [place % 4 == 0 or place == len(epoch) for place in places]


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_skips_into_an_epoch(answers: Answers, ranks: int) -> None:
    for answer in answers[ranks]:
        rest = answer["plain"][1][4:]
        assert answer["accelerate"]["skipped"] == rest
        assert answer["accelerate"]["skipped_synchronised"][-1]


def test_accelerate_gathers_each_target_once(answers: Answers) -> None:
    # Two ranks get the tail of an epoch, some of it as repeats without a target.
    gathered = {answer["accelerate"]["targets_gathered"] for ranks in (1, 2) for answer in answers[ranks]}
    assert len(gathered) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_trainer_counts_steps_of_all_epochs(answers: Answers, ranks: int) -> None:
    for answer in answers[ranks]:
        assert answer["trainer"]["steps"] == sum(-(-len(epoch) // 4) for epoch in answer["plain"][:3])
        assert answer["trainer"]["flat_by_max_steps"] == answer["trainer"]["flat"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_trainer_ends_with_the_same_parameters_after_resuming(answers: Answers, ranks: int) -> None:
    for answer in answers[ranks]:
        assert max(answer["trainer"]["parameters"].values()) < 1e-6


@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_leaves_a_bare_loader_as_it_is(answers: Answers, ranks: int) -> None:
    for answer in answers[ranks]:
        plain = answer["plain"][:3]
        assert answer["lightning"]["flat_bare"] == flat(plain)
        assert answer["lightning"]["epoch_of"] == [e for e, epoch in enumerate(plain) for _ in epoch]


@pytest.mark.parametrize("ranks", [1, 2])
def test_deepspeed_repeats_with_a_new_order_each_epoch(answers: Answers, ranks: int) -> None:
    for answer in answers[ranks]:
        repeated = answer["deepspeed"]["repeated"]
        assert repeated == flat(answer["plain"])[: len(repeated)]
        assert len(repeated) == len(flat(answer["plain"][:2])) + 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_deepspeed_pipelines_take_it_by_train_batch(answers: Answers, ranks: int) -> None:
    for answer in answers[ranks]:
        taken = answer["deepspeed"]["train_batch"]
        assert len(taken) == 24
        assert taken == flat(answer["plain"])[:24]


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_takes_a_stream_as_it_is_and_steps_its_last_window(answers: Answers, ranks: int) -> None:
    for answer in answers[ranks]:
        stream = answer["accelerate_stream"]
        assert stream["seen"] == stream["plain"]
        places = range(1, len(stream["seen"]) + 1)
        assert stream["synchronised"] == [place % 4 == 0 or place == len(places) for place in places]
    rows = [
        row for answer in answers[ranks] for batch in answer["accelerate_stream"]["seen"] for row in batch[1]
    ]
    assert sorted(set(rows)) == list(range(NUM_ROWS))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loader_is_stateful_in_torchs_sense(answers: Answers, ranks: int) -> None:
    assert all(answer["stateful"]["is_stateful"] for answer in answers[ranks])


def test_one_rank_goes_on_where_two_stopped(answers: Answers) -> None:
    before = [row for answer in answers[2] for batch in answer["plain"][1][:4] for row in batch[1]]
    after = [row for batch in answers[1][0]["stateful"]["of_two_ranks"] for row in batch[1]]
    assert sorted(before + after) == list(range(NUM_ROWS))
