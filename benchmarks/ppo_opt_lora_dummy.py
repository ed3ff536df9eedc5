"""PPO on OPT shapes with LoRA, random weights and random prompts: the benchmark of the PPO history (HISTORY
in docs/semantics_ppo.md).

    torchrun --standalone --nproc_per_node 8 -m benchmarks.ppo_opt_lora_dummy --num_collect_steps 1
        --use_kernels \\ --strategy colossalai_zero2 --experience_batch_size 64 --train_batch_size 8 --model
        1.3b

It takes the history's options with their documented meanings: `--experience_batch_size` counts all ranks,
`--train_batch_size` one rank. The history's own command says 32 there, which is refused: 64 experiences never
fill 8 x 32.

What is measured: generation and training samples a second over all ranks, TFLOPS a rank (2 operations a
weight and token forward, 4 + 2 for frozen and trained weights in training; attention's products are left
out), shares of time. `--compare` adds two ratios, measured on the same prompts and weights: every rank
generating everything (as the history did) against each its share, and padded against packed updates (the
padded rival too runs its output layer at action tokens only; both must give the same loss before they are
timed).

What is not the history's: one reward function (share of even tokens) in the place of a random reward model,
`--critic shared|separate` in the place of `--critic_model`, and bfloat16 by default on GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from transformers import OPTConfig

from benchmarks.ppo_comparisons import EitherWay, compare_generation, compare_updates
from benchmarks.record import record
from multipack.distributed import rank_and_world_size
from multipack.train.ppo.collect import collect
from multipack.train.ppo.config import PPOConfig
from multipack.train.ppo.experience import Experience, learn_from
from multipack.train.ppo.main import ppo_sizes
from multipack.train.ppo.model import build_actor_critic
from multipack.train.ppo.phases import Phases
from multipack.train.ppo.prompts import deal_prompts
from multipack.train.ppo.scoring import score
from multipack.train.ppo.sizes import PPOSizes
from multipack.train.ppo.tasks import Task
from multipack.train.ppo.trainer import PPOTrainer
from multipack.train.process import process_group
from multipack.train.sft import engine_options

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "ffn_dim": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1024,
    },
    "125m": {"hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "350m": {
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    },
    "700m": {"hidden_size": 1280, "ffn_dim": 5120, "num_hidden_layers": 36, "num_attention_heads": 20},
    "1.3b": {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32},
    "2.7b": {"hidden_size": 2560, "ffn_dim": 10240, "num_hidden_layers": 32, "num_attention_heads": 32},
    "6.7b": {"hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32, "num_attention_heads": 32},
}
STRATEGIES: dict[str, tuple[Literal[0, 1, 2, 3], bool]] = {
    "ddp": (0, False),
    "zero1": (1, False),
    "zero2": (2, False),
    "zero2_offload": (2, True),
    "zero3": (3, False),
    "zero3_offload": (3, True),
    # The history's spellings.
    "colossalai_zero2": (2, False),
    "colossalai_zero2_cpu": (2, True),
    "colossalai_gemini": (3, False),
}
PROMPT_QUANTILES = (14, 24, 29, 39, 62, 98, 117, 148, 206, 286, 835)
"""Tokens at 0, 10, ... 100 % of the 2,312 prompts of the harmless test set of HH-RLHF (gpt2-like tokenizer),
for varied prompts."""


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="ddp",
        help="what ranks share; colossalai_* as the history spells it",
    )
    parser.add_argument(
        "--num_episodes", type=int, default=3, help="iterations; the first warms up where there are several"
    )
    parser.add_argument(
        "--num_collect_steps", type=int, default=8, help="collect steps before each update phase"
    )
    parser.add_argument(
        "--num_update_steps", type=int, default=1, help="passes over the buffer in an update phase"
    )
    parser.add_argument(
        "--experience_batch_size", type=int, default=8, help="prompts of a collect step, all ranks together"
    )
    parser.add_argument(
        "--train_batch_size", type=int, default=8, help="sequences of an optimizer step, of one rank"
    )
    parser.add_argument("--lora_rank", type=int, default=4, help="0 trains all weights")
    parser.add_argument(
        "--use_kernels", action="store_true", help="the fused AdamW kernel; attention is fused in any case"
    )
    parser.add_argument("--critic", choices=("shared", "separate"), default="separate")
    parser.add_argument(
        "--prompt_tokens", type=int, default=256, help="tokens of a prompt; the longest one where they vary"
    )
    parser.add_argument("--varied_prompts", action="store_true", help="prompt lengths as HH-RLHF has them")
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument(
        "--micro_batch_tokens", type=int, default=4096, help="token slots of a rank's micro-batch"
    )
    parser.add_argument("--compare", action="store_true", help="add redundant generation and padded updates")
    return parser.parse_args(argv)


def config_of(arguments: argparse.Namespace, num_replicas: int, folder: str) -> PPOConfig:
    zero_stage, offload = STRATEGIES[arguments.strategy]
    lora: dict[str, Any] = (
        {"adapter": "lora", "lora_r": arguments.lora_rank, "lora_target_linear": True}
        if arguments.lora_rank
        else {}
    )
    return PPOConfig(
        rollout_batch_size=arguments.experience_batch_size,
        num_collect_steps=arguments.num_collect_steps,
        train_batch_size=arguments.train_batch_size * num_replicas,
        num_update_steps=arguments.num_update_steps,
        num_episodes=arguments.num_episodes,
        max_prompt_tokens=arguments.prompt_tokens,
        max_new_tokens=arguments.max_new_tokens,
        micro_batch_tokens=arguments.micro_batch_tokens,
        critic=arguments.critic,
        zero_stage=zero_stage,
        offload=offload,
        optimizer="adamw_torch_fused" if arguments.use_kernels else "adamw_torch",
        learning_rate=1e-5,
        output_dir=folder,
        **lora,
    )


def dummy_task(config: PPOConfig, vocabulary: int, varied: bool) -> Task:
    """Random prompts for one iteration; a response earns its share of even tokens. The end token is never
    likely."""
    rng = np.random.default_rng(0)
    num_prompts = config.rollout_batch_size * config.num_collect_steps
    lengths = np.full(num_prompts, config.max_prompt_tokens)
    if varied:
        drawn = np.interp(rng.random(num_prompts), np.linspace(0, 1, len(PROMPT_QUANTILES)), PROMPT_QUANTILES)
        lengths = np.clip(drawn.astype(np.int64), 1, config.max_prompt_tokens)
    prompts = [{"input_ids": rng.integers(4, vocabulary, length).tolist()} for length in lengths]

    def even_share(prompts: list[dict[str, Any]], responses: list[dict[str, Any]]) -> list[float]:
        return [float(np.mean(np.asarray(response["input_ids"]) % 2 == 0)) for response in responses]

    return Task(prompts, even_share, eos_token_id=2, pad_token_id=1)


def measure(
    arguments: argparse.Namespace, config: PPOConfig, sizes: PPOSizes, device: torch.device
) -> dict[str, dict[str, float]]:
    shape = OPTConfig(**SHAPES[arguments.model], max_position_embeddings=max(2048, config.longest_sequence))
    options = engine_options(config.supervised())
    model = build_actor_critic(config, shape, bf16=options.bf16)
    model.__class__ = EitherWay
    task = dummy_task(config, shape.vocab_size, arguments.varied_prompts)
    trainer = PPOTrainer(model, task, config, sizes, options, device)
    prompts = deal_prompts(
        sizes, len(task.prompts), num_episodes=config.num_episodes, seed=config.seed, rank=dist.get_rank()
    )
    for _ in range(config.num_episodes):
        metrics = trainer.run_iteration([next(prompts) for _ in range(config.num_collect_steps)])
        if dist.get_rank() == 0:
            print(f"iteration {trainer.iteration}: {metrics['seconds']:.1f} s", file=sys.stderr)
    results = {"run": averaged(trainer.history)}
    if arguments.compare:
        if sizes.num_replicas > 1:
            results["generation"] = compare_generation(trainer, task, sizes, config, rounds=3)
        results["update"] = compare_updates(
            trainer.engine, fresh_experience(trainer, task, sizes, config), config, model.hidden_size, 3
        )
    return results


def fresh_experience(trainer: PPOTrainer, task: Task, sizes: PPOSizes, config: PPOConfig) -> Experience:
    """One buffer, sampled and scored by the present weights."""
    prompts = deal_prompts(sizes, len(task.prompts), num_episodes=1, seed=config.seed, rank=dist.get_rank())
    rollouts = collect(trainer.engine, task, dict(enumerate(prompts)), config, Phases())
    scores = score(
        trainer.engine,
        rollouts,
        micro_batch_tokens=config.micro_batch_tokens,
        hidden_size=4096,
        num_workers=1,
    )
    return learn_from(
        rollouts, scores, kl_coef=config.kl_coef, discount=config.discount, gae_lambda=config.gae_lambda
    )


def averaged(history: list[dict[str, float]]) -> dict[str, float]:
    """Means over iterations, the first left out where there are several."""
    kept = history[1:] or history
    return {name: statistics.fmean(metrics[name] for metrics in kept) for name in kept[0]}


def record_results(arguments: argparse.Namespace, results: dict[str, dict[str, float]]) -> None:
    """Rates and shares of the run, and what was compared."""
    run = results["run"]
    table = f"PPO, OPT {arguments.model}, {arguments.strategy}"
    generated = run["num_rollouts"] / (run["generation_share"] * run["seconds"])
    for row, rate, tflops, share in (
        ("generation", generated, "generation_tflops", "generation_share"),
        ("training", run["trained_samples_per_s"], "train_tflops", "train_share"),
    ):
        record(table, row, "samples/s", rate)
        record(table, row, "TFLOPS a rank", run[tflops])
        record(table, row, "share of time", 100 * run[share], "%")
    other = run["scoring_share"] + run["reward_share"] + run["exchange_share"]
    record(table, "scoring, reward, exchange", "share of time", 100 * other, "%")
    record(table, "waiting for data", "share of time", 100 * run["wait_share"], "%")
    for name, ours, theirs in (("generation", "sharded", "redundant"), ("update", "packed", "padded")):
        if name in results:
            found, row = results[name], f"{name}: {ours} over {theirs}"
            spread = [found["lowest"], found[f"{ours}_over_{theirs}"], found["highest"]]
            record("PPO, compared", row, "ratio", spread, "x")
            record("PPO, compared", row, "ours, samples/s", found[f"{ours}_samples_per_s"])
            record("PPO, compared", row, "theirs, samples/s", found[f"{theirs}_samples_per_s"])
    if "update" in results:
        record("PPO, loss", "packed against padded", "difference", results["update"]["loss_difference"])


def main(argv: Sequence[str] | None = None) -> None:
    arguments = arguments_of(argv)
    num_replicas = rank_and_world_size()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(arguments, num_replicas, folder)
        try:
            sizes = ppo_sizes(config, num_replicas)
        except ValueError as error:
            raise SystemExit(f"ppo_opt_lora_dummy: {error}") from error
        with process_group() as device:
            results = measure(arguments, config, sizes, device)
            if dist.get_rank() == 0:
                record_results(arguments, results)


if __name__ == "__main__":
    main()
