"""What benchmarks print is what the report reads: tables made of known figures, and the claims' values out of them."""

from __future__ import annotations

import argparse
import importlib
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import length_sets, packing_rivals, planning, throughput
from benchmarks.report.claims import CLAIMS
from benchmarks.throughput_settings import Settings
from multipack import pack


def values(what, text):
    """Of the claim whose sentence begins so."""
    return next(claim for claim in CLAIMS if claim.what.startswith(what)).values(text)


@pytest.mark.filterwarnings("ignore")
def test_waiting_beside_a_step():
    overlap = importlib.import_module("benchmarks.test_overlap_speed")
    steps = {name: overlap.Step(work_ms=20.0, wait_ms=0.0) for name in overlap.LOADERS}
    steps["multipack DataLoader, 1 thread"] = overlap.Step(work_ms=20.2, wait_ms=0.2)
    text = overlap.table("20 ms sleep", steps)
    assert values("a 20 ms sleeping step", text) == [pytest.approx(1.02)]
    assert values("its data-wait share, warm", text) == [pytest.approx(100 * 0.2 / 20.4, abs=0.01)]
    assert values("3,000 tiny operations", overlap.table("3,000 tiny operations", steps)) == [1.01]


@pytest.mark.filterwarnings("ignore")
def test_tokens_a_cpu_second():
    loading = importlib.import_module("benchmarks.test_loading_speed")
    speeds = {name: loading.Speed(5e6, 5e6, 0.1) for name in loading.RIVALS}
    speeds["grain + trl, rows as tensors"] = loading.Speed(8e6, 5e6, 0.1)
    speeds |= {name: loading.Speed(120e6, 5e6, 0.1) for name in loading.OURS}
    text = loading.throughput_table(speeds)
    assert values("tokens a CPU second", text) == [15]
    assert values("torch's own DataLoader over our parts", text) == [24]
    line = loading.first_batch_line(loading.FirstBatch(0.5, 0.060, 0.020))
    assert values("first batch of 10^6 rows", line) == [pytest.approx(0.080)]


def cell_of(engine, loader, samples_per_s):
    return {
        "engine": engine,
        "loader": loader,
        "samples_per_s": samples_per_s,
        "tokens_per_s": 100 * samples_per_s,
        "wait_share": 0.004,
        "padding_share": 0.0,
    }


def test_training_throughput(monkeypatch):
    monkeypatch.setattr("sys.argv", ["throughput.py"])
    settings = Settings(loaders=["padded", "trl packed", "multipack"], rounds=1, simulate_step_ms=20.0)
    rates = {"padded": 10.0, "trl packed": 25.0, "multipack": 50.0}
    simulated = [cell_of("zero2", loader, rate) for loader, rate in rates.items()]
    trained = [cell_of("1 rank", loader, rate) for loader, rate in rates.items()]
    text = "\n\n".join(throughput.report(cells, settings, 2) for cells in (simulated, trained))
    assert values("simulated step of 20 ms", text) == [2]
    assert values("the same, data-wait share of multipack", text) == [0.4]
    assert values("tiny Llama on the CPU", text) == [5]


def test_ppo_comparisons(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(packing_rivals.__file__).parent))
    script = importlib.import_module("ppo_opt_lora_dummy")
    run = defaultdict(lambda: 1.0)
    spread = {"lowest": 1.0, "highest": 9.0}
    compared = {
        "generation": spread
        | {"sharded_samples_per_s": 4, "redundant_samples_per_s": 2, "sharded_over_redundant": 2.0},
        "update": spread
        | {"packed_samples_per_s": 6, "padded_samples_per_s": 2, "packed_over_padded": 3.0}
        | {"loss_difference": 4e-9},
    }
    sizes = SimpleNamespace(
        num_replicas=2, rollout_batch_size=8, num_collect_steps=4, train_batch_size=16, steps_per_iteration=1
    )
    arguments: argparse.Namespace = script.arguments_of(["--compare"])
    text = script.report(arguments, sizes, {"run": run} | compared)
    assert values("PPO: distinct samples/s", text) == [2]
    assert values("PPO: update samples/s", text) == [3]
    assert values("the same, difference of the loss", text) == [pytest.approx(4e-9)]


def test_lengths_of_real_data_have_the_quantiles_of_their_table():
    for make, capacity in length_sets.REAL.values():
        lengths = make(200_000, capacity)
        assert lengths.dtype == np.int32
        assert 1 <= lengths.min() <= lengths.max() <= capacity
    quantiles, _ = length_sets.REAL_LENGTHS["documents (PEPs)"]
    lengths = length_sets.from_quantiles(quantiles, 200_000, 32_768)
    assert np.quantile(lengths, [0.25, 0.5, 0.75]) == pytest.approx(
        [quantiles[i] for i in (5, 10, 15)], rel=0.02
    )


def test_made_lengths_fit_their_capacity():
    for make, capacity in length_sets.MADE.values():
        lengths = make(3000, capacity)
        assert len(lengths) == 3000
        assert 1 <= lengths.min() <= lengths.max() <= capacity


def test_without_the_shared_folder_real_sets_are_left_out(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(planning, "SHARED", tmp_path / "shared")
    planning.main(["real", "quality"])
    assert capsys.readouterr().out.count("Left out: needs") == 2


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


def test_logits_of_packed_rows_are_off_by_bfloat16_alone_and_a_leak_is_seen(monkeypatch):
    gpu_sft = importlib.import_module("benchmarks.gpu_sft")
    attention = importlib.import_module("multipack.integrations.attention")
    small = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    shape = gpu_sft.TINY_LLAMA_1B | small | {"num_attention_heads": 4, "num_key_value_heads": 2}
    packed, padded = gpu_sft.logit_errors(torch.device("cpu"), shape)
    assert 0 < packed <= 1.5 * padded < 0.05
    loop = attention._segment_loop
    monkeypatch.setattr(attention, "_segment_loop", lambda q, k, v, n, *more: loop(q, k, v, [sum(n)], *more))
    assert gpu_sft.logit_errors(torch.device("cpu"), shape)[0] > 10 * padded
