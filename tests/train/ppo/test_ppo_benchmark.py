"""The benchmark of the PPO history: its command line, its numbers, and rivals that do the same work."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from multipack.train.ppo.main import ppo_sizes

HISTORY = (
    "--num_collect_steps 1 --use_kernels --strategy colossalai_zero2 --experience_batch_size 64 --train_batch_size {} "
    "--model 1.3b"
)


@pytest.fixture
def benchmark_script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("ppo_opt_lora_dummy")


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
def test_report_of_a_small_run(benchmark_script, capsys, lora_rank):
    options = (
        f"--strategy zero2 --num_episodes 2 --num_collect_steps 1 --experience_batch_size 6 --train_batch_size 3 --lora_rank {lora_rank} "
        "--prompt_tokens 60 --varied_prompts --max_new_tokens 6 --micro_batch_tokens 128 --compare"
    )
    benchmark_script.main(options.split())
    shown = capsys.readouterr().out
    assert (
        "6 prompts x 1 collect steps (all ranks), 3 sequences an optimizer step (3 a rank), 2 optimizer steps"
        in shown
    )
    assert len(re.findall(r"packed over padded .* \*\*\d+\.\d\dx\*\*", shown)) == 1
    assert float(re.search(r"padded: (\S+) apart", shown)[1]) < 1e-5
