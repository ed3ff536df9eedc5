"""Whole runs of supervised fine-tuning: exact steps, honest numbers, resume, validation, adapters, clear
refusals."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from helpers import SHARED
from safetensors.torch import load_file
from tiny_llama import sequence_losses
from train.ranks import environment, run_ranks, torchrun
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from multipack.train import sft
from multipack.train.checkpoint import save_checkpoint
from multipack.train.config import load_config
from multipack.train.data.builtin import byte_tokenizer
from multipack.train.data.prepare import prepare_data
from multipack.train.model import build_model, model_config
from multipack.train.process import process_group
from multipack.train.report import RunReport

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}


@pytest.fixture
def texts(tmp_path) -> Path:
    """400 rows of 5 to 60 bytes."""
    random = np.random.default_rng(0)
    path = tmp_path / "texts.jsonl"
    rows = ["".join(random.choice(list("abcdefgh "), random.integers(4, 60))) for _ in range(400)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


@pytest.fixture
def keys(texts, tmp_path) -> dict[str, object]:
    """A run of a second: 1 epoch, 64-token bins."""
    return {
        "data": texts,
        "dataset_prepared_path": tmp_path / "prepared",
        "output_dir": tmp_path / "out",
        "sequence_len": 64,
        "overrides_of_model_config": json.dumps(SHAPE),
        "lr_scheduler": "constant",
        "bf16": "false",
    }


def arguments(keys: dict[str, object], **more: object) -> list[str]:
    return [f"--{key}={value}" for key, value in (keys | more).items()]


def run(keys: dict[str, object], **more: object) -> list[dict]:
    """Train in this process; the lines of metrics.jsonl."""
    sft.main(arguments(keys, **more))
    return metrics(Path((keys | more)["output_dir"]))


def metrics(folder: Path, kind: str = "train") -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def row_ids(folder: Path) -> list[int]:
    lines = [line for path in (folder / "rows").iterdir() for line in path.read_text().splitlines()]
    return [row for line in lines for row in json.loads(line)["rows"]]


def test_an_epoch_has_the_planned_steps_and_every_row_once(keys, capsys):
    lines = run(keys, gradient_accumulation_steps=7, lr_scheduler="linear", warmup_steps=2, log_rows="true")
    # Bins of the epoch, seven a step, the last step with what is left; the learning rate reaches its end
    # exactly there.
    bins = round(sum(line["num_tokens"] / line["bin_fill"] for line in lines) / 64)
    steps = math.ceil(bins / 7)
    assert bins % 7
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    rates = [line["learning_rate"] for line in lines]
    assert rates[:3] == pytest.approx([0, 5e-4, 1e-3])
    assert rates[-1] == pytest.approx(1e-3 / (steps - 2))
    assert sorted(row_ids(Path(keys["output_dir"]))) == list(range(400))
    assert sum(line["num_sequences"] for line in lines) == 400
    assert lines[-1]["epoch"] == 1
    summary, places = capsys.readouterr().out.splitlines()[-2:]
    assert all(name in places for name in ("out/model", "out/metrics.jsonl", "out/run.png", "peak memory"))
    for figure in ("400 samples", "samples/s", "tokens/s", "padding 0.00%", "data wait", "bin fill"):
        assert figure in summary


@pytest.mark.distributed
def test_stopped_on_two_ranks_resumed_on_one_then_four_is_as_never_stopped(keys, tmp_path):
    whole = run(keys, output_dir=tmp_path / "whole", gradient_accumulation_steps=4, num_epochs=2)
    keys |= {"num_epochs": 2, "log_rows": "true"}
    out = Path(keys["output_dir"])
    module = ["-m", "multipack.train", "sft"]

    # Two ranks; one of them gets SIGTERM in the first epoch. Both save, say so and exit with 0.
    first = arguments(keys, zero_stage=2, gradient_accumulation_steps=2)
    process = subprocess.Popen(
        [*torchrun(2), *module, *first],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not (out / "metrics.jsonl").exists() or not metrics(out):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    worker = psutil.Process(process.pid).children()[0]
    os.kill(worker.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert "stopped by SIGTERM" in output
    stopped = metrics(out)[-1]["step"]
    assert 1 <= stopped < len(whole)

    # One rank goes on across the epoch's end, then four to the end of the second epoch.
    resumed = {"resume_from_checkpoint": "last", "max_steps": max(stopped, len(whole) // 2) + 5}
    run(keys, **resumed, zero_stage=1, gradient_accumulation_steps=4)
    last = arguments(keys, resume_from_checkpoint="last", zero_stage=3)
    run_ranks(4, *module, *last)
    lines = metrics(out)
    assert [line["step"] for line in lines] == [line["step"] for line in whole]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in whole], abs=1e-5)
    assert sorted(row_ids(out)) == sorted([*range(400), *range(400)])


def test_sigterm_saves_and_resuming_equals_never_stopping(keys, tmp_path, monkeypatch, capsys):
    # Dropout makes the random state count; AdamW's 8-bit state and the schedule have to come back as well.
    keys |= {
        "num_epochs": 1, "lr_scheduler": "cosine", "adapter": "lora", "lora_target_linear": "true", "lora_dropout": 0.2,
        "optimizer": "adamw_bnb_8bit", "gradient_accumulation_steps": 3,
    }  # fmt: skip
    whole = run(keys | {"output_dir": tmp_path / "whole"})
    step = RunReport.step

    def step_and_kill(report, line):
        step(report, line)
        if line.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunReport, "step", step_and_kill)
        stopped = run(keys)
    assert 4 <= len(stopped) < len(whole)
    assert "stopped by SIGTERM after step" in capsys.readouterr().out
    assert not (Path(keys["output_dir"]) / "model").exists()
    lines = run(keys, resume_from_checkpoint="last")
    for name in ("step", "loss", "learning_rate", "grad_norm", "num_target_tokens"):
        assert [line[name] for line in lines] == [line[name] for line in whole]


def test_validation_loss_is_the_mean_over_all_its_tokens(keys, tmp_path):
    run(keys, val_set_size=37, eval_steps=0.5, micro_batch_size=2)
    lines = metrics(Path(keys["output_dir"]), "eval")
    assert len(lines) == 2
    model = AutoModelForCausalLM.from_pretrained(
        Path(keys["output_dir"]) / "model", attn_implementation="eager"
    )
    rows = prepare_data(load_config(arguments(keys, val_set_size=37))).validation
    sequences = [(row["input_ids"].tolist(), row["labels"].tolist()) for row in rows]
    losses = torch.cat(list(sequence_losses(model, sequences)))
    assert lines[-1]["num_target_tokens"] == len(losses)
    assert lines[-1]["loss"] == pytest.approx(losses.mean().item(), abs=1e-5)


def small_stand_in(folder: Path, cls: type, config: type) -> Path:
    """A folder with a model of that class and the tokenizer of bytes."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    cls(config(vocab_size=len(byte_tokenizer()), num_key_value_heads=2, **shape)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "cls", "config", "left"),
    [
        ("mistral7b_qlora", MistralForCausalLM, MistralConfig, "adapter_model.safetensors"),
        ("tinyllama_fft", LlamaForCausalLM, LlamaConfig, "model.safetensors"),
    ],
)
def test_history_configurations_train_with_small_stand_ins(tmp_path, keys, name, cls, config, left):
    del keys["overrides_of_model_config"], keys["lr_scheduler"]
    path = Path(__file__).parents[2] / "examples" / "configs" / f"{name}.yml"
    stand_in = small_stand_in(tmp_path / "base", cls, config)
    keys |= {"config": path, "base_model": stand_in, "warmup_steps": 1, "max_steps": 3, "bf16": "true"}
    keys |= {"tokenizer_type": "AutoTokenizer", "special_tokens": "{}"}
    lines = run(keys, eval_steps=2, val_set_size=20, micro_batch_size=2)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 for line in lines)
    assert (Path(keys["output_dir"]) / "model" / left).exists()


