"""How the nodes of a tree are scored: the three scorers of the ablation (DominoTree, arXiv 2607.08642)."""

from typing import Protocol

import torch
from torch import Tensor

from dominotree.drafters.domino import DominoHead, spread, to_target_ids
from dominotree.tree.heap import PathDependence, Trie
from dominotree.tree.order import check_finite, top_candidates


class Scorer(Protocol):
    """Log-probabilities of the candidates of one round: B sequences, K depths, M candidates a depth.

    A *lane* is a node whose children are being scored; its state, `[S]`, is what the scorer has to know of
    the path to it. S may be 0.
    """

    @property
    def candidates(self) -> Tensor:
        """`[B, K, M]` int64, draft-vocabulary indices: base logit descending, then index ascending."""
        ...

    @property
    def tokens(self) -> Tensor:
        """`[B, K, M]` int64, the same candidates as target token ids."""
        ...

    def root_state(self) -> Tensor:
        """State of the empty path, `[B, S]`."""
        ...

    def advance(self, state: Tensor, draft_ids: Tensor) -> Tensor:
        """States `[..., S]` after choosing draft-vocabulary indices `[...]`."""
        ...

    def log_probs(self, depth: int, state: Tensor) -> Tensor:
        """Log-probabilities of the candidates of `depth`, fp32 `[B, L, M]`, for states `[B, L, S]`."""
        ...

    def log_probs_at(self, sequence: int, depth: int, state: Tensor) -> Tensor:
        """The same for one lane of one sequence, fp32 `[M]`, for its state `[1, S]`."""
        ...

    def trie(self) -> Trie | None:
        """The scores in the form that the C kernel reads, on a CPU; None where they have no such form."""
        ...


class SharedScorer:
    """A scorer whose log-probabilities, fp32 `[B, K, M]`, do not depend on the path."""

    def __init__(self, candidates: Tensor, log_prob: Tensor, d2t: Tensor | None) -> None:
        """Take candidates, int64 `[B, K, M]`, `log_prob [B, K, M]` and the draft vocabulary's offsets."""
        self.candidates = candidates
        self._log_prob, self._d2t = log_prob, d2t

    @property
    def tokens(self) -> Tensor:
        """Target token ids of the candidates, `[B, K, M]`."""
        return to_target_ids(self.candidates, self._d2t)

    def root_state(self) -> Tensor:
        """An empty state, `[B, 0]`."""
        return self._log_prob.new_empty(self._log_prob.shape[0], 0)

    def advance(self, state: Tensor, draft_ids: Tensor) -> Tensor:
        """The empty states `[..., 0]` as they are, one a choice."""
        return state

    def log_probs(self, depth: int, state: Tensor) -> Tensor:
        """Log-probabilities `[B, L, M]` of the candidates of `depth`."""
        return self._log_prob[:, depth, None].expand(-1, state.shape[1], -1)

    def log_probs_at(self, sequence: int, depth: int, state: Tensor) -> Tensor:
        """Log-probabilities `[M]` of one lane."""
        return self._log_prob[sequence, depth]

    def trie(self) -> Trie | None:
        """See `Scorer.trie`."""
        return Trie(self.candidates, self._d2t, self._log_prob)


class MarginalScorer(SharedScorer):
    """Base logits, normalised over the whole (draft) vocabulary: `ddtree`, `caddtree` and `marginal`."""

    def __init__(self, base: Tensor, width: int, d2t: Tensor | None = None, words: int = 0) -> None:
        """Take base logits `[B, K, V']`, the candidate width M (0: V') and the draft vocabulary's offsets.

        The last `words` columns are each sequence's own (`drafters.domino.spread`). Raises `NumericalError` on a CPU
        where a depth has no finite largest logit.
        """
        logits, candidates = top_candidates(base.detach(), width)
        log_prob = logits - torch.logsumexp(base.detach().float(), dim=-1, keepdim=True)
        super().__init__(spread(candidates, base.shape[-1], words), log_prob, d2t)


