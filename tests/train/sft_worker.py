"""Started by torchrun: several short runs one after the other in one group of ranks. argv: a JSON list of
command lines."""

from __future__ import annotations

import json
import sys

import torch

from multipack.train.config import load_config
from multipack.train.data.prepare import prepare_data
from multipack.train.process import process_group
from multipack.train.sft import engine_options, plan_run, train

if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group() as device:
        for arguments in json.loads(sys.argv[1]):
            config = load_config(arguments)
            with torch.random.fork_rng():
                train(plan_run(config, prepare_data(config), device), engine_options(config))
