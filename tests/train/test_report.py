"""What a run says of itself."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaConfig, LlamaForCausalLM

from multipack.train.loop import LateNumbers
from multipack.train.metrics import (
    Operations,
    StepMetrics,
    flops_per_token,
    merge,
    model_operations,
    peak_flops,
)
from multipack.train.report import MetricsLog, RunReport

STEP = StepMetrics(
    step=1,
    epoch=0.1,
    loss=2.0,
    learning_rate=1e-3,
    grad_norm=0.5,
    num_sequences=10,
    num_tokens=900,
    num_target_tokens=300,
    num_slots=1000,
    num_bin_slots=1200,
    seconds=0.5,
    wait_seconds=0.01,
)


def steps(count: int, first: int = 1, **values: Any) -> list[StepMetrics]:
    return [replace(STEP, step=first + i, epoch=(first + i) / 10, **values) for i in range(count)]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_rates_and_shares_of_a_step() -> None:
    assert STEP.samples_per_s == 20
    assert STEP.tokens_per_s == 1800
    assert STEP.padding_share == pytest.approx(0.1)
    assert STEP.bin_fill == 0.75
    assert STEP.wait_share == 0.02


def test_joined_steps_weight_the_loss_by_targets() -> None:
    other = replace(
        STEP,
        step=2,
        epoch=0.2,
        loss=4.0,
        num_target_tokens=100,
        grad_norm=0.4,
        learning_rate=2e-3,
        seconds=1.5,
    )
    joined = merge([STEP, other])
    assert joined.loss == pytest.approx((2.0 * 300 + 4.0 * 100) / 400)
    assert (joined.step, joined.epoch, joined.learning_rate, joined.grad_norm) == (2, 0.2, 2e-3, 0.5)
    assert (joined.num_tokens, joined.num_target_tokens, joined.seconds) == (1800, 400, 2.0)
    assert joined.tokens_per_s == 900


def test_steps_without_targets_have_no_loss() -> None:
    assert math.isnan(merge([replace(STEP, num_target_tokens=0)]).loss)
    kept = merge([STEP, replace(STEP, loss=math.nan, num_target_tokens=0)])
    assert kept.loss == 2.0
    with pytest.raises(ValueError, match="0 steps cannot be joined"):
        merge([])


def test_operations_of_a_token() -> None:
    assert flops_per_token(1000, 1000) == 6000  # 2 forward, 4 backward
    assert flops_per_token(1000, 10) == 4020  # frozen weights have no gradient of their own


@pytest.mark.parametrize("tied", [False, True])
def test_operations_of_a_model_count_its_output_layer_at_targets_alone(tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    # Four projections of 8 x 8, three of 8 x 16, three norms of 8; embedding and output are 100 x 8 each, or
    # one and the same.
    body, head = 4 * 64 + 3 * 128 + 3 * 8, 800
    assert model_operations(model) == Operations(6 * body, 6 * head)
    model.requires_grad_(False)
    assert model_operations(model) == Operations(4 * body, 4 * head)


def test_rates_are_given_without_the_first_steps_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunReport(tmp_path, total_steps=5) as report:
        for step in steps(5):
            # The first three take ten times as long: 900 tokens in 5 s, then in 0.5 s.
            report.step(replace(step, seconds=5.0 if step.step <= 3 else 0.5))
    assert "| 281 tokens/s (1,800 without the first 3 steps) |" in capsys.readouterr().out


def test_a_failed_run_says_so_in_its_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = RunReport(tmp_path, total_steps=5)
    for step in steps(2):
        report.step(step)
    report.__exit__(FloatingPointError, FloatingPointError("loss nan"), None)
    assert (
        capsys.readouterr().out.splitlines()[-1] == "sft: FAILED after step 2: FloatingPointError: loss nan"
    )


def test_numbers_are_read_as_they_were_when_they_were_taken() -> None:
    total, norm = torch.tensor(2.5, dtype=torch.float64), torch.tensor(0.25)
    late = LateNumbers(total, norm)
    total += 1  # what the next step does with the same memory
    assert late.read() == [2.5, 0.25]


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
    ],
)
def test_peaks_of_known_devices(name: str, tflops: int) -> None:
    assert peak_flops(name) == tflops * 1e12


def test_an_unknown_device_has_no_peak() -> None:
    assert peak_flops("cpu") is None
    assert peak_flops("NVIDIA A10000") is None


def test_a_run_leaves_lines_scalars_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunReport(tmp_path, total_steps=3, operations=Operations(2e9, 8e9), peak_flops=1e14) as report:
        for step in steps(3):
            report.step(step)
        report.evaluation(3, 1.5, 77)
    train = [record for record in records(tmp_path) if record["kind"] == "train"]
    assert [record["step"] for record in train] == [1, 2, 3]
    assert train[0]["tokens_per_s"] == 1800
    assert train[0]["mfu"] == pytest.approx((900 * 2e9 + 300 * 8e9) / 0.5 / 1e14)
    assert records(tmp_path)[-1] == {"kind": "eval", "step": 3, "loss": 1.5, "num_target_tokens": 77}
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in board.Scalars("train/loss")] == [2.0, 2.0, 2.0]
    assert [(event.step, event.value) for event in board.Scalars("eval/loss")] == [(3, 1.5)]
    shown = capsys.readouterr()
    assert "step 3: validation loss 1.5000 over 77 tokens" in shown.out
    summary, places = shown.out.splitlines()[-2:]
    assert places.startswith(
        f"sft: metrics {tmp_path}/metrics.jsonl, picture {tmp_path}/run.png | peak memory "
    )
    assert summary == (
        "sft: step 3, last loss 2.0000, 30 samples and 2,700 tokens in 1.5 s | 20.00 samples/s | 1,800 "
        "tokens/s | padding 10.00% | data wait 2.00% | bin fill 75.00% | MFU 8.4%"
    )
    assert "3/3" in shown.err
    assert "loss 2.000, 1,800 tokens/s, wait 2.0%" in shown.err


def test_lines_join_logging_steps_and_the_rest_is_written_at_the_end(tmp_path: Path) -> None:
    with RunReport(tmp_path, total_steps=5, logging_steps=2) as report:
        for step in steps(5):
            report.step(step)
    assert [(record["step"], record["num_tokens"]) for record in records(tmp_path)] == [
        (2, 1800),
        (4, 1800),
        (5, 900),
    ]


def test_closing_twice_says_the_same_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = RunReport(tmp_path, total_steps=1)
    report.step(STEP)
    assert report.close() == report.close()
    assert capsys.readouterr().out.count("samples/s") == 1


def test_a_run_of_no_steps_says_so(tmp_path: Path) -> None:
    assert RunReport(tmp_path, total_steps=3).close() == "sft: 0 steps trained"
    assert records(tmp_path) == []
    assert not (tmp_path / "run.png").exists()


def test_a_resumed_run_drops_the_lines_after_its_checkpoint(tmp_path: Path) -> None:
    with RunReport(tmp_path, total_steps=6) as killed:
        for step in steps(4):
            killed.step(step)
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "st')  # a line that a kill cut off
    with RunReport(tmp_path, total_steps=6, first_step=2) as resumed:
        for step in steps(2, first=3, loss=1.0):
            resumed.step(step)
    assert [(record["step"], record["loss"]) for record in records(tmp_path)] == [
        (1, 2.0),
        (2, 2.0),
        (3, 1.0),
        (4, 1.0),
    ]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [
        (1, 2),
        (2, 2),
        (3, 1),
        (4, 1),
    ]


def test_a_new_run_starts_new_lines(tmp_path: Path) -> None:
    for _ in range(2):
        with RunReport(tmp_path, total_steps=1) as report:
            report.step(STEP)
    assert len(records(tmp_path)) == 1


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with RunReport(tmp_path, total_steps=2) as report:
        report.step(replace(STEP, loss=math.nan, grad_norm=math.inf))
        report.step(replace(STEP, step=2))
    assert [(record["loss"], record["grad_norm"]) for record in records(tmp_path)] == [
        (None, None),
        (2.0, 0.5),
    ]
    assert (tmp_path / "run.png").exists()


def test_a_log_takes_any_numbers(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write("ppo", 4, {"reward": 0.5})
    assert records(tmp_path) == [{"kind": "ppo", "step": 4, "reward": 0.5}]  # on disk before it is closed
    log.close()
