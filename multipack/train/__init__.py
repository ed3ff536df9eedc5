"""The reference trainer: supervised fine-tuning and PPO on packed batches, from one rank to many.

`torchrun --nproc-per-node N -m multipack.train sft|ppo|prepare`. It needs the extra `train`; nothing outside
this package imports it.
"""
