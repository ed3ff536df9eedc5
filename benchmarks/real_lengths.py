"""Lengths of real data as small tables: tokens at 0, 5, ... 100 % of a set's rows, with where the set is
from."""

from __future__ import annotations

LENGTH_QUANTILES = [22, 38, 42, 47, 52, 57, 62, 67, 72, 78, 84, 91, 98, 105, 114, 123, 134, 149, 169, 209, 581]  # fmt: skip
"""Of the instructions below, on which training throughput is measured."""

REAL_LENGTHS = {
    # sahil280114/codealpaca@2f78ddc5 data/code_alpaca_2k.json, 2,017 rows, instruction, input and output,
    # SmolLM2's tokenizer
    "instructions (CodeAlpaca)": (LENGTH_QUANTILES, 2048),
    # Azure/AzurePublicDataset@b469a113 data/AzureLLMInferenceTrace_conv.csv, context tokens of 19,366
    # requests (CC BY 4.0; Patel et al., Splitwise, ISCA 2024)
    "conversations (Azure)": (
        [2, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189, 1315, 1876, 2734, 4083, 14050],
        16_384,
    ),
    # python/peps@ba4deeb7 peps/pep-*.rst, 700 documents, SmolLM2's tokenizer (public domain)
    "documents (PEPs)": (
        [265, 915, 1211, 1508, 1773, 2000, 2209, 2506, 2901, 3178, 3588, 3997, 4513, 4971, 5526, 6329, 7234, 8181, 10232, 14296, 30733],
        32_768,
    ),
    # kvcache-ai/Mooncake@3b5a5941 FAST25-release/traces/conversation_trace.jsonl, 12,031 inputs (Apache-2.0;
    # Mooncake, FAST 2025)
    "long prompts (Mooncake)": (
        [891, 901, 964, 1261, 1662, 2307, 3263, 4250, 4993, 5871, 6909, 8187, 9570, 11239, 13196, 15366, 17869, 21467, 27367, 39549, 126195],
        131_072,
    ),
}  # fmt: skip
"""Name -> (quantiles, a capacity that holds the longest)."""
