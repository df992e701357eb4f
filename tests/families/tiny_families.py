"""Tiny random models of the families in `asyncrl.policy.families`: a configuration for each, and further ones that
change how rows see each other.

All have float32 weights of a size that makes attention matter: with transformers' own initialisation, tiny models give
nearly the same probabilities whatever they attend to.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 60

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EIGHT: dict[str, Any] = {"head_dim": 8}
_WINDOW = {"sliding_window": 6}
_GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
_SEEK: dict[str, Any] = {
    "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
_MLA: dict[str, Any] = {
    **_SEEK, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "head_dim": 8,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON},
    "qwen2": {**_COMMON},
    "qwen3": {**_COMMON, **_EIGHT},
    "mistral": {**_COMMON, **_EIGHT, **_WINDOW},
    "ministral3": {**_COMMON, **_EIGHT},
    "gemma": {**_COMMON, **_EIGHT},
    "gemma3_text": {**_COMMON, **_EIGHT, **_WINDOW},
    "phi3": {**_COMMON},
    "glm4": {**_COMMON, **_EIGHT},
    "exaone4": {**_COMMON, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5": {**_COMMON, **_EIGHT},
    "gpt2": {**_GPT},
    "opt": {**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "olmo": {**_COMMON},
    "olmo2": {**_COMMON},
    "olmo3": {**_COMMON, **_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {**_COMMON, "no_rope_layers": [1, 0]},
    "gpt_neox": {**_COMMON},
    "ministral": {**_COMMON, **_EIGHT, **_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "starcoder2": {**_COMMON, **_WINDOW},
    "arcee": {**_COMMON},
    "helium": {**_COMMON, **_EIGHT},
    "seed_oss": {**_COMMON, **_EIGHT},
    "hunyuan_v1_dense": {**_COMMON, **_EIGHT},
    "gpt_bigcode": {**_GPT},
    "cohere": {**_COMMON},
    "cohere2": {**_COMMON, **_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {**_COMMON, "logits_scaling": 2.0},
    "nanochat": {**_COMMON},
    "gemma2": {**_COMMON, **_EIGHT, **_WINDOW},
    "vaultgemma": {**_COMMON, **_EIGHT, **_WINDOW},
    "gemma3n_text": {
        **_COMMON, **_EIGHT, **_WINDOW, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
        "laurel_rank": 8, "num_kv_shared_layers": 0, "altup_num_inputs": 2, "intermediate_size": [48, 48],
        "layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {
        **_COMMON, **_EIGHT, **_WINDOW, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8,
    },
    "apertus": {**_COMMON},
    "stablelm": {**_COMMON},
    "nemotron": {**_COMMON},
    "falcon": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "bloom": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "phi": {**_COMMON},
    "minicpm3": {**_COMMON, **_MLA, "num_key_value_heads": 4},
    "gptj": {**_GPT, "rotary_dim": 4},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "qwen2_moe": {**_COMMON, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**_COMMON, **_EIGHT, **_EXPERTS},
    "olmoe": {**_COMMON, **_EXPERTS},
    "flex_olmo": {**_COMMON, **_EXPERTS},
    "hunyuan_v1_moe": {**_COMMON, **_EIGHT, **_EXPERTS, "moe_topk": 2},
    "dots1": {**_COMMON, **_EIGHT, **_SEEK, **_WINDOW, "layer_types": ["full_attention", "full_attention"]},
    "glm4_moe": {**_COMMON, **_EIGHT, **_SEEK},
    "mixtral": {**_COMMON, **_EXPERTS},
    "granitemoe": {**_COMMON, **_EXPERTS},
    "deepseek_v2": {**_COMMON, **_MLA},
    "deepseek_v3": {**_COMMON, **_MLA},
    "gpt_oss": {**_COMMON, **_EIGHT, **_EXPERTS, **_WINDOW},
    "ernie4_5_moe": {
        **_COMMON, **_EIGHT, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1,
    },
    "minimax_m2": {**_COMMON, **_EIGHT, **_EXPERTS, "rotary_dim": 4},
    "minimax": {**_COMMON, **_EIGHT, **_EXPERTS, "layer_types": ["linear_attention", "full_attention"],
                "block_size": 8},
    "phimoe": {**_COMMON, **_EXPERTS, **_WINDOW},
    "llama4_text": {
        **_COMMON, **_EIGHT, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
        "attention_chunk_size": 6, "no_rope_layers": [1, 0],
    },
    "qwen3_next": {**_COMMON, **_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": {**_COMMON, **_DELTA},
    "qwen3_5_moe_text": {**_COMMON, **_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 24},
    "kimi_linear": {
        **_COMMON, **_MLA, "num_experts": 4, "num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"], "num_shared_experts": 1, "q_lora_rank": None,
    },
    "olmo_hybrid": {**_COMMON, **_DELTA},
    "lfm2": {**_COMMON, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "lfm2_moe": {
        **_COMMON, **_EXPERTS, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "num_dense_layers": 1,
    },
    "falcon_h1": {**_COMMON, **_MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **_COMMON, **_EXPERTS, **_MAMBA, "shared_intermediate_size": 24, "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope",
    },
    "nemotron_h": {
        **_COMMON, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 1, "conv_kernel": 4, "chunk_size": 8, "head_dim": 8,
    },
    "zamba2": {
        **_COMMON, "num_key_value_heads": 4, "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4,
        "chunk_size": 8, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4,
    },
    "bamba": {**_COMMON, **_MAMBA, "attn_layer_indices": [1]},
    "jamba": {
        **_COMMON, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
    "falcon_mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
    "mamba2": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "num_heads": 4,
        "head_dim": 16, "expand": 2, "n_groups": 1, "chunk_size": 8,
    },
    "recurrent_gemma": {
        **_COMMON, "lru_width": 32, "attention_window_size": 6, "block_types": ["recurrent", "attention"],
    },
    "gpt_neox_japanese": {**_COMMON, "intermediate_multiple_size": 2},
    "openai-gpt": {**_GPT},
    "xglm": {
        "vocab_size": VOCABULARY, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4,
        "max_position_embeddings": 128,
    },
}  # fmt: skip


def tiny_model(model_type: str, *, attention: str = "eager", **changes: Any) -> PreTrainedModel:
    """Builds the family's model with seed 0. `changes` are keys of its configuration."""
    config = AutoConfig.for_model(model_type, **{**FAMILIES[model_type], **changes})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "A_log" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.float().eval()
