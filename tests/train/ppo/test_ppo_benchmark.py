"""The benchmark of the PPO history: its command line, its numbers, and rivals that do the same work."""

from __future__ import annotations

import importlib
import json

import pytest

from multipack.train.ppo.main import ppo_sizes

HISTORY = (
    "--num_collect_steps 1 --use_kernels --strategy colossalai_zero2 --experience_batch_size 64 --train_batch_size {} "
    "--model 1.3b"
)


@pytest.fixture
def benchmark_script():
    return importlib.import_module("benchmarks.ppo_opt_lora_dummy")


def test_history_command_is_refused_with_its_numbers(benchmark_script, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match=r"64 < 256.*train_batch_size 64 or less \(8 a rank\)"):
        benchmark_script.main(HISTORY.format(32).split())


def test_the_local_batch_that_works_takes_one_step(benchmark_script):
    arguments = benchmark_script.arguments_of(HISTORY.format(8).split())
    config = benchmark_script.config_of(arguments, 8, "out")
    assert ppo_sizes(config, 8).steps_per_iteration == 1
    assert (config.zero_stage, config.offload, config.optimizer) == (2, False, "adamw_torch_fused")


@pytest.mark.parametrize(
    ("strategy", "stage", "offload"),
    [
        ("ddp", 0, False),
        ("zero3_offload", 3, True),
        ("colossalai_zero2_cpu", 2, True),
        ("colossalai_gemini", 3, False),
    ],
)
def test_spellings_of_strategies(benchmark_script, strategy, stage, offload):
    arguments = benchmark_script.arguments_of(["--strategy", strategy])
    config = benchmark_script.config_of(arguments, 1, "out")
    assert (config.zero_stage, config.offload) == (stage, offload)


@pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module .* returned a view:UserWarning"
)  # transformers' OPT layers
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_records_of_a_small_run(benchmark_script, tmp_path, monkeypatch, lora_rank):
    options = (
        "--strategy zero2 --num_episodes 2 --num_collect_steps 1 --experience_batch_size 6 "
        f"--train_batch_size 3 --lora_rank {lora_rank} --prompt_tokens 60 --varied_prompts --max_new_tokens "
        "6 --micro_batch_tokens 128 --compare"
    )
    monkeypatch.setenv("MULTIPACK_RECORDS", str(tmp_path / "records"))
    benchmark_script.main(options.split())
    lines = map(json.loads, (tmp_path / "records").read_text().splitlines())
    found = {line["name"]: line for line in lines}
    ratio = found["PPO, compared | update: packed over padded | ratio"]
    assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
    assert found["PPO, loss | packed against padded | difference"]["value"] < 1e-5
    shares = [line["value"] for name, line in found.items() if name.endswith("| share of time")]
    assert len(shares) == 4
    assert 0 < sum(shares) <= 100.1
