"""What a target is, read from a Hugging Face `config.json`; whatever cannot be run exactly is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dominotree.errors import UnsupportedModel

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class TargetConfig:
    """A dense Llama, Qwen2 or Qwen3 decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    max_positions: int
    tie_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...] = ()

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises each head's queries and keys."""
        return self.family == "qwen3"

    @classmethod
    def read(cls, folder: Path) -> TargetConfig:
        """The config of the model in `folder`, stop tokens of its generation_config.json included."""
        config, generation = _read_object(folder / "config.json"), folder / "generation_config.json"
        if generation.exists():
            stop = _read_object(generation).get("eos_token_id")
            config = {**config, "eos_token_id": stop if stop is not None else config.get("eos_token_id")}
        return cls.from_dict(config)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> TargetConfig:
        """Parses a `config.json`; raises `UnsupportedModel` naming the field that cannot be run exactly."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise UnsupportedModel(f"model_type {family!r} is not one of {', '.join(FAMILIES)}")
        for field in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"):
            if not isinstance(config.get(field), int) or config[field] < 1:
                raise UnsupportedModel(
                    f"{field} is {config.get(field)!r} in config.json; a positive integer is expected"
                )
        _refuse_unsupported(config)
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise UnsupportedModel(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        if head_dim % 2:
            raise UnsupportedModel(f"head_dim {head_dim} is odd; rotary embeddings need an even one")
        eos = config.get("eos_token_id")
        bias = bool(config.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=rope_parameters(config),
            max_positions=int(config.get("max_position_embeddings", 2048)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=True if family == "qwen2" else bias,
            output_bias=False if family == "qwen2" else bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return dict(found)
    except (OSError, ValueError, TypeError) as error:
        raise UnsupportedModel(f"{file} cannot be read ({error}); fetch the model again") from error


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    if config.get("quantization_config") is not None:
        raise UnsupportedModel(
            "quantization_config is set: quantised weights are not supported; use the unquantised model"
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {config['hidden_act']!r} is not supported; silu is expected")
    for field in ("attn_logit_softcapping", "final_logit_softcapping", "num_experts", "num_local_experts"):
        if config.get(field):
            raise UnsupportedModel(f"{field} is set: this kind of model is not supported")
    window = config.get("sliding_window")
    kinds = config.get("layer_types") or []
    uses = (
        "sliding_attention" in kinds
        if kinds
        else bool(config.get("use_sliding_window")) and (config.get("max_window_layers", 0) < layers)
    )
    if uses and window is not None:
        raise UnsupportedModel(f"sliding_window {window} is in use; only full attention is run exactly")
    if set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"layer_types {sorted(set(kinds))} are not supported; full_attention is expected")
    if config.get("pretraining_tp", 1) not in (0, 1, None):
        raise UnsupportedModel(f"pretraining_tp {config['pretraining_tp']} is not supported; 1 is expected")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings in one form: `{"rope_type", "rope_theta", ...}`, from either way configs spell them."""
    both = [config[field] for field in ("rope_parameters", "rope_scaling") if config.get(field)]
    if len(both) == 2 and both[0] != both[1]:
        raise UnsupportedModel(f"rope_parameters {both[0]} and rope_scaling {both[1]} contradict each other; keep one")
    rope = dict(both[0]) if both else {}
    rope["rope_type"] = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    rope.setdefault("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    rope["max_position_embeddings"] = config.get("max_position_embeddings", 2048)
    if rope["rope_type"] not in ROPE_TYPES:
        raise UnsupportedModel(f"rope_type {rope['rope_type']!r} is not one of {', '.join(ROPE_TYPES)}")
    for field in _ROPE_NEEDS.get(rope["rope_type"], ()):
        if not isinstance(rope.get(field), (int, float)):
            raise UnsupportedModel(
                f"rope_type {rope['rope_type']!r} needs a number as {field}, not {rope.get(field)!r}"
            )
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if float(partial) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported; 1.0 is expected")
    return rope


def rope_table(
    rope: Mapping[str, Any], head_dim: int, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[length, head_dim / 2]` fp32 of positions 0 .. length-1.

    Default, linear, Llama-3 and YaRN (arXiv 2309.00071) frequencies; YaRN's attention factor is folded in.
    """
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / theta**exponent
    scale = 1.0
    if kind == "linear":
        inverse = inverse / float(rope["factor"])
    elif kind == "llama3":
        inverse = _llama3_frequencies(rope, inverse)
    elif kind == "yarn":
        inverse, scale = _yarn_frequencies(rope, inverse, theta, head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    wide = angles.double().numpy()  # PyTorch's own cosines differ in last bits from one process to the next
    cos, sin = (torch.from_numpy(turned).float() * scale for turned in (np.cos(wide), np.sin(wide)))
    return cos.to(device), sin.to(device)


def _llama3_frequencies(rope: Mapping[str, Any], inverse: torch.Tensor) -> torch.Tensor:
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    slow = torch.where(wavelength > original / low, inverse / factor, blended)
    return torch.where(wavelength < original / high, inverse, slow)


def _yarn_frequencies(
    rope: Mapping[str, Any], inverse: torch.Tensor, theta: float, head_dim: int
) -> tuple[torch.Tensor, float]:
    original = float(rope.get("original_max_position_embeddings") or rope["max_position_embeddings"])
    factor = float(rope.get("factor") or rope["max_position_embeddings"] / original)

    def attention_scale(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    scale = rope.get("attention_factor")
    if scale is None:
        every, dims = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = attention_scale(every) / attention_scale(dims) if every and dims else attention_scale()

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(float(rope.get("beta_fast") or 32)), dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    extrapolate = 1 - ramp.clamp(0, 1)
    return inverse / factor * (1 - extrapolate) + inverse * extrapolate, float(scale)
