"""Tiny random targets of every family, made on the spot."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dominotree.targets.config import TargetConfig
from dominotree.targets.decoder import DecoderTarget

SIZES: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=1,
    bos_token_id=0,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-mha-wide-heads": {"num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True},
    "llama-bias": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "llama-linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama-llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "llama-yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2-three-groups": {"num_attention_heads": 6, "hidden_size": 48},
    "qwen3": {"head_dim": 24},
    "qwen3-tied": {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
}


def tiny_model(variant: str = "llama", *, seed: int = 0, scale: float = 3.0, **changes: Any) -> PreTrainedModel:
    """A random transformers model; `scale` spreads its weights so that its choices are not all alike."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(variant.split("-")[0], **{**SIZES, **VARIANTS[variant], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            else:
                parameter.mul_(scale)
    return model


def tiny_target(
    variant: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    exact: bool | None = None,
    int8: bool = False,
    scale: float = 3.0,
    **changes: Any,
) -> DecoderTarget:
    """The same model as our own decoder."""
    model = tiny_model(variant, seed=seed, scale=scale, **changes)
    return DecoderTarget(
        TargetConfig.from_dict(model.config.to_dict()),
        dict(model.state_dict()),
        dtype=dtype,
        device=torch.device("cpu"),
        exact=exact,
        int8=int8,
    )
