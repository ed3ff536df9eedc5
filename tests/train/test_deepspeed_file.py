"""A DeepSpeed file agrees with the run or is refused; nothing it says is overruled in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multipack.train import engine_deepspeed
from multipack.train.engine_deepspeed import read_deepspeed_file

SHIPPED = Path(__file__).parents[2] / "examples" / "configs" / "deepspeed"
RUN = {"micro_batch_size": 16, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "bf16": True}


@pytest.mark.parametrize(
    ("name", "stage", "offloads"),
    [("zero1", 1, False), ("zero2", 2, False), ("zero2_offload", 2, True), ("zero3", 3, False)],
)
def test_the_shipped_files_fit_any_run(name, stage, offloads):
    zero = read_deepspeed_file(str(SHIPPED / f"{name}.json"), **RUN)["zero_optimization"]
    assert (zero["stage"], "offload_optimizer" in zero) == (stage, offloads)
    assert "auto" not in zero.values()


FILES = {
    "micro batch": (
        {"train_micro_batch_size_per_gpu": 2},
        "train_micro_batch_size_per_gpu: 2, the run says 16",
    ),
    "accumulation": ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: 4, the run says 2"),
    "clipping": ({"gradient_clipping": 0.5}, "gradient_clipping: 0.5, the run says 1.0"),
    "precision": ({"bf16": {"enabled": False}}, "bf16.enabled: False, the run says True"),
    "fp16": ({"fp16": {"enabled": True}}, "fp16.enabled: True, the run says False"),
    "optimizer": ({"optimizer": {"type": "AdamW"}}, "sets optimizer, which the run sets itself"),
    "global size": ({"train_batch_size": 8}, "sets train_batch_size, which the run sets itself"),
    "stage 0": ({"zero_optimization": {"stage": 0}}, "stage 0; it is 1, 2 or 3"),
    "no stage": ({"zero_optimization": {}}, "stage 0; it is 1, 2 or 3"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.report("deepspeedai/DeepSpeed#6914")
def test_a_file_that_contradicts_the_run_is_refused(tmp_path, name):
    wrong, message = FILES[name]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}} | wrong))
    with pytest.raises(ValueError, match=message):
        read_deepspeed_file(str(path), **RUN)


def test_numbers_that_agree_are_taken(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 16, "gradient_clipping": 1}
        )
    )
    assert read_deepspeed_file(str(path), **RUN) == {"zero_optimization": {"stage": 2}}


def test_a_file_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "ds.json").write_text("{\n  stage: 1}")
    with pytest.raises(ValueError, match=r"ds\.json is no JSON, line 2"):
        read_deepspeed_file(str(tmp_path / "ds.json"), **RUN)


def test_without_deepspeed_installed_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(engine_deepspeed, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"Install multipack\[train,deepspeed\]"):
        read_deepspeed_file("zero1.json", **RUN)
