"""Tiny models of every causal family of the installed transformers, with each kind of layer that a family
names."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# Patterns of attribute names, the first that fits decides; sizes agree with each other: 4 heads of 8 make 32.
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"(vocab_size|vocab_size_per_layer_input|decoder_vocab_size|unpadded_vocab_size)", 64),
    (r"pad_token_id", 0),
    (r"(bos|cls|decoder_start|forced_bos)_token_id", 1),
    (r"(eos|sep|eod|forced_eos)_token_id", 2),
    (r"(num_hidden_layers|n_layers?|num_layers|num_blocks|(num_)?(en|de)coder_layers|num_(en|de)coder_layers)", 2),
    (r"(hidden_size|d_model|n_embd|embedding_dim|embedding_size|emb_dim|dim_model|attention_hidden_size|lru_width)", 32),
    (r"(word_embed_proj_dim|input_embedding_size|output_embedding_size|mamba_d_ssm|backbone_hidden_size)", 32),
    (r"(intermediate_size.*|.*_intermediate_size|.*ffn_dim|.*ffn_hidden_size|dim_ff|dff|d_inner|n_inner|intermediate_size_mlp)", 64),
    (r"feed_forward_size", 64),
    (r"(num_attention_heads|n_heads?|num_heads|(num_)?(en|de)coder_attention_heads|attention_heads|swa_num_attention_heads)", 4),
    (r"(num_key_value_heads|num_kv_heads|swa_num_key_value_heads|num_query_groups)", 2),
    (r"(head_dim|swa_head_dim|dim_head|d_head|d_kv|kv_channels|attention_head_dim|v_head_dim|linear_head_dim)", 8),
    (r"(linear_(key|value)_head_dim|attention_head_size|mamba_d_head|mamba_headdim|mamba_head_dim)", 8),
    (r"(linear_num_(key|value)_heads|linear_num_heads)", 4),
    (r"(mamba_n_heads|mamba_num_heads)", 8),
    (r"(mamba_d_state|state_size|ssm_state_size|d_state)", 4),
    (r"(mamba_n_groups|mamba_ngroups|n_groups)", 1),
    (r"(mamba_dt_rank|time_step_rank)", 4),
    (r"(qk_rope_head_dim|rotary_dim)", 4),
    (r"qk_nope_head_dim", 8),
    (r"qk_head_dim", 12),
    (r"(kv_lora_rank|gated_norm_rank|adapter_rank|laurel_rank|hc_lowrank|loop_gate_rank|o_lora_rank)", 8),
    (r"q_lora_rank", 16),
    (r"(n_routed_experts|num_experts|num_local_experts|moe_num_experts|zero_expert_num)", 4),
    (r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|topk_method_k)", 2),
    (r"(n_group|topk_group|num_expert_group)", 1),
    (r"(n_shared_experts|num_shared_experts|moe_num_shared_experts)", 1),
    (r"(first_k_dense_replace|num_dense_layers|mlp_only_layers_count)", 1),
    (r"(sliding_window|sliding_window_size|window_size|attention_window_size|local_attention|keep_window_size)", 6),
    (r"attention_chunk_size", 6),
    (r"(chunk_size|mamba_chunk_size)", 4),
    (r"rel_extent", 6),
    (r"index_head_dim", 8),
    (r"index_n_heads", 2),
    (r"index_topk", 4),
    (r"index_block_size", 4),
    (r"index_topk_blocks", 2),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length)", 128),
    (r"hidden_size_per_layer_input", 8),
    (r"num_kv_shared_layers", 0),
    (r"num_nextn_predict_layers", 0),
    (r"number_of_conv_states", 1),
    (r"ple_embed_dim", 16),
    (r"(max_window_layers)", 0),
    (r"(router_hidden_size)", 16),
    (r"(d_rel)", 4),
    (r"(o_groups)", 2),
    (r"(num_layers_per_stack|n_input_layers|n_recurrent_layers|n_output_layers|n_layers_per_attn_res_block)", 1),
    (r"(.*dropout.*|.*pdrop|.*layerdrop|.*jitter_noise)", 0.0),
)  # fmt: skip

_PER_FAMILY: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "bailing_hybrid": {"layer_group_size": 2},
    "falcon": {"num_kv_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "num_key_value_heads": 2},
    "dory": {"num_hidden_layers": 3},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "nemotron": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "is_decoder": True},
}


@functools.cache
def _sized(family: str) -> dict[str, Any]:
    """The attributes of the family's configuration that have a small value of ours."""
    default = CONFIG_MAPPING[family]()
    found = {}
    for name, value in vars(default).items():
        if isinstance(value, bool) or name.startswith("_"):
            continue
        size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
        if size is None or not (value is None or isinstance(value, (int, float, list))):
            continue
        if value is None and not isinstance(size, int):
            continue
        if value is None and re.search("window|chunk|rank|head_dim|token_id|experts", name) is None:
            continue
        found[name] = [size] * 2 if isinstance(value, list) else size
    if "use_sliding_window" in vars(default):
        found["use_sliding_window"] = True
    if "is_decoder" in vars(default):
        found["is_decoder"] = True
    if "qk_rope_head_dim" in found:  # latent attention: all heads have keys, and rotation takes this width
        found |= {"num_key_value_heads": 4} | ({"head_dim": 4} if "head_dim" in found else {})
    return found | _PER_FAMILY.get(family, {})


def kinds_of_layers(family: str) -> list[str]:
    """Values of `layer_types` that stand in the family's own code; empty where it has no such attribute."""
    default = CONFIG_MAPPING[family]()
    if getattr(default, "layer_types", None) is None:
        return []
    package = importlib.import_module(type(default).__module__).__package__
    assert package is not None
    folder = package.rsplit(".", 1)[-1]
    text = "".join(
        inspect.getsource(importlib.import_module(f"{package}.{part}_{folder}"))
        for part in ("modeling", "configuration")
    )
    own = [kind for kind in ALLOWED_LAYER_TYPES if re.search(rf"[\"']{kind}[\"']", text)]
    return sorted({*own, *default.layer_types} - {"moe", "mlp", "dense", "sparse"})


def variants(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of the configuration): the default mix of layers, then two layers of each kind."""
    sizes = _sized(family)
    yield family, sizes
    for kind in kinds_of_layers(family):
        yield f"{family}/{kind}", sizes | {"layer_types": [kind] * 2}


def build(family: str, arguments: dict[str, Any], attention: str) -> Any:
    """A model in evaluation mode with weights so large that every layer shows in the logits."""
    config = CONFIG_MAPPING[family](**arguments)
    with torch.random.fork_rng(devices=[]):
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > 3_000_000:
            raise ValueError(f"{size} parameters are not tiny")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.2)
                elif not parameter.any():
                    parameter.normal_(0, 0.1)
    return model