@pytest.mark.distributed
def test_what_engines_and_options_make_of_a_run_is_the_same_run(keys, tmp_path):
    configs = Path(__file__).parents[2] / "examples" / "configs"
    keys |= {"max_steps": 4, "gradient_accumulation_steps": 2}
    lora = {"adapter": "lora", "lora_target_linear": "true"}
    cells = {
        "lora zero1": lora | {"zero_stage": 1},
        "lora zero3": lora | {"zero_stage": 3, "gradient_checkpointing": "true"},
        "lora deepspeed": lora | {"deepspeed": configs / "deepspeed" / "zero2.json"},
        "zero2 sorted": {"zero_stage": 2, "balance": "micro_step", "pad_to_sequence_len": "true"},
        "zero3 bf16": {"zero_stage": 3, "bf16": "true"},
        "deepspeed bf16": {"deepspeed": configs / "deepspeed" / "zero3.json", "bf16": "true"},
    }
    lines = [arguments(keys, output_dir=tmp_path / name, **more) for name, more in cells.items()]
    run_ranks(2, Path(__file__).with_name("sft_worker.py"), json.dumps(lines))
    found = {name: [line["loss"] for line in metrics(tmp_path / name)] for name in cells}

    # One process, the same four bins a step.
    keys |= {"gradient_accumulation_steps": 4}
    right = [line["loss"] for line in run(keys)]
    right_lora = [line["loss"] for line in run(keys | lora | {"output_dir": tmp_path / "lora"})]
    for name, losses in found.items():
        wanted, error = (right_lora if "lora" in name else right), (5e-3 if "bf16" in name else 2e-5)
        assert losses == pytest.approx(wanted, abs=error), name
    assert abs(right[-1] - right_lora[-1]) > 0.1
    assert {line["num_slots"] for line in metrics(tmp_path / "zero2 sorted")} == {2 * 2 * 64}
    for name in ("lora zero3", "lora deepspeed"):
        assert (tmp_path / name / "model" / "adapter_model.safetensors").exists()
    for name in ("zero3 bf16", "deepspeed bf16"):
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        assert exported.config.architectures == ["LlamaForCausalLM"]


