"""Keys, their bounds, and the two ways to give them."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from multipack.train.config import DatasetConfig, TrainConfig, every_steps, load_config

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


def write(folder: Path, text: str) -> str:
    path = folder / "run.yml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_defaults_are_a_valid_run_on_builtin_data() -> None:
    config = load_config([])
    assert config == TrainConfig()
    assert config.sources == [DatasetConfig(path="builtin")]


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        TrainConfig().seed = 1  # type: ignore[misc]


def test_command_line_goes_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "learning_rate: 2e-4\nsequence_len: 4096\neval_steps: 0.2\nval_set_size: 0.01\n")
    config = load_config(["--sequence_len", "512", "--config", path, "--val-set-size=100"])
    assert (config.learning_rate, config.sequence_len, config.eval_steps, config.val_set_size) == (
        2e-4,
        512,
        0.2,
        100,
    )


def test_a_switch_without_value_is_on() -> None:
    config = load_config(["--prepare-only", "--bf16", "--num-workers", "2", "--pad_to_sequence_len"])
    assert config.prepare_only is True
    assert config.bf16 is True
    assert config.num_workers == 2
    assert config.pad_to_sequence_len is True
    assert load_config(["--bf16", "auto"]).bf16 == "auto"


def test_empty_keys_of_a_file_mean_their_defaults(tmp_path: Path) -> None:
    assert (
        load_config(["--config", write(tmp_path, "warmup_steps:\nlora_target_modules:\n")]) == TrainConfig()
    )
    assert load_config(["--config", write(tmp_path, "")]) == TrainConfig()


def test_data_is_short_for_one_source() -> None:
    assert load_config(["--data", "x.jsonl"]).sources == [DatasetConfig(path="x.jsonl", type="auto")]
    given = load_config(["--datasets", '[{"path": "a", "type": "alpaca"}, {"path": "b"}]'])
    assert given.sources == [DatasetConfig(path="a", type="alpaca"), DatasetConfig(path="b")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "sequence_length: 5",
            "sequence_length in .*run.yml is not a key of TrainConfig. Did you mean sequence_len?",
        ),
        ("zzzzzzzz: 5", "zzzzzzzz in .*run.yml is not a key of TrainConfig. --help lists the keys."),
        (
            "datasets: [{path: a, typ: alpaca}]",
            r"datasets\[0\].typ is not a key of DatasetConfig. Did you mean type?",
        ),
        ("sequence_len: long", r'"sequence_len"[\s\S]*long'),
        ("optimizer: adafactor", r'"optimizer"[\s\S]*adamw_bnb_8bit'),
        ("datasets: [{path: a, type: pygmalion}]", r"datasets[\s\S]*pygmalion"),
        ("[1, 2]", "holds a list; it must be lines of `key: value`"),
        ("a: b: c", "is not YAML"),
    ],
)
def test_a_file_with_a_wrong_key_or_value_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(["--config", write(tmp_path, text)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lerning_rate", "3"], "--lerning_rate is not a key of TrainConfig. Did you mean learning_rate?"),
        (["--learning", "3"], "--learning is not a key"),  # no abbreviations
        (["--wandb_project", "x"], "--wandb_project is a key of axolotl .*metrics.jsonl"),
        (["--qat=true"], "--qat is a key of axolotl .*quantise afterwards"),
        (["stray"], "stray"),
        (["--config"], "--config FILE.yml"),
        (["--config", "absent.yml"], "absent.yml cannot be read: No such file"),
        (["--config", "a.yml", "--config", "b.yml"], "2 --config files"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(arguments)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sequence_len": 0}, "sequence_len is 0; it must be at least 1"),
    ({"micro_batch_size": 0}, "micro_batch_size is 0"),
    ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps is -1"),
    ({"num_epochs": 0}, "num_epochs is 0"),
    ({"max_steps": 0}, "max_steps is 0"),
    ({"num_workers": -1}, "num_workers is -1"),
    ({"max_sequences_per_bin": 0}, "max_sequences_per_bin is 0; it must be at least 1"),
    (
        {"sample_packing": False, "max_sequences_per_bin": 4},
        "max_sequences_per_bin is 4 but sample_packing is false",
    ),
    ({"prefetch_batches": 0}, "prefetch_batches is 0; .* num_workers 0"),
    ({"learning_rate": 0.0}, "learning_rate is 0"),
    ({"learning_rate": float("nan")}, "learning_rate is nan"),
    ({"learning_rate": float("inf")}, "learning_rate is inf"),
    ({"weight_decay": -0.1}, "weight_decay is -0.1"),
    ({"adam_beta2": 1.0}, "adam_beta2 is 1.0; it must be at least 0 and below 1"),
    ({"lora_dropout": 1.5}, "lora_dropout is 1.5"),
    ({"val_set_size": 1.5}, "val_set_size is 1.5"),
    ({"val_set_size": -1}, "val_set_size is -1"),
    ({"eval_steps": 0.2}, "eval_steps is 0.2 but val_set_size is 0"),
    ({"eval_steps": 1.5, "val_set_size": 10}, "eval_steps is 1.5"),
    ({"save_steps": 0}, "save_steps is 0"),
    ({"output_dir": ""}, "output_dir is empty"),
    ({"special_tokens": {"bos": "<s>"}}, "special_tokens has bos; .* bos_token"),
    ({"data": "x", "datasets": [DatasetConfig(path="y")]}, r"data \(x\) and datasets"),
    (
        {"sample_packing": False, "pad_to_sequence_len": True},
        "pad_to_sequence_len is True but sample_packing is false",
    ),
    ({"sample_packing": False, "balance": "step"}, "balance is step but sample_packing is false"),
    ({"lr_scheduler": "constant", "warmup_steps": 3}, "Use constant_with_warmup"),
    ({"warmup_steps": 30, "max_steps": 20}, r"warmup_steps \(30\) is above max_steps \(20\)"),
    ({"deepspeed": "z.json", "zero_stage": 2}, "deepspeed .z.json. and zero_stage 2"),
    ({"optimizer": "adamw_bnb_8bit", "zero_stage": 2}, "optimizer adamw_bnb_8bit with zero_stage 2"),
    ({"offload": True, "zero_stage": 1}, "offload is true with zero_stage 1"),
    ({"ddp_timeout": 0}, "ddp_timeout is 0; give the seconds"),
    ({"load_in_4bit": True}, "none is set. Set adapter"),
    ({"adapter": "lora"}, "which layers are adapted"),
    (
        {"adapter": "lora", "lora_target_linear": True, "lora_target_modules": ["q_proj"]},
        "which layers are adapted",
    ),
    ({"warmup_steps": 1.5}, "warmup_steps is 1.5; give a share"),
    ({"unfrozen_parameters": ["a("]}, "no regular expression"),
    ({"unfrozen_parameters": ["^lm_head.weight$[:32]"]}, "part of a parameter"),
    (
        {"unfrozen_parameters": ["a"], "adapter": "lora", "lora_target_linear": True},
        "Set lora_modules_to_save",
    ),
    ({"optimizer": "adamw_torch_4bit", "zero_stage": 3}, "optimizer adamw_torch_4bit with zero_stage 3"),
    (
        {"adapter": "lora", "lora_target_linear": True, "load_in_8bit": True, "zero_stage": 2},
        "load_in_8bit with zero_stage 2",
    ),
    ({"adapter": "qlora", "lora_target_linear": True}, "qlora means 4-bit"),
    ({"adapter": "lora", "lora_target_linear": True, "load_in_4bit": True}, "qlora means 4-bit"),
    ({"adapter": "lora", "lora_target_linear": True, "lora_r": 0}, "lora_r is 0"),
    (
        {"adapter": "qlora", "lora_target_linear": True, "load_in_4bit": True, "zero_stage": 3},
        "adapter qlora with zero_stage 3",
    ),
]


@pytest.mark.parametrize(
    ("values", "message"), REFUSED, ids=lambda value: str(value)[:60] if isinstance(value, dict) else ""
)
def test_a_value_out_of_bounds_or_against_another_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)


def test_a_source_without_path_is_refused() -> None:
    with pytest.raises(ValueError, match="datasets: path is empty"):
        DatasetConfig(path="")


def test_a_share_of_the_run_becomes_steps() -> None:
    assert every_steps(0.2, 101) == 20
    assert every_steps(0.001, 101) == 1
    assert every_steps(20, 101) == 20
    assert isinstance(every_steps(20.0, 101), int)


def test_full_fine_tune_of_the_history() -> None:
    config = load_config(["--config", str(CONFIGS / "tinyllama_fft.yml")])
    expected: dict[str, Any] = {
        "model_type": "LlamaForCausalLM",
        "tokenizer_type": "LlamaTokenizer",
        "dataset_prepared_path": "last_run_prepared",
        "val_set_size": 0.01,
        "sequence_len": 4096,
        "sample_packing": True,
        "pad_to_sequence_len": True,
        "gradient_accumulation_steps": 1,
        "micro_batch_size": 16,
        "num_epochs": 1,
        "optimizer": "adamw_bnb_8bit",
        "lr_scheduler": "cosine",
        "learning_rate": 0.0002,
        "warmup_steps": 100,
        "weight_decay": 0.1,
        "train_on_inputs": False,
        "bf16": True,
        "tf32": False,
        "gradient_checkpointing": True,
        "eval_steps": 0.2,
        "logging_steps": 1,
        "special_tokens": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    }
    assert {key: getattr(config, key) for key in expected} == expected
    assert re.search("TinyLlama.*1.1B", str(config.base_model))
    assert [source.type for source in config.sources] == ["alpaca"]


def test_qlora_of_the_history() -> None:
    config = load_config(["--config", str(CONFIGS / "mistral7b_qlora.yml")])
    expected: dict[str, Any] = {
        "model_type": "MistralForCausalLM",
        "load_in_4bit": True,
        "sequence_len": 32768,
        "sample_packing": True,
        "pad_to_sequence_len": True,
        "adapter": "qlora",
        "lora_r": 32,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "lora_target_linear": True,
        "lora_target_modules": None,
        "gradient_accumulation_steps": 1,
        "micro_batch_size": 1,
        "num_epochs": 1,
        "optimizer": "adamw_bnb_8bit",
        "lr_scheduler": "cosine",
        "learning_rate": 0.0002,
        "bf16": True,
        "gradient_checkpointing": True,
        "warmup_steps": 10,
        "eval_steps": 20,
        "weight_decay": 0.0,
    }
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize("name", ["tinyllama_fft", "mistral7b_qlora"])
def test_history_configurations_take_local_models_and_data(name: str) -> None:
    config = load_config(
        [
            "--config",
            str(CONFIGS / f"{name}.yml"),
            "--base_model",
            "small",
            "--datasets",
            '[{"path": "rows.jsonl"}]',
        ]
    )
    assert config.base_model == "small"
    short = load_config(["--config", str(CONFIGS / f"{name}.yml"), "--data", "rows.jsonl"])
    assert short.sources == [DatasetConfig(path="rows.jsonl")]
    assert config.sources == [DatasetConfig(path="rows.jsonl")]


def test_help_has_a_sentence_for_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Capacity of a bin and longest row, in tokens." in text
    assert "Steps between two validations" in text


def test_a_list_on_the_command_line_replaces_the_one_of_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "datasets: [{path: a, type: alpaca}, {path: b}]\nspecial_tokens: {bos_token: <s>, eos_token: </s>}\n",
    )
    assert load_config(["--config", path, "--datasets", '[{"path": "c"}]']).sources == [
        DatasetConfig(path="c")
    ]
    named = load_config(["--config", path, "--special_tokens.bos_token", "<b>"])
    assert named.special_tokens == {"bos_token": "<b>", "eos_token": "</s>"}


def test_the_documentation_names_every_key() -> None:
    text = (CONFIGS.parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    table = text[text.index("| group | keys |") : text.index("**Sizes.**")]
    named = set(
        re.findall(r"[a-z_0-9]+", " ".join(row.split("|")[2] for row in table.splitlines()[2:] if "|" in row))
    )
    assert named == {field.name for field in fields(TrainConfig)}
