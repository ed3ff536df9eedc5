"""Benchmarks check answers before they time them, and their data is what it says."""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu_varlen, length_sets, packing_rivals, planning, probes
from benchmarks.timing import in_turns, over
from multipack import pack


@pytest.mark.filterwarnings("ignore")
def test_threads_that_ended_are_passed_over_and_the_others_are_placed(monkeypatch):
    overlap = importlib.import_module("benchmarks.test_overlap_speed")
    main, cores = threading.get_native_id(), os.sched_getaffinity(0)
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    gone, placed = ended.native_id, {}

    def affinity_of(task):
        if task == gone:
            raise ProcessLookupError(task)
        return {0, 1}

    def place(task, cores):
        if task == gone:
            raise ProcessLookupError(task)
        placed[task] = cores

    monkeypatch.setattr(os, "listdir", lambda folder: [str(gone), str(main), "7"])
    monkeypatch.setattr(os, "sched_getaffinity", affinity_of)
    monkeypatch.setattr(os, "sched_setaffinity", place)
    monkeypatch.setattr(overlap.psutil.Process, "children", lambda self, recursive: [])
    overlap.place_others_apart()
    assert placed == {main: {1}, 7: {0}}
    monkeypatch.undo()
    assert os.sched_getaffinity(0) == cores


def test_rounds_alternate_and_ratios_are_between_neighbours():
    seen = []
    seconds = in_turns({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 3)
    assert seen == ["a", "b"] * 3
    assert [len(values) for values in seconds.values()] == [3, 3]
    assert over([6.0, 8.0], [2.0, 4.0]) == [3.0, 2.0]


@pytest.mark.parametrize("longest", [60, 65_535, 131_072])
def test_the_probe_of_sorting_sorts(longest):
    lengths = np.random.default_rng(0).integers(1, longest + 1, 1000)
    lengths[0] = longest
    ordered = lengths[probes.radix_sort(lengths)()]
    assert (np.diff(ordered >> max(0, longest.bit_length() - 16)) >= 0).all()


def test_the_probe_of_loads_visits_every_cache_line_once():
    seen = []
    follow = probes._follow.py_func
    original, probes._follow = probes._follow, lambda next_of, steps: seen.append((next_of, steps))
    try:
        probes.dependent_load_ns(64 * 100, steps=10)
    finally:
        probes._follow = original
    next_of = seen[0][0]
    assert len({follow(next_of, steps) for steps in range(100)}) == 100
    assert follow(next_of, 100) == 0


def test_lengths_of_real_data_have_the_quantiles_of_their_table():
    for make, capacity in length_sets.REAL.values():
        lengths = make(200_000, capacity)
        assert lengths.dtype == np.int32
        assert 1 <= lengths.min() <= lengths.max() <= capacity
    quantiles, _ = length_sets.REAL_LENGTHS["documents (PEPs)"]
    lengths = length_sets.from_quantiles(quantiles, 200_000, 32_768)
    of_table = [quantiles[i] for i in (5, 10, 15)]
    assert np.quantile(lengths, [0.25, 0.5, 0.75]) == pytest.approx(of_table, rel=0.02)


def test_synthetic_lengths_fit_their_capacity():
    for make, capacity in length_sets.MADE.values():
        lengths = make(3000, capacity)
        assert len(lengths) == 3000
        assert 1 <= lengths.min() <= lengths.max() <= capacity


def test_without_the_shared_folder_real_sets_say_what_they_lack(monkeypatch, tmp_path):
    monkeypatch.setattr(length_sets, "SHARED", tmp_path / "shared")
    for part in ("real", "quality"):
        with pytest.raises(FileNotFoundError, match="no folder shared beside the checkout"):
            planning.main([part])


def test_a_packer_with_a_wrong_answer_is_not_timed():
    lengths = length_sets.lognormal(2000)
    best = len(pack(lengths, 4096, method="best_fit_decreasing"))
    packing_rivals.assert_bins("trl bfd", best, lengths, 4096)
    packing_rivals.assert_bins("binpacking", best + 5, lengths, 4096)
    for wrong in (best - 5, best + 5):
        with pytest.raises(AssertionError, match="trl bfd"):
            packing_rivals.assert_bins("trl bfd", wrong, lengths, 4096)


def test_a_packing_that_loses_or_overfills_is_seen():
    lengths = np.array([5, 4, 3, 2], np.int32)
    good = pack(lengths, 7, method="best_fit_decreasing")
    planning.assert_packs(good, lengths, 7)
    with pytest.raises(AssertionError):
        planning.assert_packs(good, lengths, 6)
    with pytest.raises(AssertionError):
        planning.assert_packs(good, np.append(lengths, np.int32(1)), 7)


@pytest.mark.parametrize("way", gpu_varlen.WAYS)
def test_every_way_of_attention_gives_what_each_row_alone_does_and_a_leak_is_seen(way):
    cpu, attend = torch.device("cpu"), gpu_varlen.WAYS[way]
    assert gpu_varlen.error(attend, cpu, 4, torch.float32) < 1e-5

    def leaking(rows):
        return attend(rows._replace(lengths=[sum(rows.lengths)]))

    assert gpu_varlen.error(leaking, cpu, 4, torch.float32) > 0.1


def test_logits_of_packed_rows_are_off_by_bfloat16_alone_and_a_leak_is_seen(monkeypatch):
    gpu_sft = importlib.import_module("benchmarks.gpu_sft")
    attention = importlib.import_module("multipack.integrations.attention")
    small = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    shape = gpu_sft.TINY_LLAMA_1B | small | {"num_attention_heads": 4, "num_key_value_heads": 2}
    packed, padded = gpu_sft.logit_errors(torch.device("cpu"), shape)
    assert 0 < packed <= 1.5 * padded < 0.05
    loop = attention.segment_loop

    def joined(q: Any, k: Any, v: Any, lengths: list[int], *more: Any, **names: Any) -> Any:
        return loop(q, k, v, [sum(lengths)], *more, **names)

    monkeypatch.setattr(attention, "segment_loop", joined)
    assert gpu_sft.logit_errors(torch.device("cpu"), shape)[0] > 10 * padded


def test_the_static_gpu_script_sees_wrong_values_and_batches_that_changed():
    gpu_static = importlib.import_module("benchmarks.gpu_static")
    cpu = torch.device("cpu")
    assert gpu_static.empty_segments_error(cpu, torch.float32, 4) < 1e-6
    first, *others = gpu_static.batches(cpu, 256, gpu_static.BATCHES)
    assert len(others) == gpu_static.BATCHES - 1
    assert not any(gpu_static.changed(first, other) for other in others)
    cut = first | {"cu_seq_lens_q": first["cu_seq_lens_q"][:-1], "max_length_q": first["max_length_q"] - 1}
    assert gpu_static.changed(first, cut) == ["cu_seq_lens_q", "max_length_q"]


def test_the_error_of_the_static_gpu_script_is_the_worst_tensor_and_keeps_nan():
    gpu_static = importlib.import_module("benchmarks.gpu_static")
    right = [torch.tensor([3.0, 4.0]), torch.tensor([2.0])]
    assert gpu_static.relative_error([right[0], torch.tensor([1.0])], right) == 0.5
    assert np.isnan(gpu_static.relative_error([right[0], torch.tensor([float("nan")])], right))
