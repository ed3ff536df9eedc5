"""Every causal family of the installed transformers: packed right, or refused by name; none silently
wrong."""

from __future__ import annotations

import collections
import logging

import pytest
import torch
import transformers
from tiny_families import FAMILIES, build, variants

from multipack import PackedCollator
from multipack.integrations.attention import model_inputs
from multipack.integrations.verify import verify_packing

LENGTHS = (
    7,
    19,
    5,
)  # the middle one is longer than every window (6), chunk (4, 6) and number of kept keys (4)


def fate(family, arguments):
    """("right" | "refused" | "wrong" | "not built", what is known of it)."""
    try:
        stock = build(family, arguments, "eager")
        generator = torch.Generator().manual_seed(1)
        sequences = [torch.randint(3, 64, (length,), generator=generator) for length in LENGTHS]
        alone = torch.cat([stock(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences])
    except Exception as error:  # noqa: BLE001 - whatever a configuration of ours lacks; what was built is counted
        return "not built", f"{type(error).__name__}: {error}"
    try:
        model = build(family, arguments, "multipack")
    except KeyError as error:
        return "refused", repr(error)  # attention classes by name of the implementation
    try:
        verify_packing(model)
    except ValueError as error:
        named = type(model).__name__ in str(error)
        return ("refused" if named else "wrong"), str(error)
    packed = PackedCollator()([{"input_ids": ids} for ids in sequences])
    together = model(**model_inputs(packed)).logits[0]
    off = float((together - alone).abs().max() / alone.abs().max().clamp_min(1))
    return ("right" if off < 1e-4 else "wrong"), f"off by {off:.2g}"


@pytest.mark.filterwarnings("ignore")  # of configurations of no use but this
def test_packed_logits_of_all_families_equal_stock_logits_or_are_refused():
    transformers.logging.set_verbosity_error()
    fates = {}
    with torch.no_grad():
        for family in FAMILIES:
            try:
                named = list(variants(family))
            except Exception as error:  # noqa: BLE001 - as above: families whose configuration needs arguments
                fates[family] = ("not built", str(error))
                continue
            for name, arguments in named:
                fates[name] = fate(family, arguments)
    families = collections.defaultdict(set)
    for name, (found, _) in fates.items():
        families[name.split("/")[0]].add(found)
    built = {family for family, found in families.items() if found != {"not built"}}
    counts = {
        "families": len(families),
        "built": len(built),
        "right with every kind of layer built": sum(
            families[family] - {"not built"} == {"right"} for family in built
        ),
        "right with some": sum(families[family] >= {"right", "refused"} for family in built),
        "refused": sum(families[family] - {"not built"} == {"refused"} for family in built),
        "models": sum(found != "not built" for found, _ in fates.values()),
    }
    logging.getLogger(__name__).info("%s", counts)
    print(counts)
    assert {name: why for name, (found, why) in fates.items() if found == "wrong"} == {}
    assert len(built) >= 60
    for family in ("llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text", "mistral"):
        assert families[family] - {"not built"} == {"right"}, fates[family]
    for family in ("mamba", "jamba", "bloom", "xglm", "rwkv", "recurrent_gemma"):
        assert families[family] - {"not built"} == {"refused"}, fates[family]
