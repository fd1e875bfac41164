"""The drafter as a trainable module; its state dict has the released tensor names.

Backbone: DFlash (arXiv 2602.06036). Correction head: Domino (arXiv 2605.29707).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dominotree.drafters.config import DrafterConfig

__all__ = ["Context", "DrafterModel"]

Context = list[tuple[Tensor, Tensor]]
"""Per draft layer the keys and values of the fused features, each `[sequences, kv_heads, length, head_dim]`.
"""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32; keeps the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention of block queries over context and block, Qwen3 style (norms on queries and
    keys).
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        wide, narrow, bias = self.heads * self.head_dim, self.kv_heads * self.head_dim, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values of `x` `[..., hidden]`: both `[..., kv_heads, head_dim]`."""
        split = (*x.shape[:-1], self.kv_heads, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(split)), cos, sin)
        return keys, self.v_proj(x).view(split)

    def forward(
        self,
        x: Tensor,  # [sequences, anchors, block, hidden]
        cos: Tensor,  # [sequences, anchors, block, 1, head_dim]
        sin: Tensor,
        context: tuple[Tensor, Tensor],
        hidden_context: Tensor,  # bool [sequences, 1, 1, anchors, 1, length], True: unseen
    ) -> Tensor:
        sequences, anchors, block, _ = x.shape
        groups = self.heads // self.kv_heads
        queries = rotate(self.q_norm(self.q_proj(x).view(*x.shape[:-1], self.heads, self.head_dim)), cos, sin)
        # [sequences, kv_heads, groups, anchors, block, head_dim]
        queries = (queries * self.head_dim**-0.5).view(sequences, anchors, block, self.kv_heads, groups, -1)
        queries = queries.permute(0, 3, 4, 1, 2, 5)
        own_keys, own_values = (part.permute(0, 3, 1, 2, 4) for part in self.keys_values(x, cos, sin))
        past_keys, past_values = context
        length = past_keys.shape[2]
        folded = queries.reshape(sequences, self.kv_heads, groups * anchors * block, self.head_dim)
        past = (folded @ past_keys.transpose(-1, -2)).view(sequences, self.kv_heads, groups, anchors, block, length)
        past = past.masked_fill(hidden_context, float("-inf"))
        own = queries @ own_keys[:, :, None].transpose(-1, -2)  # [.., anchors, block, block]
        weights = torch.softmax(torch.cat([past, own], dim=-1), dim=-1)
        from_past = weights[..., :length].reshape(sequences, self.kv_heads, -1, length) @ past_values
        mixed = from_past.view_as(queries) + weights[..., length:] @ own_values[:, :, None]
        out: Tensor = self.o_proj(mixed.permute(0, 3, 4, 1, 2, 5).reshape(sequences, anchors, block, -1))
        return out


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm decoder layer of the backbone."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: tuple[Tensor, Tensor], hidden_context: Tensor
    ) -> Tensor:
        attended: Tensor = self.self_attn(self.input_layernorm(x), cos, sin, context, hidden_context)
        x = x + attended
        mixed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + mixed


class DrafterModel(nn.Module):
    """Backbone and, for Domino, correction head; parameters are float32, run it under bf16 autocast or as it
    is.

    A block is the anchor (root) token and `block_size - 1` masks; `sequences` sequences carry `anchors`
    blocks each, and no block sees another.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        if config.is_domino:
            self.prefix_gru = nn.GRU(hidden, config.gru_hidden_dim, bias=False, batch_first=True)
            self.embed_proj = nn.Sequential(
                nn.Linear(hidden + config.gru_hidden_dim, config.emb_dim, bias=False),
                nn.SiLU(),
                nn.Linear(config.emb_dim, config.scored_vocab_size, bias=False),
            )

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Random weights as a start: linear layers N(0, 0.02), norms 1.

        The final norm starts at 0.35, since rows of a trained embedding are long and at 1 the first loss is
        above 15; the last correction matrix starts at 0, so that Domino starts as its own base.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
            elif name.endswith("bias"):
                weight.zero_()
            else:
                weight.fill_(1.0)
        self.norm.weight.fill_(0.35)
        if self.config.is_domino:
            for weight in self.prefix_gru.parameters():
                bound = self.config.gru_hidden_dim**-0.5
                weight.copy_((torch.rand(weight.shape, generator=generator) * 2 - 1) * bound)
            self.get_parameter("embed_proj.2.weight").zero_()

    @property
    def backbone(self) -> list[Layer]:
        """The draft layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    @property
    def last_correction(self) -> Tensor | None:
        """The correction's last matrix, `[scored vocabulary, emb_dim]`; None for plain DFlash."""
        return self.get_parameter("embed_proj.2.weight") if self.config.is_domino else None

    def context(self, features: Tensor) -> Context:
        """Keys and values of target features `[sequences, length, layers * hidden]` at positions 0, 1, ..."""
        fused = self.hidden_norm(self.fc(features))
        cos, sin = self._rotary(torch.arange(features.shape[1], device=features.device)[None, :])
        pairs = [layer.self_attn.keys_values(fused, cos, sin) for layer in self.backbone]
        return [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in pairs]

    def forward(self, blocks: Tensor, anchors: Tensor, context: Context) -> Tensor:
        """Final hidden states of the draft slots, `[sequences, anchors, draft_length, hidden]`.

        `blocks` `[sequences, anchors, block_size, hidden]` are the target's embeddings of anchor and mask
        tokens, `anchors` int64 `[sequences, anchors]` the anchors' positions; a block sees the context before
        its anchor.
        """
        slots = torch.arange(self.config.block_size, device=anchors.device)
        cos, sin = self._rotary(anchors[..., None] + slots)
        places = torch.arange(context[0][0].shape[2], device=anchors.device)
        hidden_context = (places >= anchors[..., None])[:, None, None, :, None, :]
        x = blocks
        for layer, pair in zip(self.layers, context, strict=True):
            x = layer(x, cos, sin, pair, hidden_context)
        drafted: Tensor = self.norm(x[:, :, self.config.block_size - self.config.draft_length :])
        return drafted

    def correction(self, hidden: Tensor, path: Tensor) -> Tensor:
        """The correction before its last matrix, `[..., draft_length, emb_dim]`; zero below
        `pure_draft_prefix_len`.

        `hidden` `[..., draft_length, hidden]` from `forward`; `path` `[..., draft_length, hidden]` the
        target's embeddings of the anchor token and the tokens chosen after it: depth d is corrected by
        `path[..., :d + 1, :]`.
        """
        flat = path.flatten(0, -3)
        states, _ = self.prefix_gru(flat)
        states = states.view(*path.shape[:-1], -1).to(hidden.dtype)
        inner = F.silu(self.embed_proj[0](torch.cat([hidden, states], dim=-1)))
        depths = torch.arange(inner.shape[-2], device=inner.device)
        return inner * (depths >= self.config.pure_draft_prefix_len)[:, None]

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for `positions` `[...]`: `[..., 1, head_dim]`, float32."""
        half = self.config.head_dim // 2
        powers = torch.arange(half, device=positions.device, dtype=torch.float32) / half
        angles = positions[..., None].float() * self.config.rope_theta**-powers
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves paired as in Llama; `x` `[..., heads, head_dim]`, dtype kept."""
    left, right = x.float().chunk(2, dim=-1)
    turned = torch.cat([-right, left], dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)
