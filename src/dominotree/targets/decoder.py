"""Our own decoder for the dense Llama, Qwen2 and Qwen3 families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch.nn import functional as F

from dominotree import native
from dominotree.errors import InvalidRequest, UnsupportedModel
from dominotree.targets.attention import Attention, LayerShape, TorchAttention, attention_kind
from dominotree.targets.base import Forward
from dominotree.targets.cache import SlotCache
from dominotree.targets.config import TargetConfig, rope_table
from dominotree.targets.layer import Weights, read_layer
from dominotree.targets.linear import Linear, kernels_serve
from dominotree.targets.rows import Rows, Segment
from dominotree.targets.stack import Stack


class DecoderTarget:
    """A Llama-like decoder over a slot cache. Stateless but for its weights; caches belong to the caller.

    `exact`: None takes the row-invariant forward where it costs nothing (the C kernels on a CPU), True insists on
    it (fp64 attention without the kernels), False takes PyTorch's fused attention. `int8` rounds all weights but the
    embeddings to int8, with a scale for each output: another model, which drafting leaves as it is.
    """

    def __init__(
        self,
        config: TargetConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool | None = None,
        int8: bool = False,
    ) -> None:
        self.config = config
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_positions = config.num_layers, config.max_positions
        self.eos_token_ids = config.eos_token_ids
        self.dtype, self.device = dtype, device
        self._kind = attention_kind(dtype, device, exact)
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None
        if int8 and not kernels_serve(dtype, device):
            raise UnsupportedModel(f"int8 weights need our C kernels on a CPU ({native.reason() or device})")
        self.precision = "int8" if int8 else str(dtype).removeprefix("torch.")
        weights = Weights(tensors, dtype, device, owner="the target", int8=int8)
        embedding = weights.stored("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._embedding = embedding.clone()  # a view would keep the whole file mapped
        shape = LayerShape(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            qk_norm=config.qk_norm,
            qkv_bias=config.attention_bias,
            output_bias=config.output_bias,
            mlp_bias=config.mlp_bias,
        )
        layers = [read_layer(weights, f"model.layers.{i}.", shape) for i in range(config.num_layers)]
        norm = weights.take("model.norm.weight", (config.hidden_size,))
        tied = config.tie_embeddings or "lm_head.weight" not in tensors
        if tied and not config.tie_embeddings:
            raise UnsupportedModel("lm_head.weight is missing though tie_word_embeddings is false")
        self._head_weight = self._embedding if tied else weights.stored("lm_head.weight", self._embedding.shape)
        self._stack = Stack(layers, norm, Linear(self._head_weight, dtype=dtype, int8=int8))
        self._least_rows = max(linear.least_rows for linear in self._stack.linears())
        same_bits = all(linear.row_invariant for linear in self._stack.linears())
        self.row_invariant = same_bits and self._kind is not TorchAttention

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
        return F.embedding(token_ids, self._embedding).to(self.dtype)

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
        best: bool = False,
    ) -> Forward:
        """See `Target.forward`."""
        for segment in segments:
            if segment.start + len(segment.tokens) > cache.length:
                needed = segment.start + len(segment.tokens)
                raise InvalidRequest(f"{needed} columns do not fit a cache of {cache.length}; raise --context")
        rows = Rows.of(segments, least=self._least_rows)
        count = sum(len(segment.tokens) for segment in segments)
        assert self._rope is not None, "new_cache comes first"
        attend: Attention = self._kind(cache, rows, self.config.num_heads, *self._rope)
        x = self.embed(torch.from_numpy(rows.tokens).to(self.device))
        picked = None
        if last_only:
            ends = [end - 1 for end in accumulate(len(segment.tokens) for segment in segments)]
            picked = (ends * 2)[: max(self._least_rows, len(ends))]
        passed = self._stack(x, attend, taps=feature_layers, picked=picked, best=best)
        features, wanted = passed.features, len(segments) if last_only else count
        return Forward(passed.logits[:wanted], None if features is None else features[:count], passed.best[:wanted])
