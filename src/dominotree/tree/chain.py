"""Chains, the special case of a tree with one child per node: `dflash` and `domino`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dominotree import native
from dominotree.drafters.domino import DominoHead, spread, to_target_ids
from dominotree.tree.heap import PathDependence, Trie, build_heap
from dominotree.tree.limits import Limit, per_sequence
from dominotree.tree.order import check_finite
from dominotree.tree.tree import Trees


def base_chain(base: Tensor, *, d2t: Tensor | None = None, words: int = 0, max_depth: Limit | None = None) -> Trees:
    """The most likely token at every depth on its own (DFlash, arXiv 2602.06036).

    `base [B, K, V']` are base logits of any float dtype, `d2t` the offsets of a draft vocabulary, the last `words`
    columns each sequence's own (`drafters.domino.spread`); `max_depth` cuts the chain. Gives chains of K nodes; scores
    are sums of log-probabilities over V'.
    """
    base = base.detach().float()
    best = base.argmax(dim=-1)
    log_prob = base.gather(-1, best[..., None])[..., 0] - torch.logsumexp(base, dim=-1)
    return _chain(to_target_ids(spread(best, base.shape[-1], words), d2t), log_prob, max_depth)


def corrected_chain(
    base: Tensor,
    hidden: Tensor,
    root_ids: Tensor,
    head: DominoHead,
    *,
    max_depth: Limit | None = None,
    scale: Tensor | None = None,
) -> Trees:
    """The most likely token at every depth given the tokens above it (Domino, arXiv 2605.29707).

    `base [B, K, V']` and `hidden [B, K, H]` are the backbone's logits and output, `root_ids [B]` target ids
    of the roots. The correction covers all V' and is multiplied by `scale` `[B]` (None: 1); depths below the head's
    `prefix_len` are left as they are.
    """
    if base.device.type == "cpu" and native.available() and head.has_trie:
        return _native_chain(base, hidden, root_ids, head, max_depth, scale)
    hidden_part = head.hidden_part(hidden)
    state = head.pack(head.initial_state(root_ids))
    best, log_prob = [], []
    for depth in range(base.shape[1]):
        logits = base[:, depth].detach().float()
        if depth >= head.prefix_len:
            inner = head.inner(hidden_part[:, depth], state)
            correction = head.full_correction(inner if scale is None else inner * scale[:, None])
            logits = logits + F.pad(correction, (0, head.words))
        top = logits.argmax(dim=-1)
        best.append(spread(top, base.shape[-1], head.words))
        log_prob.append(logits.gather(-1, top[:, None])[:, 0] - torch.logsumexp(logits, dim=-1))
        if depth + 1 < base.shape[1]:
            state = head.step(state, best[-1])
    return _chain(head.target_ids(torch.stack(best, dim=1)), torch.stack(log_prob, dim=1), max_depth)


def _native_chain(
    base: Tensor, hidden: Tensor, root_ids: Tensor, head: DominoHead, max_depth: Limit | None, scale: Tensor | None
) -> Trees:
    """The chain as a tree whose nodes have one child each, out of all V' candidates."""
    batch, levels, _ = base.shape
    path = PathDependence(base.detach(), None, hidden, root_ids, scale, head)
    trie = Trie(None, head.own_d2t, path, head.word_ids)
    depths = [min(depth, levels) for depth in per_sequence(max_depth, batch, levels, "max_depth")]
    return build_heap(trie, depths, 1, depths)


def _chain(token: Tensor, log_prob: Tensor, max_depth: Limit | None) -> Trees:
    check_finite(log_prob)
    batch, levels = token.shape
    depth = torch.arange(levels, device=token.device).expand(batch, -1).contiguous()
    full = torch.full((batch,), levels, dtype=torch.int64, device=token.device)
    trees = Trees(token, depth - 1, depth, log_prob.cumsum(dim=1), full, levels)
    if max_depth is None:
        return trees
    return trees.first(torch.tensor(per_sequence(max_depth, batch, levels, "max_depth")))
