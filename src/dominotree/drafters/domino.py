"""The correction head of a Domino drafter (Domino, arXiv 2605.29707), in the form inference uses."""

from collections.abc import Callable, Mapping
from copy import copy
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dominotree.errors import InvalidCheckpoint

TABLE_BYTES = 64 * 2**20
"""Largest precomputed or widened copy of a weight the head makes for speed."""

RARE_TOKENS = 512
"""Tokens outside the table whose GRU inputs are kept."""

_RELEASED_NAMES = (
    "prefix_gru.weight_ih_l0",
    "prefix_gru.weight_hh_l0",
    "embed_proj.0.weight",
    "embed_proj.2.weight",
)

Embed = Callable[[Tensor], Tensor]
"""Target token ids of any shape `[...]` to embeddings `[..., H]`."""


def to_target_ids(draft_ids: Tensor, d2t: Tensor | None) -> Tensor:
    """Target token ids of draft-vocabulary indices: `index + d2t[index]`, without `d2t` the index."""
    return draft_ids if d2t is None else draft_ids + d2t[draft_ids]


def offsets(d2t: Tensor | None, word_ids: Tensor | None) -> Tensor | None:
    """`d2t` `[V']` with the offsets of words behind it whose target ids are `word_ids` `[n]`."""
    if d2t is None or word_ids is None:
        return d2t
    places = torch.arange(len(d2t), len(d2t) + len(word_ids), device=d2t.device)
    return torch.cat([d2t, word_ids - places])


def spread(columns: Tensor, vocab: int, words: int) -> Tensor:
    """Draft-vocabulary indices of columns `[B, ...]` of base logits with `vocab` columns, no two of different tokens.

    The last `words` columns are each sequence's own: sequence b's become `vocab - words + b * words` and so on.
    """
    if not words or columns.shape[0] == 1:
        return columns
    own = torch.arange(columns.shape[0], device=columns.device).view(-1, *[1] * (columns.dim() - 1)) * words
    return torch.where(columns >= vocab - words, columns + own, columns)


