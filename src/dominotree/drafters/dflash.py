"""The DFlash backbone (arXiv 2602.06036): one pass proposes for all positions of a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from dominotree.drafters.checkpoint import draft_token_ids
from dominotree.drafters.config import DrafterConfig
from dominotree.drafters.domino import DominoHead
from dominotree.drafters.words import ContextWords, Vocabulary
from dominotree.errors import InvalidRequest
from dominotree.targets.attention import LayerShape, attention_kind
from dominotree.targets.base import Lender
from dominotree.targets.cache import SlotCache
from dominotree.targets.config import rope_table
from dominotree.targets.elementwise import normalise
from dominotree.targets.layer import Weights, read_layer
from dominotree.targets.linear import Linear
from dominotree.targets.rows import Rows, Segment
from dominotree.targets.stack import Stack


@dataclass(frozen=True)
class Draft:
    """What the backbone says about the K positions behind each root.

    `roots` `[batch]` token ids; in the drafter's dtype `hidden` `[batch, K, H]` and `base` `[batch, K, V']`, logits
    over the draft vocabulary (the whole vocabulary where there is none), behind it the words of `texts`, if any were
    given: -inf where a text has fewer than another.
    """

    roots: torch.Tensor
    hidden: torch.Tensor
    base: torch.Tensor
    texts: Sequence[ContextWords] = ()

    def part(self, members: Sequence[int]) -> Draft:
        """Those sequences of the batch."""
        rows = list(members)
        texts = [self.texts[row] for row in rows] if self.texts else ()
        spare = max(map(len, self.texts), default=0) - max(map(len, texts), default=0)  # columns of others' words
        base = self.base[rows][..., : self.base.shape[-1] - spare]
        return Draft(self.roots[rows], self.hidden[rows], base, texts)


class Drafter:
    """A DFlash backbone with, for Domino, its correction head; bound to the target whose embeddings it borrows.

    Stateless but for its weights. The context (keys and values of the fused target features of all committed
    positions before the root) lives in a `SlotCache` of the caller's.
    """

    def __init__(self, config: DrafterConfig, tensors: Mapping[str, torch.Tensor], target: Lender) -> None:
        """`tensors` as `read_checkpoint` returns them, checked against the target by `check_fits_target`."""
        self.config = config
        self.target = target
        dtype, device = target.dtype, target.device
        int8 = dtype == torch.bfloat16  # half of what a draft waits for memory; the target judges it anyway
        weights = Weights(tensors, dtype, device, owner="the drafter", int8=int8)
        hidden = config.hidden_size
        self._fc = weights.linear(["fc"], (hidden,), len(config.target_layer_ids) * hidden)
        self._hidden_norm = weights.take("hidden_norm.weight", (hidden,))
        norm = weights.take("norm.weight", (hidden,))
        shape = LayerShape(
            hidden=hidden,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            qk_norm=True,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
        )
        layers = [read_layer(weights, f"layers.{i}.", shape) for i in range(config.num_hidden_layers)]
        self._to_context = _context_projection(weights, config)
        self.token_ids = self._draft_tokens(tensors)
        self.d2t = tensors["d2t"].to(device) if "d2t" in tensors else None
        head = target.head_weight()
        output = Linear(head if self.token_ids is None else head[self.token_ids], dtype=dtype, int8=int8)
        self._stack = Stack(layers, norm, output)
        self.head = self._correction_head(tensors) if config.is_domino else None
        self._known = frozenset() if self.token_ids is None else frozenset(self.token_ids.tolist())
        self._attention = attention_kind(dtype, device)
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None

    def reading(self, **settings: Any) -> Drafter:
        """The same weights under a config with other `settings`: fields on which no weight's shape depends."""
        other = copy(self)
        other.config, other._rope = replace(self.config, **settings), None
        if self.head is not None:
            other.head = copy(self.head)
            other.head.prefix_len = other.config.pure_draft_prefix_len
        return other

    @property
    def draft_length(self) -> int:
        """K, the depths a draft has."""
        return self.config.draft_length

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target layers whose outputs feed `extend`."""
        return self.config.target_layer_ids

    def new_cache(self, slots: int, length: int) -> SlotCache:
        """Context for `slots` sequences of up to `length` committed positions, a block behind them included."""
        c, columns = self.config, length + self.config.block_size
        self.reach(columns)
        target = self.target
        dtype = torch.float32 if target.device.type == "cpu" and target.dtype == torch.float16 else target.dtype
        return SlotCache(c.num_hidden_layers, slots, c.num_key_value_heads, columns, c.head_dim, dtype, target.device)

    def reach(self, positions: int) -> None:
        """Prepares for that many positions; `new_cache` does it for its own."""
        c = self.config
        if self._rope is None or self._rope[0].shape[0] < positions:
            rope = {"rope_type": "default", "rope_theta": c.rope_theta}
            self._rope = rope_table(rope, c.head_dim, positions, self.target.device)

    @torch.inference_mode()
    def extend(self, cache: SlotCache, slots: Sequence[int], counts: Sequence[int], features: torch.Tensor) -> None:
        """Appends `counts[i]` committed positions to slot `slots[i]`.

        `features` `[sum(counts), len(feature_layers) * H]`: the target's layer outputs there, in the same order.
        """
        if any(cache.lengths[slot] + count > cache.length for slot, count in zip(slots, counts, strict=True)):
            raise InvalidRequest(f"a drafter's context has room for {cache.length} positions; raise --context")
        added = [Segment(slot, cache.lengths[slot], [0] * count) for slot, count in zip(slots, counts, strict=True)]
        self.encode(cache, Rows.of(added), features)
        for slot, count in zip(slots, counts, strict=True):
            cache.lengths[slot] += count

    @torch.inference_mode()
    def encode(self, cache: SlotCache, rows: Rows, features: torch.Tensor) -> None:
        """Writes every layer's keys and values for `features` `[rows, len(feature_layers) * H]` where `rows` says."""
        c = self.config
        assert self._rope is not None, "new_cache or reach comes first"
        attend = self._attention(cache, rows, c.num_attention_heads, *self._rope)
        if self._stack.encodes(attend, features, self._fc, self._hidden_norm, self._to_context):
            return
        fused = normalise(self._fc(features), self._hidden_norm, c.rms_norm_eps)
        both = self._to_context(fused).chunk(c.num_hidden_layers, dim=1)
        for i, layer in enumerate(self._stack.layers):
            attend.keep(i, both[i], layer.head_norms)

    @torch.inference_mode()
    def draft(
        self,
        cache: SlotCache,
        slots: Sequence[int],
        roots: Sequence[int],
        *,
        depths: int | None = None,
        texts: Sequence[ContextWords] = (),
    ) -> Draft:
        """One pass of the backbone over `[root, MASK, MASK, ...]` behind each slot's context.

        `depths` leaves out the masks of depths from there on; None: all K are drafted. `texts` are the words of each
        sequence, which may be proposed too.
        """
        c, device, batch = self.config, self.target.device, len(slots)
        assert self._rope is not None, "new_cache comes first"
        depths = c.draft_length if depths is None else min(depths, c.draft_length)
        size = c.block_size - c.draft_length + depths
        if any(cache.lengths[slot] + size > cache.length for slot in slots):
            raise InvalidRequest(f"a drafter's context has room for {cache.length} positions; raise --context")
        block = torch.tensor([[root, *[c.mask_token_id] * (size - 1)] for root in roots], device=device)
        rows = Rows.blocks(slots, [cache.lengths[slot] for slot in slots], size)
        attend = self._attention(cache, rows, c.num_attention_heads, *self._rope)
        x = self.target.embed(block.flatten())
        picked = None if c.shift_label else [i for i in range(batch * size) if i % size]
        room = max((len(text) for text in texts), default=0)
        passed = self._stack(x, attend, picked=picked, room=room)
        hidden, base = passed.hidden.view(batch, depths, -1), passed.logits.view(batch, depths, -1)
        if room:
            for row, text in enumerate(texts):
                text.score(hidden[row], base[row], room)
        return Draft(block[:, 0], hidden, base, texts)

    def words(self) -> ContextWords | None:
        """A new text's words, to be read and given to `draft`; None for a drafter that has not learned to use them."""
        size, device = self.config.context_vocab_size, self.target.device
        if not size or self.token_ids is None:
            return None
        output, head = self.target.head_weight(), self.head

        def inputs(ids: torch.Tensor) -> torch.Tensor:
            if head is None:
                return torch.empty(len(ids), 0)
            return head.rare_input(int(ids)) if len(ids) == 1 else head.input_part(ids.to(device))

        return ContextWords(size, self._known, lambda ids: output[ids.to(device)], inputs, self.target.dtype)

    def vocabulary(self, draft: Draft) -> Vocabulary:
        """What the columns of a draft's base logits stand for."""
        return Vocabulary(self.d2t, self.head).extended(draft.texts)

    def _correction_head(self, tensors: Mapping[str, torch.Tensor]) -> DominoHead:
        used = dict(tensors)
        if self.token_ids is not None:
            used["embed_proj.2.weight"] = used["embed_proj.2.weight"][: len(self.token_ids)]
        return DominoHead.from_tensors(used, self.target.embed, prefix_len=self.config.pure_draft_prefix_len)

    def _draft_tokens(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Token ids the drafter proposes, `[V']`; None: every token of the target."""
        ids = draft_token_ids(tensors)
        if ids is None and self.config.vocab_size != self.target.vocab_size:
            ids = torch.arange(min(self.config.vocab_size, self.target.vocab_size))  # vocabularies padded differently
        return None if ids is None else ids.to(self.target.device)


def _context_projection(weights: Weights, config: DrafterConfig) -> Linear:
    """Keys and values of one layer after the other from fused features: `H -> layers * 2 * kv_heads * head_dim`."""
    names = [f"layers.{i}.self_attn.{part}_proj" for i in range(config.num_hidden_layers) for part in "kv"]
    width = config.num_key_value_heads * config.head_dim
    return weights.linear(names, (width,) * len(names), config.hidden_size, config.attention_bias)
