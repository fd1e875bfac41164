"""Tiny random models of many architectures, as transformers builds them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, HIDDEN, LAYERS = 96, 32, 4

SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=1,
)
OLD: dict[str, Any] = dict(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_positions=256, eos_token_id=1)
MOE: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)

FULL_ATTENTION: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "gemma": {"head_dim": 8},
    "glm": {"head_dim": 8},
    "gpt_bigcode": OLD,
    "gpt_neox": {},
    "gpt2": OLD,
    "gptj": {**OLD, "rotary_dim": 8},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.8},
    "helium": {"head_dim": 8},
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": None, "head_dim": 8},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmoe": MOE,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN},
    "persimmon": {},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": None},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**MOE, "head_dim": 8},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "stablelm": {},
    "starcoder2": {"sliding_window": None},
}
"""What runs exactly, with the settings that make each family itself."""

WIDE_WINDOW: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8, "sliding_window": 256, "final_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 8, "sliding_window": 256},
    "mistral": {"sliding_window": 256, "head_dim": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 2},
}
"""Sliding-window models whose window is not in use within 256 tokens."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bamba": ({"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}, "recurrent"),
    "bloom": (OLD, "position_ids"),
    "falcon": ({"alibi": True}, "ALiBi"),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, "recurrent"),
    "gemma2": ({"head_dim": 8, "sliding_window": 8}, "sliding_window of 8"),
    "mamba": ({"state_size": 8}, "recurrent"),
    "mistral": ({"sliding_window": 8, "head_dim": 8}, "sliding_window of 8"),
    "mpt": (dict(vocab_size=VOCAB, d_model=HIDDEN, n_layers=LAYERS, n_heads=4, max_seq_len=64), "position_ids"),
    "qwen3_next": ({**MOE, "head_dim": 8, "shared_expert_intermediate_size": 16}, "linear_attention"),
    "rwkv": ({"attention_hidden_size": HIDDEN, "context_length": 64}, "recurrent"),
}
"""What cannot be run exactly, with a word of the reason."""


def tiny(kind: str, *, seed: int = 0, scale: float = 3.0, **settings: Any) -> Any:
    """A random model; `scale` spreads its weights so that its choices are not all alike."""
    torch.manual_seed(seed)
    backend = settings.pop("attn_implementation", None)
    config = AutoConfig.for_model(kind, **{**SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=backend).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.copy_((0 if "gemma" in kind else 1) + 0.1 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            else:
                parameter.mul_(scale)
    return model
