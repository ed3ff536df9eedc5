"""One rank of test_context_attention.py: trains on its slices and on whole batches, and says how far apart
they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_llama import random_sequences, tiny_llama
from torch.distributed.device_mesh import init_device_mesh
from transformers import MistralConfig, MistralForCausalLM

from multipack import PackedCollator, TokenDataset, context_slice
from multipack.integrations.attention import model_inputs
from multipack.integrations.context_attention import CONTEXT_ATTENTION, context_inputs
from multipack.train.process import leave_process_group


def batches(static: bool):
    """Packed rows of 3 to 40 sequences, some of which are longer than a slice of a quarter."""
    generator = torch.Generator().manual_seed(1)
    for count in (3, 8, 21, 40):
        lengths = torch.randint(1, 25, (count,), generator=generator).tolist()
        lengths[count // 2] = 150
        rows = [{"input_ids": ids, "labels": labels} for ids, labels in random_sequences(lengths, count)]
        dataset = TokenDataset(rows)
        options = (
            {
                "capacity": 1024,
                "pad_to": "capacity",
                "static": True,
                "max_sequences_per_bin": 48,
            }
            if static
            else {"pad_to": 8}
        )
        yield PackedCollator(**options)(dataset.__getitems__(range(count)))


def loss_and_gradients(model, logits, labels, group):
    """The sum of losses, and its gradients, both summed over the group."""
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    model.zero_grad()
    loss.backward()
    found = [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    for tensor in found if group is not None else ():
        dist.all_reduce(tensor, group=group)
    return found


def model_of(kind, attention):
    """A tiny Llama, or a tiny Mistral whose window is shorter than the longest sequences."""
    if kind == "llama":
        return tiny_llama(attention=attention)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=40,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MistralForCausalLM._from_config(config, attn_implementation=attention)


def compare(kind, batch, mesh):
    """The largest gradient of the mean loss of the whole batch, and the largest difference of loss and
    gradients of slices."""
    targets = batch["num_target_tokens"]
    shifted = torch.cat((batch["labels"][:, 1:], torch.full((1, 1), -100)), 1)
    model = model_of(kind, "multipack")
    whole = loss_and_gradients(model, model(**model_inputs(batch)).logits, shifted, None)
    group = mesh["cp"].get_group()
    part = context_slice(batch, mesh["cp"].get_local_rank(), mesh["cp"].size(), layout="contiguous")
    model = model_of(kind, CONTEXT_ATTENTION)
    sliced = loss_and_gradients(
        model, model(**context_inputs(part, group)).logits, part["shift_labels"], group
    )
    largest = max(float(gradient.abs().max()) for gradient in whole[1:]) / targets
    return largest, max(float((a - b).abs().max()) for a, b in zip(whole, sliced, strict=True)) / targets


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    answer: dict[str, list] = {}
    for cp_size in (2, 4):
        mesh = init_device_mesh("cpu", (4 // cp_size, cp_size), mesh_dim_names=("dp", "cp"))
        for kind in ("llama", "mistral"):
            found = [compare(kind, batch, mesh) for static in (False, True) for batch in batches(static)]
            answer[f"{kind} cp {cp_size}"] = found
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(answer))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
