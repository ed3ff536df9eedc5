"""`python -m multipack.train sft|ppo|prepare [--config FILE.yml] [--key value]`, alone or under torchrun."""

from __future__ import annotations

import sys

_USAGE = """usage: torchrun --nproc-per-node N -m multipack.train COMMAND [--config FILE.yml] [--key value ...]
       python -m multipack.train COMMAND ...    (one process)

  sft      supervised fine-tuning on packed batches; without arguments on data made from the installed Python's library
  ppo      reinforcement learning from a reward function or model
  prepare  tokenise the data of an sft run into its cache, and stop

COMMAND --help lists the keys."""


def main(argv: list[str]) -> None:
    """Run one command; each imports only what it needs."""
    command, arguments = (argv or [""])[0], argv[1:]
    if command == "sft":
        from multipack.train import sft

        sft.main(arguments)
    elif command == "prepare":
        from multipack.train import sft

        sft.main([*arguments, "--prepare_only", "true"])
    elif command == "ppo":
        from multipack.train.ppo import main as ppo

        ppo.main(arguments)
    elif command in ("-h", "--help"):
        print(_USAGE)
    else:
        problem = f"{command} is not a command" if command else "a command is missing"
        raise SystemExit(f"multipack.train: {problem}; choose sft, ppo or prepare.\n{_USAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])