class DominoHead:
    """A prefix GRU and a low-rank correction of the base logits.

    H is the target's hidden size, G the GRU's, E the rank of the correction, V' the draft vocabulary (the
    target's own where there is no `d2t`). States and results are fp32 whatever the weights' dtype.

    A *packed* state `[..., 4G+E]` is a state's products with the GRU's recurrent weight (3G) and with the
    state half of the first projection (E), then the state itself (G). One matrix product makes both, so a
    node's children and its own correction share it.
    """

    def __init__(
        self,
        gru_ih: Tensor,
        gru_hh: Tensor,
        proj_in: Tensor,
        proj_out: Tensor,
        embed: Embed,
        *,
        prefix_len: int = 0,
        d2t: Tensor | None = None,
    ) -> None:
        """Take the weights `gru_ih [3G, H]`, `gru_hh [3G, G]`, `proj_in [E, H+G]`, `proj_out [V', E]`.

        `embed` is the target's embedding, `prefix_len` the number of leading depths left uncorrected, and
        `d2t [V']` int64 the offset from a draft index to its target id. Raises `InvalidCheckpoint` where the
        shapes do not fit each other.
        """
        _check_shapes(gru_ih, gru_hh, proj_in, proj_out, d2t)
        if prefix_len < 0:
            raise InvalidCheckpoint(f"pure_draft_prefix_len is {prefix_len}; it must be 0 or more")
        self.prefix_len = prefix_len
        self.hidden_size = gru_ih.shape[1]
        self.state_size = gru_hh.shape[1]
        self.rank = proj_in.shape[0]
        self.vocab_size = proj_out.shape[0]
        self.own_d2t = None if d2t is None else d2t.to(device=proj_out.device, dtype=torch.int64)
        self.words = 0
        self.word_ids: Tensor | None = None
        self.word_inputs: Tensor | None = None
        self._embed = embed
        self._gru_ih = gru_ih.detach().float()
        hidden_half, state_half = torch.split(proj_in.detach().float(), [self.hidden_size, self.state_size], dim=1)
        self._hidden_half = hidden_half.t().contiguous()  # [H, E]
        self._from_state = torch.cat([gru_hh.detach().float(), state_half]).t().contiguous()  # [G, 3G+E]
        # For the C kernel: rows padded to whole vectors, in bf16 where that loses nothing.
        kept = torch.bfloat16 if gru_hh.dtype == proj_in.dtype == torch.bfloat16 else torch.float32
        self.kernel_state, self.kernel_hidden = (
            F.pad(weight, (0, -weight.shape[1] % 16)).to(kept) for weight in (self._from_state, self._hidden_half)
        )
        fits = proj_out.numel() * 4 <= TABLE_BYTES
        self.proj_out = proj_out.detach().float() if fits else proj_out.detach()  # [V', E]
        self.kernel_proj_out = proj_out.detach() if proj_out.dtype == torch.bfloat16 else self.proj_out
        self.input_table = self._make_input_table()
        known = self.target_ids(torch.arange(self.vocab_size, device=proj_out.device))
        self.rare_input = lru_cache(RARE_TOKENS)(self._rare_input)
        self._place = {} if self.input_table is None else {token: i for i, token in enumerate(known.tolist())}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], embed: Embed, *, prefix_len: int) -> "DominoHead":
        """Make the head from a checkpoint's tensors, under their released names.

        A prefix `logit_head.` or `model.` is allowed, tensors of the backbone are ignored and `d2t` is taken
        where present. Raises `InvalidCheckpoint` for a missing tensor or a shape that does not fit.
        """
        named = {n.removeprefix("logit_head.").removeprefix("model."): t for n, t in tensors.items()}
        for name in _RELEASED_NAMES:
            if name not in named:
                raise InvalidCheckpoint(f"the checkpoint has no tensor {name}; a Domino drafter needs it")
        gru_ih, gru_hh, proj_in, proj_out = (named[name] for name in _RELEASED_NAMES)
        return cls(gru_ih, gru_hh, proj_in, proj_out, embed, prefix_len=prefix_len, d2t=named.get("d2t"))

    def extended(self, word_ids: Tensor, inputs: Tensor) -> "DominoHead":
        """The same head with words behind V': tokens that it leaves uncorrected.

        `word_ids` `[B * X]` are the target ids, X words a sequence, and `inputs` `[B, X, 3G]` fp32 the input parts.
        """
        other = copy(self)
        other.word_ids, other.words, other.word_inputs = word_ids, inputs.shape[1], inputs.flatten(0, 1)
        return other

    @property
    def d2t(self) -> Tensor | None:
        """Offsets int64 `[V' + B * X]` from a draft index to its target id; None where those are the same."""
        return offsets(self.own_d2t, self.word_ids)

    @property
    def has_trie(self) -> bool:
        """Whether the C kernel can score paths: the GRU's inputs are tabulated and the weights of a dtype it reads."""
        return self.input_table is not None and self.proj_out.dtype in (torch.float32, torch.bfloat16)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids `[...]` of draft-vocabulary indices `[...]`."""
        return to_target_ids(draft_ids, self.d2t)

    def initial_state(self, root_ids: Tensor) -> Tensor:
        """State of the empty path, fp32 `[B, G]`, from the root's target token ids `[B]`."""
        # From a zero state the reset gate has nothing to reset, so its third of the weight is not read.
        inputs = F.linear(self._embed(root_ids).detach().float(), self._gru_ih[self.state_size :])
        update, new = inputs.chunk(2, -1)
        return (1 - torch.sigmoid(update)) * torch.tanh(new)

    def root_inputs(self, root_ids: Tensor) -> Tensor:
        """The GRU's input products of the roots, fp32 `[B, 3G]`, out of the table where it holds them."""
        table = self.input_table
        if table is None:
            return self.input_part(root_ids)
        tokens = root_ids.tolist()
        places = [self._place.get(token, -1) for token in tokens]
        rows = [table[p : p + 1] if p >= 0 else self.rare_input(t) for p, t in zip(places, tokens, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def advance(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """State after choosing target tokens `[...]` from states `[..., G]`, fp32 `[..., G]`."""
        return self._gru_cell(self.pack(state), self.input_part(token_ids))

    def hidden_part(self, h: Tensor) -> Tensor:
        """What the backbone's output `h [..., H]` adds inside the first projection, fp32 `[..., E]`."""
        return h.detach().float() @ self._hidden_half

    def correction(self, hidden_part: Tensor, state: Tensor, candidates: Tensor | None = None) -> Tensor:
        """Correction of the base logits, fp32 `[..., M]`.

        `hidden_part [..., E]`, `state [..., G]` and `candidates [..., M]` (draft-vocabulary indices, None for
        all V') broadcast over their leading dimensions.
        """
        inner = F.silu(hidden_part + state @ self._from_state[:, 3 * self.state_size :])
        if candidates is None:
            return self.full_correction(inner)
        return (self.rows(candidates) @ inner.unsqueeze(-1)).squeeze(-1)

    def pack(self, state: Tensor) -> Tensor:
        """The packed form, fp32 `[..., 4G+E]`, of states `[..., G]`."""
        return torch.cat([state @ self._from_state, state], dim=-1)

    def step(self, packed: Tensor, draft_ids: Tensor) -> Tensor:
        """Packed states after choosing draft-vocabulary indices `[...]` from packed states `[..., 4G+E]`."""
        if self.input_table is None:
            inputs = self.input_part(self.target_ids(draft_ids))
        else:
            inputs = F.embedding(draft_ids.clamp_max(self.vocab_size - 1), self.input_table)
            if self.word_inputs is not None:
                word = draft_ids - self.vocab_size
                inputs = torch.where((word >= 0)[..., None], F.embedding(word.clamp_min(0), self.word_inputs), inputs)
        return self.pack(self._gru_cell(packed, inputs))

    def inner(self, hidden_part: Tensor, packed: Tensor) -> Tensor:
        """What enters the second projection, fp32 `[..., E]`, from `hidden_part` and packed states."""
        return F.silu(hidden_part + packed.narrow(-1, 3 * self.state_size, self.rank))

    def rows(self, candidates: Tensor) -> Tensor:
        """Rows of the second projection for draft-vocabulary indices `[...]`, fp32 `[..., E]`; zero for words."""
        rows = F.embedding(candidates.clamp_max(self.vocab_size - 1), self.proj_out).float()
        return rows if not self.words else rows * (candidates < self.vocab_size)[..., None]

    def full_correction(self, inner: Tensor) -> Tensor:
        """The second projection over all V', fp32 `[..., V']`, of `inner [..., E]`."""
        return F.linear(inner.to(self.proj_out.dtype), self.proj_out).float()

    def correction_of(self, inner: Tensor, draft_ids: Tensor) -> Tensor:
        """The second projection of `inner [..., E]` at draft-vocabulary indices `[..., M]`, by way of all V'; fp32."""
        full = F.pad(self.full_correction(inner), (0, min(self.words, 1)))  # words share a zero
        return full.gather(-1, draft_ids.clamp_max(full.shape[-1] - 1))

    def _gru_cell(self, packed: Tensor, inputs: Tensor) -> Tensor:
        """One step of `torch.nn.GRU` (gates r, z, n): states `[..., G]` from input products `[..., 3G]`."""
        size = self.state_size
        recurrent, recurrent_new, _, state = packed.split_with_sizes([2 * size, size, self.rank, size], -1)
        inputs, inputs_new = inputs.split_with_sizes([2 * size, size], -1)
        reset, update = torch.sigmoid(inputs + recurrent).chunk(2, -1)
        new = torch.tanh(torch.addcmul(inputs_new, reset, recurrent_new))
        return torch.lerp(new, state, update)

    def input_part(self, token_ids: Tensor) -> Tensor:
        """The GRU's input products, fp32 `[..., 3G]`, of target token ids `[...]`."""
        return F.linear(self._embed(token_ids).detach().float(), self._gru_ih)

    def _rare_input(self, token: int) -> Tensor:
        """The GRU's input products `[1, 3G]` of one target token; texts repeat those that the table lacks."""
        return self.input_part(torch.tensor([token], device=self.proj_out.device))

    def _make_input_table(self) -> Tensor | None:
        """`[V', 3G]`: the GRU's input product of every draft token, where that is small."""
        if self.vocab_size * 3 * self.state_size * 4 > TABLE_BYTES:
            return None
        ids = torch.arange(self.vocab_size, device=self.proj_out.device)
        with torch.no_grad():
            return self.input_part(self.target_ids(ids))


def _check_shapes(gru_ih: Tensor, gru_hh: Tensor, proj_in: Tensor, proj_out: Tensor, d2t: Tensor | None) -> None:
    gates, hidden = gru_ih.shape
    size, rank, vocab = gates // 3, proj_in.shape[0], proj_out.shape[0]
    expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "prefix_gru.weight_ih_l0": (gru_ih, (3 * size, hidden)),
        "prefix_gru.weight_hh_l0": (gru_hh, (3 * size, size)),
        "embed_proj.0.weight": (proj_in, (rank, hidden + size)),
        "embed_proj.2.weight": (proj_out, (vocab, rank)),
    }
    if d2t is not None:
        expected["d2t"] = (d2t, (vocab,))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise InvalidCheckpoint(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
