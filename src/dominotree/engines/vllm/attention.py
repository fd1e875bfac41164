"""vLLM's CPU attention with tree rows: what its kernel gets right stays, tree rows are attended to once more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from vllm import _custom_ops as ops
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from dominotree.engines.vllm.internals import LAYER_ATTRIBUTES, check_attributes
from dominotree.errors import UnsupportedEngine


@dataclass(frozen=True)
class TreeRows:
    """The rows of one tree in a step, its root first."""

    rows: slice
    mask: torch.Tensor
    """bool `[rows, columns]`: who sees which position of the cache, prefix and tail."""
    elements: torch.Tensor
    """Where a layer's cache has keys and values of these columns, see `BlockLayout.elements`."""


class BlockLayout:
    """Where vLLM's kernel keeps each token's keys and values inside a block of its cache.

    That is the kernel's own affair and differs with the processor, so it is learned: tokens and dimensions with numbers
    of their own are written and looked for.
    """

    def __init__(self, layer: Any) -> None:
        """Takes an attention layer with its cache; raises `UnsupportedEngine` unless a block has every number once."""
        _, self.kv_heads, self.block_size, width = layer.kv_cache.shape
        slots, dims = torch.arange(self.block_size), torch.arange(width)
        number = slots[:, None] * width + dims  # keys, then values, of every token
        found = torch.zeros(number.numel(), dtype=torch.int64)
        for digit in range(4):  # in digits of base 64, which every dtype holds exactly
            written = (number >> 6 * digit & 63).to(layer.kv_cache.dtype)[:, None]
            block = written.new_zeros(1, 1, 2 * self.block_size, width // 2)
            parts = (part.contiguous() for part in written.chunk(2, dim=2))
            ops.cpu_attn_reshape_and_cache(*parts, *block.chunk(2, dim=2), slots, layer.isa)
            found += block.flatten().long() << 6 * digit
        if not torch.equal(found.sort().values, number.flatten()):
            raise UnsupportedEngine(f"vLLM's KV blocks ({layer.isa}) are laid out in a way that is not understood")
        self._place = found.argsort().view(self.block_size, 2, width // 2)

    def elements(self, slots: torch.Tensor) -> torch.Tensor:
        """Indices `[2, kv_heads, slots, head_dim]` into a layer's flattened cache: keys, then values, of `slots`."""
        block, token = slots // self.block_size, slots % self.block_size
        heads = block * self.kv_heads + torch.arange(self.kv_heads)[:, None]  # [kv_heads, slots]
        places: torch.Tensor = heads[:, :, None] * self._place.numel() + self._place[token].transpose(0, 1)[:, None]
        return places


class TreeAttentionImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attends as vLLM does, then overwrites the rows of the trees that the step's metadata carry as `trees`."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """See vLLM's; queries and outputs are `[rows, heads, head_dim]`."""
        out: torch.Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        trees: list[TreeRows] = getattr(attn_metadata, "trees", [])
        for tree in trees:
            keys, values = kv_cache.view(-1)[tree.elements]
            attended = F.scaled_dot_product_attention(
                query[tree.rows].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=tree.mask,
                scale=self.scale,
                enable_gqa=True,
            )
            out[tree.rows] = attended[0].transpose(0, 1).reshape(out[tree.rows].shape)
        return out


def adopt(layers: dict[str, Any]) -> None:
    """Has attention layers know trees; raises `UnsupportedEngine` for those that tree rows cannot be computed for."""
    for name, layer in layers.items():
        impl = getattr(layer, "impl", layer)
        if type(layer) is not Attention or type(impl) is not CPUAttentionBackendImpl:
            raise UnsupportedEngine(f"{name} uses {type(impl).__name__}, which takes no trees; use mode chain")
        check_attributes(layer, LAYER_ATTRIBUTES)
        odd = {
            "ALiBi": impl.alibi_slopes is not None,
            "a sliding window": impl.sliding_window != -1,
            "soft-capped logits": bool(impl.logits_soft_cap),
            "attention sinks": impl.sinks is not None,
            "another layer's keys": impl.kv_sharing_target_layer_name is not None,
            "attention that is not a decoder's": impl.attn_type != "decoder",
        }
        refused = [what for what, present in odd.items() if present]
        if refused:
            raise UnsupportedEngine(f"{name} uses {', '.join(refused)}, which tree rows cannot; use mode chain")
        impl.__class__ = TreeAttentionImpl  # one method more; registering a backend would reach other engines
