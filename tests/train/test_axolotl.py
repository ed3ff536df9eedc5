"""Files of axolotl: what means the same is taken, what changes nothing is named, the rest is refused at
once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from multipack.train.config import TrainConfig, load_config, warmup_of

PLAIN: dict[str, Any] = {
    "base_model": "m",
    "datasets": [{"path": "rows.jsonl", "type": "alpaca"}],
    "sequence_len": 2048,
    "micro_batch_size": 2,
    "learning_rate": 2e-4,
    "attn_implementation": "flash_attention_2",
    "output_dir": "out",
}
"""A file that axolotl would take; `attn_implementation` tells it from one of ours."""


def read(folder: Path, **more: Any) -> TrainConfig:
    path = folder / "axolotl.yml"
    path.write_text(yaml.safe_dump(PLAIN | more), encoding="utf-8")
    return load_config(["--config", str(path)])


def test_what_the_file_leaves_out_means_what_it_means_in_axolotl(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.sample_packing is False
    assert config.overlong == "drop"
    assert config.optimizer == "adamw_torch_fused"
    assert (config.lr_scheduler, config.warmup_steps) == ("cosine", 0.03)
    assert (config.num_epochs, config.gradient_accumulation_steps, config.val_set_size) == (1, 1, 0)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (
            {"sample_packing": True, "pad_to_sequence_len": True},
            {"sample_packing": True, "pad_to_sequence_len": True},
        ),
        ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
        ({"warmup_steps": 20}, {"warmup_steps": 20}),
        ({"lr_scheduler": "constant", "warmup_ratio": 0.1}, {"lr_scheduler": "constant", "warmup_steps": 0}),
        # A checkpoint an epoch of four epochs: after each quarter of the run, as axolotl computes it.
        ({"num_epochs": 4, "saves_per_epoch": 1}, {"save_steps": 0.25}),
        ({"num_epochs": 2, "saves_per_epoch": 5}, {"save_steps": 0.1}),
        ({"num_epochs": 1, "saves_per_epoch": 1}, {"save_steps": None}),
        ({"num_epochs": 4}, {"save_steps": 0.25}),
        ({"val_set_size": 0.05, "evals_per_epoch": 4}, {"eval_steps": 0.25, "val_set_size": 0.05}),
        ({"val_set_size": 0.05, "evals_per_epoch": 1}, {"eval_steps": None}),
        ({"evals_per_epoch": 4}, {"eval_steps": None, "val_set_size": 0}),
        ({"optimizer": "adamw_8bit"}, {"optimizer": "adamw_bnb_8bit"}),
        ({"optimizer": "paged_adamw_8bit"}, {"optimizer": "adamw_bnb_8bit"}),
        ({"optimizer": "paged_adamw_32bit"}, {"optimizer": "adamw_torch"}),
        ({"learning_rate": "2e-5"}, {"learning_rate": 2e-5}),
        ({"batch_size": 8}, {"micro_batch_size": 2, "gradient_accumulation_steps": 4}),
        ({"excess_length_strategy": "truncate"}, {"overlong": "truncate"}),
        ({"excess_length_strategy": "raise"}, {"overlong": "error"}),
        ({"datasets": [{"path": "t.jsonl", "type": "completion"}]}, {"overlong": "split"}),
        ({"gradient_checkpointing": "offload"}, {"gradient_checkpointing": True}),
        ({"bfloat16": True}, {"bf16": True}),
        (
            {"special_tokens": {"pad_token": "<p>", "unk_token": None}},
            {"special_tokens": {"pad_token": "<p>"}},
        ),
        ({"tokens": {"eos_token": "</s>"}}, {"special_tokens": {"eos_token": "</s>"}}),
        ({"tokenizer_config": "t"}, {"tokenizer": "t"}),
        ({"model_config": {"rope_theta": 5.0}}, {"overrides_of_model_config": {"rope_theta": 5.0}}),
        ({"lora_r": 32, "lora_target_linear": True}, {"adapter": None, "lora_target_linear": False}),
        (
            {"adapter": "lora", "lora_target_linear": True, "lora_target_modules": ["q_proj"]},
            {"adapter": "lora", "lora_target_linear": True, "lora_target_modules": None},
        ),
        ({"fsdp": ["full_shard", "auto_wrap"]}, {"zero_stage": 3, "offload": False}),
        (
            {"fsdp_config": {"offload_params": True, "reshard_after_forward": False}},
            {"zero_stage": 2, "offload": True},
        ),
        ({"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, {"zero_stage": 0}),
        ({"fsdp": ["full_shard"], "optimizer": "adamw_bnb_8bit"}, {"zero_stage": 1}),
        (
            {"fsdp": ["full_shard"], "adapter": "qlora", "load_in_4bit": True, "lora_target_linear": True},
            {"zero_stage": 1, "adapter": "qlora"},
        ),
        (
            {"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"},
            {"zero_stage": 3, "offload": True, "deepspeed": None},
        ),
        ({"overlong": "split"}, {"overlong": "split"}),  # a key of ours counts as it stands
        ({"chat_template": "tokenizer_default", "eot_tokens": ["<|im_end|>"]}, {}),
        ({"auto_resume_from_checkpoints": True}, {"resume_from_checkpoint": None}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_means_the_same_is_taken(tmp_path: Path, given: dict[str, Any], taken: dict[str, Any]) -> None:
    config = read(tmp_path, **given)
    assert {key: getattr(config, key) for key in taken} == taken


def test_names_of_columns_and_templates_are_taken(tmp_path: Path) -> None:
    source = {
        "path": "a",
        "type": "chat_template",
        "field_messages": "conversations",
        "message_property_mappings": {"role": "from", "content": "content"},
        "message_field_content": "value",
        "roles_to_train": ["assistant"],
        "train_on_eos": "turn",
    }
    config = read(tmp_path, datasets=[source], chat_template="chatml")
    (taken,) = config.sources
    assert (taken.type, taken.field_messages) == ("chat_template", "conversations")
    assert taken.fields == {"role": "from", "content": "value"}
    assert "<|im_start|>" in str(config.chat_template)
    given = read(tmp_path, datasets=[source], chat_template="jinja", chat_template_jinja="{{ messages }}")
    assert given.chat_template == "{{ messages }}"
    assert (
        read(tmp_path, datasets=[source], chat_template="gemma3").chat_template is None
    )  # the tokenizer's own


def test_resuming_by_itself_takes_the_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-7").mkdir(parents=True)
    more = {"auto_resume_from_checkpoints": True, "output_dir": str(tmp_path / "out")}
    assert read(tmp_path, **more).resume_from_checkpoint == "last"


def test_what_changes_nothing_is_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plugins = [
        "axolotl.integrations.liger.LigerPlugin",
        "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin",
    ]
    with caplog.at_level(logging.INFO, "multipack.train.axolotl"):
        read(
            tmp_path,
            wandb_project="p",
            liger_rope=True,
            eval_sample_packing=True,
            plugins=plugins,
            strict=False,
        )
    (record,) = caplog.records
    said = record.getMessage()
    assert "axolotl.yml is read as a file of axolotl" in said
    assert "\n" not in said
    for key in ("attn_implementation", "wandb_project", "liger_rope", "eval_sample_packing", "LigerPlugin"):
        assert f"{key} (" in said
    assert "strict" not in said  # off is what is true here


def test_a_refusal_names_all_its_keys_at_once(tmp_path: Path) -> None:
    asked = {
        "relora": True,
        "qat": {"weight_dtype": "int4"},
        "optimizer": "muon",
        "plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"],
        "datasets": [{"path": "a", "type": "alpaca:chat", "shards": 5}],
        "fp16": True,
        "special_tokens": {"additional_special_tokens": ["<x>"]},
        "curriculum_samplin": True,
    }
    with pytest.raises(ValueError, match="is a file of axolotl, and 9 of its keys") as caught:
        read(tmp_path, **asked)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 9
    named = [line.strip().partition(": ")[0] for line in lines]
    assert sorted(named) == sorted(
        [
            *("relora", "qat", "optimizer", "plugins", "datasets[0].type", "datasets[0].shards"),
            *("fp16", "special_tokens", "curriculum_samplin"),
        ]
    )
    assert all(line.partition(": ")[2] for line in lines)  # each with its remedy


def test_a_file_of_ours_is_not_translated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ours.yml"
    path.write_text("base_model: m\nsequence_len: 512\n", encoding="utf-8")
    with caplog.at_level(logging.INFO, "multipack.train.axolotl"):
        config = load_config(["--config", str(path)])
    assert config.sample_packing is True
    assert not caplog.records


def test_the_command_line_goes_over_the_translated_file(tmp_path: Path) -> None:
    read(tmp_path, warmup_ratio=0.1)
    config = load_config(["--config", str(tmp_path / "axolotl.yml"), "--warmup_steps=7", "--data=mine.jsonl"])
    assert config.warmup_steps == 7
    assert [source.path for source in config.sources] == ["mine.jsonl"]


def test_a_share_of_the_warm_up_becomes_steps() -> None:
    assert warmup_of(0.1, 101) == 10
    assert warmup_of(0.03, 20) == 0
    assert warmup_of(20, 101) == 20
