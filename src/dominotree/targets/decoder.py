"""Our own decoder for the dense Llama, Qwen2 and Qwen3 families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from dominotree import native
from dominotree.errors import InvalidRequest, UnsupportedModel
from dominotree.targets.attention import Attention, ExactAttention, NativeAttention, TorchAttention
from dominotree.targets.base import Forward
from dominotree.targets.cache import SlotCache
from dominotree.targets.config import TargetConfig, rope_table
from dominotree.targets.linear import Linear
from dominotree.targets.rows import Rows, Segment


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer, query/key/value and gate/up fused."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class DecoderTarget:
    """A Llama-like decoder over a slot cache. Stateless but for its weights; caches belong to the caller.

    `exact`: None takes the row-invariant forward where it costs nothing (the C kernels on a CPU), True insists on
    it (fp64 attention without the kernels), False takes PyTorch's fused attention.
    """

    def __init__(
        self,
        config: TargetConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool | None = None,
    ) -> None:
        self.config = config
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_positions = config.num_layers, config.max_positions
        self.eos_token_ids = config.eos_token_ids
        self.dtype, self.device = dtype, device
        self._kind = _attention_kind(dtype, device, exact)
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None
        weights = _Weights(tensors, dtype, device)
        self._embedding = weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._layers = [_layer(weights, config, i) for i in range(config.num_layers)]
        self._norm = weights.take("model.norm.weight", (config.hidden_size,))
        tied = config.tie_embeddings or "lm_head.weight" not in tensors
        if tied and not config.tie_embeddings:
            raise UnsupportedModel("lm_head.weight is missing though tie_word_embeddings is false")
        self._head_weight = self._embedding if tied else weights.take("lm_head.weight", self._embedding.shape)
        self._head = Linear(self._head_weight)
        packed = all(linear.packed for layer in self._layers for linear in (layer.qkv, layer.down)) and self._head.packed
        self.row_invariant = packed and self._kind is not TorchAttention

    def new_cache(self, slots: int, length: int) -> SlotCache:
        """See `Target.new_cache`. Keys and values are kept in the model's dtype (fp16 on a CPU: fp32)."""
        c = self.config
        cpu_half = self.device.type == "cpu" and self.dtype == torch.float16
        dtype = torch.float32 if cpu_half else self.dtype
        if self._rope is None or self._rope[0].shape[0] < length:
            self._rope = rope_table(c.rope, c.head_dim, length, self.device)
        return SlotCache(c.num_layers, slots, c.num_kv_heads, length, c.head_dim, dtype, self.device)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Target.embed`."""
        return F.embedding(token_ids, self._embedding)

    def head_weight(self) -> torch.Tensor:
        """See `Target.head_weight`."""
        return self._head_weight

    @torch.inference_mode()
    def forward(
        self,
        cache: SlotCache,
        segments: Sequence[Segment],
        *,
        feature_layers: Sequence[int] = (),
        last_only: bool = False,
    ) -> Forward:
        """See `Target.forward`."""
        for segment in segments:
            if segment.start + len(segment.tokens) > cache.length:
                raise InvalidRequest(
                    f"{segment.start + len(segment.tokens)} columns do not fit a cache of {cache.length}; raise --context"
                )
        rows = Rows.of(segments)
        count = sum(len(segment.tokens) for segment in segments)
        assert self._rope is not None, "new_cache comes first"
        attend: Attention = self._kind(cache, rows, self.config.num_heads, *self._rope)
        x = self.embed(torch.from_numpy(rows.tokens).to(self.device))
        tapped: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(self._layers):
            x = self._run_layer(layer, i, x, attend)
            if i in feature_layers:
                tapped[i] = x[:count]
        features = torch.cat([tapped[i] for i in feature_layers], dim=-1) if feature_layers else None
        if last_only:
            ends = torch.tensor([len(segment.tokens) for segment in segments]).cumsum(0) - 1
            ends = ends.repeat(2)[: max(2, len(ends))]  # never a single row, see Linear
            logits = self._head(self._normalise(x[ends.to(self.device)], self._norm))[: len(segments)]
        else:
            logits = self._head(self._normalise(x, self._norm))[:count]
        return Forward(logits, features)

    def _run_layer(self, layer: Layer, index: int, x: torch.Tensor, attend: Attention) -> torch.Tensor:
        qkv = layer.qkv(self._normalise(x, layer.input_norm))
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv = self._normalise_heads(qkv, layer.q_norm, layer.k_norm)
        x = x + layer.output(attend(index, qkv))
        gate, up = layer.gate_up(self._normalise(x, layer.mlp_norm)).chunk(2, dim=-1)
        return x + layer.down(F.silu(gate) * up)

    def _normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _normalise_heads(self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> torch.Tensor:
        c = self.config
        by_head = qkv.view(qkv.shape[0], -1, c.head_dim)
        q, k, v = by_head.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        return torch.cat((self._normalise(q, q_norm), self._normalise(k, k_norm), v), dim=1).flatten(1)


def _attention_kind(
    dtype: torch.dtype, device: torch.device, exact: bool | None
) -> type[NativeAttention] | type[ExactAttention] | type[TorchAttention]:
    if exact is False:
        return TorchAttention
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and native.available():
        return NativeAttention
    return ExactAttention if exact else TorchAttention


class _Weights:
    """Takes tensors by name with the shape they must have."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise UnsupportedModel(f"tensor {name} is missing from the target's weights")
        if tuple(tensor.shape) != tuple(shape):
            raise UnsupportedModel(f"tensor {name} has shape {tuple(tensor.shape)}; the config says {tuple(shape)}")
        return tensor.to(self._device, self._dtype)

    def linear(self, names: Sequence[str], outs: Sequence[int], width: int, bias: bool) -> Linear:
        weight = [self.take(f"{name}.weight", (out, width)) for name, out in zip(names, outs, strict=True)]
        biases = [self.take(f"{name}.bias", (out,)) for name, out in zip(names, outs, strict=True)] if bias else None
        return Linear(torch.cat(weight), torch.cat(biases) if biases else None)


def _layer(weights: _Weights, c: TargetConfig, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    heads = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
    return Layer(
        input_norm=weights.take(prefix + "input_layernorm.weight", (c.hidden_size,)),
        qkv=weights.linear(heads, (q, kv, kv), c.hidden_size, c.attention_bias),
        q_norm=weights.take(attention + "q_norm.weight", (c.head_dim,)) if c.qk_norm else None,
        k_norm=weights.take(attention + "k_norm.weight", (c.head_dim,)) if c.qk_norm else None,
        output=weights.linear([attention + "o_proj"], (c.hidden_size,), q, c.output_bias),
        mlp_norm=weights.take(prefix + "post_attention_layernorm.weight", (c.hidden_size,)),
        gate_up=weights.linear(
            [mlp + "gate_proj", mlp + "up_proj"], (c.intermediate_size,) * 2, c.hidden_size, c.mlp_bias
        ),
        down=weights.linear([mlp + "down_proj"], (c.hidden_size,), c.intermediate_size, c.mlp_bias),
    )
