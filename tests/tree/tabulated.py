"""Scorers for tests: a table of scores that every builder reads, and small random heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dominotree.drafters.domino import DominoHead
from dominotree.drafters.words import ContextWords, Vocabulary
from dominotree.tree.tree import Trees

PATHS = 257


class TabulatedScorer:
    """Log-probabilities `[B, K, PATHS, M]`, looked up by a hash of the path: equal bits for all builders."""

    def __init__(self, log_prob: Tensor) -> None:
        batch, levels, _, width = log_prob.shape
        self.log_prob = log_prob
        self.candidates = torch.arange(width).expand(batch, levels, width).contiguous()
        self.tokens = 1000 + self.candidates

    def root_state(self) -> Tensor:
        return torch.zeros(self.log_prob.shape[0], 1, dtype=torch.int64)

    def advance(self, state: Tensor, draft_ids: Tensor) -> Tensor:
        return (state * 31 + draft_ids[..., None] + 1) % PATHS

    def log_probs(self, depth: int, state: Tensor) -> Tensor:
        rows = state.expand(-1, -1, self.log_prob.shape[-1])
        return self.log_prob[:, depth].gather(1, rows)

    def trie(self) -> None:
        return None

    def log_probs_at(self, sequence: int, depth: int, state: Tensor) -> Tensor:
        return self.log_prob[sequence, depth, state[0, 0]]


def tabulated(
    batch: int, levels: int, width: int, *, seed: int, scale: float = 2.0, quantum: float = 0.0
) -> TabulatedScorer:
    """A table from random logits; `quantum` rounds them to its multiples, so that scores tie."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, levels, PATHS, width, generator=rng) * scale
    if quantum:
        logits = (logits / quantum).round() * quantum
    return TabulatedScorer(torch.log_softmax(logits, dim=-1))


class Round(NamedTuple):
    """The inputs of a scorer."""

    base: Tensor
    hidden: Tensor
    roots: Tensor
    head: DominoHead


def random_head(
    *,
    hidden: int = 24,
    state: int = 16,
    rank: int = 8,
    vocab: int = 90,
    prefix_len: int = 1,
    offsets: bool = False,
    seed: int = 0,
) -> tuple[DominoHead, dict[str, Tensor], Tensor]:
    """A head, its tensors under their released names, and the embedding table `[2 * vocab, hidden]`."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {
        "prefix_gru.weight_ih_l0": torch.randn(3 * state, hidden, generator=rng) / hidden**0.5,
        "prefix_gru.weight_hh_l0": torch.randn(3 * state, state, generator=rng) / state**0.5,
        "embed_proj.0.weight": torch.randn(rank, hidden + state, generator=rng),
        "embed_proj.2.weight": torch.randn(vocab, rank, generator=rng),
    }
    if offsets:
        ids = torch.randperm(2 * vocab, generator=rng)[:vocab].sort().values
        tensors["d2t"] = ids - torch.arange(vocab)
    embedding = torch.randn(2 * vocab, hidden, generator=rng)
    head = DominoHead.from_tensors(tensors, lambda ids: embedding[ids], prefix_len=prefix_len)
    return head, tensors, embedding


def random_round(batch: int = 2, levels: int = 6, *, seed: int = 0, **shape: int) -> Round:
    """Random logits and hidden states for a random head."""
    head, tensors, _ = random_head(seed=seed, **shape)
    vocab, hidden = tensors["embed_proj.2.weight"].shape[0], head.hidden_size
    rng = torch.Generator().manual_seed(seed + 1)
    base = torch.randn(batch, levels, vocab, generator=rng) * 2
    roots = torch.randint(0, vocab, (batch,), generator=rng)
    return Round(base, torch.randn(batch, levels, hidden, generator=rng), roots, head)


def with_words(base: Tensor, head: DominoHead, words: int, seed: int = 0) -> tuple[Tensor, DominoHead]:
    """The same round with up to `words` words behind each sequence's draft vocabulary, and likely ones."""
    rng = torch.Generator().manual_seed(seed)
    known = head.target_ids(torch.arange(head.vocab_size)).tolist()
    outside = [token for token in range(2 * head.vocab_size) if token not in known]
    texts = []
    for row in range(base.shape[0]):
        text = ContextWords(words, frozenset(known), lambda ids: ids[:, None].float(), head.input_part, base.dtype)
        text.read([outside[i] for i in torch.randperm(len(outside), generator=rng).tolist()[: max(words - row, 0)]])
        texts.append(text)
    extended = Vocabulary(head.own_d2t, head).extended(texts).head
    assert extended is not None
    behind = torch.randn(*base.shape[:2], words, generator=rng).to(base.dtype) * 2 + 3
    for row, text in enumerate(texts):
        behind[row, :, len(text) :] = -torch.inf
    return torch.cat([base, behind], dim=-1), extended


def assert_same(a: Trees, b: Trees) -> None:
    """Equal to the bit, but for rows of padding at the end."""
    assert a.count.tolist() == b.count.tolist()
    size = int(a.count.max()) if a.batch else 0
    for name in ("token", "parent", "depth", "score"):
        x, y = getattr(a, name), getattr(b, name)
        assert torch.equal(x[:, :size], y[:, :size]), name
        assert x.dtype == y.dtype


def assert_close(a: Trees, b: Trees, tolerance: float = 1e-5) -> None:
    """The same trees up to swaps of nodes whose scores differ by no more than `tolerance`, relative above 1."""
    assert a.count.tolist() == b.count.tolist()
    for x, y in zip(range(a.batch), range(b.batch), strict=True):
        one, two = scored_paths(a, x), scored_paths(b, y)
        for path in one.keys() & two.keys():
            assert abs(one[path] - two[path]) <= tolerance * max(1.0, abs(one[path]))
        last = min([*one.values(), *two.values()], default=0.0)
        for path in one.keys() ^ two.keys():
            assert abs({**one, **two}[path] - last) <= tolerance * max(1.0, abs(last))
        scores = torch.tensor(sorted(one.values())), torch.tensor(sorted(two.values()))
        assert torch.allclose(*scores, atol=tolerance, rtol=tolerance)


def scored_paths(trees: Trees, b: int) -> dict[tuple[int, ...], float]:
    """Every node of tree b as its tokens from depth 0, with its score."""
    tree = trees.single(b)
    return {tuple(tree.token[i] for i in tree.path(n)): tree.score[n] for n in range(len(tree))}
