"""Started by torchrun: PPO runs of a few iterations; rank 0 writes what came out.

argv: output folder, then names of cells; "text" is the configuration in `text.json` of that folder. A cell's
result is a dict: the metrics of each iteration, all parameters of the networks, and the prompt rows that each
rank was asked to reward; or the error of each rank.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from multipack.train.ppo.config import PPOConfig
from multipack.train.ppo.main import plan_run, train
from multipack.train.process import process_group

BASE = {
    "num_prompts": 24,
    "rollout_batch_size": 8,
    "train_batch_size": 8,
    "num_update_steps": 1,
    "micro_batch_tokens": 64,
    "adam_epsilon": 1e-3,
    "entropy_coef": 0.01,
    "seed": 1,
}
ODD = {
    # 17 prompts: collect steps of 8, 8 and 1, so that the second iteration finds one prompt for two ranks.
    "num_prompts": 17,
    "num_collect_steps": 2,
    "update_mode": "steps",
    "num_update_steps": 3,
    "train_batch_size": 6,
    "kl_target": 0.01,
    "kl_horizon": 50,
    "critic": "separate",
    "temperature": 0.8,
    "generation_batch_size_per_rank": 3,
}
LORA = {"adapter": "lora", "lora_target_linear": True, "lora_r": 2}
CELLS = {
    "0": {"save_iterations": 1, "save_total_limit": 9},
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "odd-0": ODD,
    "odd-3": ODD | {"zero_stage": 3},
    "lora-2": LORA | {"zero_stage": 2},
    "deepspeed-3": {"deepspeed": str(Path(__file__).parents[3] / "examples/configs/deepspeed/zero3.json")},
}


def even_share(prompts, responses):
    """A reward by name: the share of even tokens."""
    return [sum(token % 2 == 0 for token in row["input_ids"]) / len(row["input_ids"]) for row in responses]


def config_of(cell: str, folder: Path) -> PPOConfig:
    if cell == "text":
        return PPOConfig(**json.loads((folder / "text.json").read_text()))
    return PPOConfig(**BASE | CELLS[cell] | {"output_dir": str(folder / cell)})


def train_cell(config: PPOConfig, device: torch.device) -> dict:
    run = plan_run(config)
    asked: list[int] = []
    position = {id(prompt): row for row, prompt in enumerate(run.task.prompts)}

    def noted(prompts, responses):
        asked.extend(position[id(prompt)] for prompt in prompts)
        return run.task.reward(prompts, responses)

    trainer = train(replace(run, task=replace(run.task, reward=noted)), device)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, asked)
    return {
        "history": trainer.history,
        "parameters": trainer.engine.full_parameters(),
        "kl_coef": trainer.kl.coefficient,
        "asked": everyone,
    }


def broken_rewards() -> dict:
    """Rewards that are right on rank 0 and wrong on rank 1, by the name of the fault."""

    def raises(prompts, responses):
        raise KeyError("no such answer")

    return {
        "raises": raises,
        "count": lambda prompts, responses: [0.0],
        "nan": lambda prompts, responses: [float("nan")] * len(prompts),
    }


def errors_of(config: PPOConfig, broken, device: torch.device) -> list[str]:
    """What each rank says when rank 1's reward is broken."""
    run = plan_run(config)
    task = replace(run.task, reward=broken) if dist.get_rank() == 1 else run.task
    try:
        train(replace(run, task=task), device)
        said = "trained"
    except RuntimeError as error:
        said = str(error)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    return everyone


def main() -> None:
    folder, cells = Path(sys.argv[1]), sys.argv[2:]
    results: dict = {}
    with process_group() as device:
        for cell in cells:
            if cell == "errors":
                for fault, broken in broken_rewards().items():
                    config = config_of("3", folder / fault)
                    results[fault] = errors_of(config, broken, device)
            else:
                results[cell] = train_cell(config_of(cell, folder), device)
        if dist.get_rank() == 0:
            torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main()