class ConditionalScorer:
    """Logits corrected along each node's own path, normalised within the M-slice: `dominotree`.

    Depths below the head's `prefix_len` use base logits normalised over the whole (draft) vocabulary.
    """

    def __init__(
        self,
        base: Tensor,
        hidden: Tensor,
        root_ids: Tensor,
        head: DominoHead,
        width: int,
        scale: Tensor | None = None,
    ) -> None:
        """Take base logits `[B, K, V']`, the backbone's output `[B, K, H]`, target ids `[B]` of the roots.

        `width` is M, 0 for V'; `scale` `[B]` multiplies every correction (None: 1). Raises `NumericalError` on a CPU
        where a depth has no finite largest logit.
        """
        self._logits, columns = top_candidates(base.detach(), width)
        self.candidates = spread(columns, base.shape[-1], head.words)
        self._base, self._hidden, self._root_ids, self._head = base.detach(), hidden, root_ids, head
        self._scale = scale
        self._prefix = min(head.prefix_len, base.shape[1])
        # All of V' as candidates: one product with the whole projection beats a sorted copy of it per depth.
        self._whole = self.candidates.shape[-1] == base.shape[-1]
        # Made when first asked for; the C kernel makes its own.
        self._given_part: Tensor | None = None
        self._given_prefix: Tensor | None = None
        self._given_rows: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """Target token ids of the candidates, `[B, K, M]`."""
        return self._head.target_ids(self.candidates)

    @property
    def _hidden_part(self) -> Tensor:
        """What the backbone's output adds inside the correction, `[B, K, E]`."""
        if self._given_part is None:
            self._given_part = self._head.hidden_part(self._hidden)
            check_finite(self._given_part)
        return self._given_part

    @property
    def _prefix_log_prob(self) -> Tensor:
        """Log-probabilities at the depths without a correction, `[B, prefix, M]`."""
        if self._given_prefix is None:
            normaliser = torch.logsumexp(self._base[:, : self._prefix].float(), dim=-1, keepdim=True)
            self._given_prefix = self._logits[:, : self._prefix] - normaliser
        return self._given_prefix

    @property
    def _candidate_rows(self) -> Tensor:
        """The candidates' rows of the second projection, `[B, K, E, M]`, times the scale."""
        if self._given_rows is None:
            rows = self._head.rows(self.candidates).transpose(-1, -2)
            self._given_rows = rows if self._scale is None else rows * self._scale[:, None, None, None]
        return self._given_rows

    def root_state(self) -> Tensor:
        """Packed state of the empty path, `[B, 4G+E]`."""
        return self._head.pack(self._head.initial_state(self._root_ids))

    def advance(self, state: Tensor, draft_ids: Tensor) -> Tensor:
        """Packed states `[..., 4G+E]` after choosing draft-vocabulary indices `[...]`."""
        return self._head.step(state, draft_ids)

    def log_probs(self, depth: int, state: Tensor) -> Tensor:
        """Log-probabilities `[B, L, M]` of the candidates of `depth`, for packed states `[B, L, 4G+E]`."""
        if depth < self._prefix:
            return self._prefix_log_prob[:, depth, None].expand(-1, state.shape[1], -1)
        inner = self._head.inner(self._hidden_part[:, depth, None], state)
        logits = self._logits[:, depth, None]
        if self._whole:
            ids = self.candidates[:, depth, None].expand(-1, state.shape[1], -1)
            inner = inner if self._scale is None else inner * self._scale[:, None, None]
            corrected = logits + self._head.correction_of(inner, ids)
        else:
            corrected = torch.baddbmm(logits, inner, self._candidate_rows[:, depth])
        return torch.log_softmax(corrected, dim=-1)

    def log_probs_at(self, sequence: int, depth: int, state: Tensor) -> Tensor:
        """Log-probabilities `[M]` of one lane."""
        if depth < self._prefix:
            return self._prefix_log_prob[sequence, depth]
        logits = self._logits[sequence, depth]
        inner = self._head.inner(self._hidden_part[sequence, depth, None], state)
        if self._whole:
            inner = inner if self._scale is None else inner * self._scale[sequence]
            corrected = logits + self._head.correction_of(inner, self.candidates[sequence, depth, None])
        else:
            corrected = torch.addmm(logits, inner, self._candidate_rows[sequence, depth])
        return torch.log_softmax(corrected, dim=-1)[0]

    def trie(self) -> Trie | None:
        """See `Scorer.trie`; None where the vocabulary is too large to have its GRU inputs tabulated."""
        head = self._head
        if not head.has_trie:
            return None
        path = PathDependence(self._base, self._logits, self._hidden, self._root_ids, self._scale, head)
        return Trie(self.candidates, head.own_d2t, path, head.word_ids)


class StaticScorer(SharedScorer):
    """Logits corrected once, along the greedy path, and shared by all nodes of a depth: `static`.

    The greedy path takes, at every depth, the candidate with the largest corrected logit within the M-slice
    (the largest base logit at prefix depths); ties go to the earlier candidate.
    """

    def __init__(
        self,
        base: Tensor,
        hidden: Tensor,
        root_ids: Tensor,
        head: DominoHead,
        width: int,
        scale: Tensor | None = None,
    ) -> None:
        """Take what `ConditionalScorer` takes."""
        along = ConditionalScorer(base, hidden, root_ids, head, width, scale)
        state = along.root_state()[:, None]
        rows = []
        for depth in range(base.shape[1]):
            rows.append(along.log_probs(depth, state)[:, 0])
            best = rows[-1].argmax(dim=-1, keepdim=True)
            state = along.advance(state, along.candidates[:, depth].gather(1, best))
        super().__init__(along.candidates, torch.stack(rows, dim=1), head.d2t)