def test_padded_batches_train_on_the_same_tokens(keys, tmp_path):
    packed_lines = run(keys)
    lines = run(keys, output_dir=tmp_path / "padded", sample_packing="false", micro_batch_size=4)
    for name in ("num_sequences", "num_tokens", "num_target_tokens"):
        assert sum(line[name] for line in lines) == sum(line[name] for line in packed_lines)
    slots = sum(line["num_slots"] for line in lines)
    assert 0.05 < 1 - sum(line["num_tokens"] for line in lines) / slots < 0.6


def test_all_rows_in_one_step_have_one_loss_and_one_gradient_however_they_are_batched(keys, tmp_path):
    # Alpaca rows: prompts have no label, so what counts differs from row to row and from micro-batch to
    # micro-batch.
    rows = [{"instruction": "ab" * (i % 5), "output": "cd" * (i % 7 + 1)} for i in range(24)]
    (tmp_path / "alpaca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys |= {
        "data": tmp_path / "alpaca.jsonl",
        "sequence_len": 256,
        "gradient_accumulation_steps": 99,
        "max_steps": 1,
    }
    (right,) = run(keys)
    config = load_config(arguments(keys))
    model = build_model(config, model_config(config, len(byte_tokenizer()), config.sequence_len), bf16=False)
    model.set_attn_implementation("eager")
    tokens = [(row["input_ids"].tolist(), row["labels"].tolist()) for row in prepare_data(config).train]
    loss = torch.cat(list(sequence_losses(model, tokens))).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert right["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert right["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for more in (
        {"micro_batch_size": 3, "pad_to_sequence_len": "true", "pack_method": "next_fit"},
        {
            "micro_batch_size": 3,
            "pad_to_sequence_len": "true",
            "max_sequences_per_bin": 4,
            "log_rows": "true",
        },
        {"sample_packing": "false", "micro_batch_size": 5},
        {"sample_packing": "false", "micro_batch_size": 1, "gradient_checkpointing": "true"},
    ):
        (line,) = run(keys, **more)
        assert line["num_target_tokens"] == right["num_target_tokens"]
        assert line["loss"] == pytest.approx(right["loss"], abs=1e-6)
        assert line["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)
        if "log_rows" in more:
            (logged,) = map(
                json.loads, (Path(keys["output_dir"]) / "rows" / "rank-0.jsonl").read_text().splitlines()
            )
            assert sorted(logged["rows"]) == list(range(len(rows)))


def test_the_exported_model_gives_the_loss_it_was_trained_to(keys):
    run(keys, max_steps=3, learning_rate=1e-2)
    model = AutoModelForCausalLM.from_pretrained(
        Path(keys["output_dir"]) / "model", attn_implementation="multipack"
    )
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.hidden_size == 32


REFUSALS = {
    "beyond": (
        {"resume_from_checkpoint": "last", "max_steps": 2},
        "at step 3, beyond max_steps 2: no step can be taken back",
    ),
    "no base model": ({"base_model": "empty", "tokenizer": "tokenizer"}, "base_model empty cannot be loaded"),
    "no tokenizer": ({"tokenizer": "empty"}, "the tokenizer empty cannot be loaded"),
    "warm-up": (
        {"warmup_steps": 3000, "lr_scheduler": "linear", "max_steps": "null"},
        "warmup_steps is 3000 but the run has",
    ),
    "no checkpoint": (
        {"resume_from_checkpoint": "last", "output_dir": "elsewhere"},
        "elsewhere has no checkpoint",
    ),
    "other data": (
        {"resume_from_checkpoint": "last", "seed": 9},
        "belongs to another order of the data: seed",
    ),
    "positions": ({}, r"the longest row has \d tokens but the small Llama has 5 positions"),
    "deepspeed file": ({"deepspeed": "missing.json"}, "missing.json cannot be read"),
    "unknown key": ({"sequence_length": 5}, "sequence_len"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The keys of a run of three steps that is done."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(60)))
    keys = {
        "data": folder / "texts.jsonl", "dataset_prepared_path": folder / "prepared", "output_dir": folder / "out",
        "sequence_len": 64, "overrides_of_model_config": json.dumps(SHAPE), "max_steps": 3, "lr_scheduler": "constant",
    }  # fmt: skip
    run(keys)
    return keys


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_trained_is_refused_before_the_model_is_loaded(name, finished, monkeypatch, tmp_path):
    more, message = REFUSALS[name]
    if name == "positions":
        more = more | {"overrides_of_model_config": json.dumps(SHAPE | {"max_position_embeddings": 5})}
    monkeypatch.setattr(sft, "build_model", lambda *_, **__: pytest.fail("the model was loaded"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(SystemExit, match=message):
        run(finished, **more)


def test_a_checkpoint_of_another_kind_of_run_is_refused(finished, tmp_path):
    with process_group():
        path = save_checkpoint(tmp_path, 3, {"model.weight": torch.zeros(2)}, {"iteration": 3}, keep=1)
    with pytest.raises(SystemExit, match="checkpoint-3 is of no supervised run"):
        run(finished, resume_from_checkpoint=path)


def test_a_run_killed_before_its_export_is_finished_by_resuming(finished, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(finished["output_dir"], out)
    right = load_file(out / "model" / "model.safetensors")
    shutil.rmtree(out / "model")
    lines = run(finished, output_dir=out, resume_from_checkpoint="last")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert "is at step 3 of 3: nothing is left to train, the model is exported" in capsys.readouterr().out
    exported = load_file(out / "model" / "model.safetensors")
    assert exported.keys() == right.keys()
    assert all(torch.equal(exported[name], right[name]) for name in right)
    assert (out / "checkpoint-3").exists()


def test_a_resumed_run_has_the_learning_rate_it_is_told(finished, tmp_path):
    lines = run(
        finished,
        output_dir=tmp_path,
        resume_from_checkpoint=finished["output_dir"] / "checkpoint-3",
        max_steps=5,
        learning_rate=1e-5,
    )
    assert [line["learning_rate"] for line in lines] == [1e-5, 1e-5]


def test_a_new_run_in_the_folder_of_a_longer_one_is_resumed_from_its_own_checkpoints(finished, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished["output_dir"], out)
    run(finished, output_dir=out, max_steps=2, save_total_limit=1)
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3.undone"]
    lines = run(finished, output_dir=out, resume_from_checkpoint="last")
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_validation_comes_at_the_end_of_a_run_that_ends_inside_an_epoch(finished, tmp_path):
    run(finished, output_dir=tmp_path, val_set_size=5, max_steps=2)
    assert [line["step"] for line in metrics(tmp_path, "eval")] == [2]


def test_a_damaged_checkpoint_is_refused_before_the_model_is_loaded(finished, monkeypatch):
    (file,) = (finished["output_dir"] / "checkpoint-3").glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    monkeypatch.setattr(sft, "build_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(
        SystemExit, match=r"is damaged: \d+ bytes instead of \d+. There is no other checkpoint"
    ):
        run(finished, resume_from_checkpoint="last", max_steps=6)
    file.write_bytes(content)


def test_a_loss_that_is_not_finite_ends_the_run(keys):
    with pytest.raises(FloatingPointError, match="resume from a checkpoint with a lower learning_rate"):
        run(keys, learning_rate=1e30, optimizer="sgd", max_grad_norm=0)


@pytest.mark.shared
def test_gsm8k_with_a_real_tokenizer_trains(tmp_path):
    rows = gzip.decompress((SHARED / "data/text/gsm8k_train.jsonl.gz").read_bytes()).splitlines()[:300]
    (tmp_path / "gsm8k.jsonl.gz").write_bytes(gzip.compress(b"\n".join(rows) + b"\n"))
    keys = {
        "data": tmp_path / "gsm8k.jsonl.gz", "tokenizer": SHARED / "data/tokenizers/smollm2", "output_dir": tmp_path / "out",
        "dataset_prepared_path": tmp_path / "prepared", "overrides_of_model_config": json.dumps(SHAPE),
    }  # fmt: skip
    losses = [line["loss"] for line in run(keys, max_steps=6, learning_rate=1e-2)]
    assert losses[0] == pytest.approx(math.log(49152), abs=0.5)
    assert losses[-1] < losses[0] - 0.3


def test_prepare_is_reported_by_one_rank(keys, monkeypatch, capsys):
    said = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        sft.main(arguments(keys, prepare_only="true"))
        said.append(capsys.readouterr().out)
    assert "training 400 rows" in said[0]
    assert said[1] == ""
    assert not Path(keys["output_dir"]).exists()
