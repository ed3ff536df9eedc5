"""The full fine-tune of the history, with a small model and data of its own in the place of the large
ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from multipack.train import sft
from multipack.train.data.builtin import byte_tokenizer

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "tinyllama_fft.yml"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Matrices of 4096 numbers and more, so that bitsandbytes keeps their state in 8 bits."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "llama")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(tmp_path / "llama")
    rows = [{"instruction": f"Say {i}.", "input": "", "output": f"{i} " * (i % 30)} for i in range(200)]
    (tmp_path / "alpaca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {
        "base_model": tmp_path / "llama",
        "tokenizer_type": "AutoTokenizer",
        "special_tokens": "{}",
        "data": tmp_path / "alpaca.jsonl",
        "dataset_prepared_path": tmp_path / "prepared",
        "val_set_size": 20,
        "sequence_len": 512,
        "micro_batch_size": 2,
        "warmup_steps": 1,
        "max_steps": 4,
        "save_steps": 2,
        "eval_steps": 0.5,
    }
    return ["--config", str(CONFIG), *(f"--{key}={value}" for key, value in small.items())]


def losses(folder: Path, kind: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == kind}


def test_the_full_fine_tune_trains_and_goes_on_from_its_8_bit_state(
    arguments: list[str], tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    sft.main([*arguments, f"--output_dir={whole}"])
    assert list(losses(whole, "train")) == [1, 2, 3, 4]
    assert list(losses(whole, "eval")) == [2, 4]  # 0.5 of the run
    assert losses(whole, "eval")[4] < losses(whole, "eval")[2]

    shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
    sft.main([*arguments, f"--output_dir={resumed}", "--resume_from_checkpoint=last"])
    assert losses(resumed, "train") == pytest.approx(
        {step: losses(whole, "train")[step] for step in (3, 4)}, abs=1e-4
    )
    assert losses(resumed, "eval")[4] == pytest.approx(losses(whole, "eval")[4], abs=1e-4)
