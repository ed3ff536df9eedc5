"""Leave the trained model as a folder that transformers and peft load by its path."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from multipack.train.engine import Engine


def export_model(engine: Engine, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the whole model (with an adapter: the adapter alone) and the tokenizer to `folder`, which is
    replaced. All ranks together."""
    parameters = engine.full_parameters()
    if dist.get_rank() == 0:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        module: Any = engine.module
        module.save_pretrained(partial, state_dict=parameters)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()
