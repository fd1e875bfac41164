"""Words: tokens that a draft vocabulary lacks, proposed all the same where the text before holds them.

A small draft vocabulary makes drafting cheap, and what it leaves out is mostly names, which texts repeat. A drafter
that was trained so (`context_vocab_size`) scores the words of each text behind its own vocabulary: by the target's
output matrix, without a correction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dominotree.drafters.domino import DominoHead, offsets, spread, to_target_ids
from dominotree.targets.linear import GrowingLinear

Look = Callable[[Tensor], Tensor]
"""Token ids `[n]` to a row each."""


class ContextWords:
    """The words of one text, the latest `size` of them; `read` it as it grows."""

    def __init__(self, size: int, known: Set[int], output_rows: Look, input_part: Look, dtype: torch.dtype) -> None:
        """`known` is the draft vocabulary; `output_rows` gives rows of the target's output matrix, `[n, H]`, and
        `input_part` those of the correction head's GRU, `[n, 3G]` (`[n, 0]` without one); drafts are of `dtype`.
        """
        self._size, self._known, self._output_rows, self._input_part = size, known, output_rows, input_part
        self._held: list[int] = []
        self._next = 0  # the row that the next word takes
        self._read = 0
        none = torch.empty(0, dtype=torch.int64)
        outputs, inputs = output_rows(none), input_part(none)
        self._ids = none.new_zeros(size)
        self._inputs = inputs.new_zeros(size, inputs.shape[1])
        self._head = GrowingLinear(size, outputs.shape[1], outputs.dtype, dtype, outputs.device)

    def __len__(self) -> int:
        return len(self._held)

    def read(self, tokens: Sequence[int]) -> None:
        """Takes in what has come behind the tokens read before."""
        fresh = [t for t in dict.fromkeys(tokens[self._read :]) if t not in self._known and t not in self._held]
        self._read = len(tokens)
        fresh = fresh[-self._size :]
        if not fresh:
            return
        places = [(self._next + i) % self._size for i in range(len(fresh))]
        self._next = (places[-1] + 1) % self._size
        for place, token in zip(places, fresh, strict=True):
            self._held[place : place + 1] = [token]
        ids = torch.tensor(fresh)
        self._ids[places] = ids
        self._inputs[places] = self._input_part(ids)
        self._head.put(places, self._output_rows(ids))

    @property
    def ids(self) -> Tensor:
        """Token ids, int64 `[count]`."""
        return self._ids[: len(self)]

    @property
    def inputs(self) -> Tensor:
        """The GRU's input parts, fp32 `[count, 3G]`."""
        return self._inputs[: len(self)]

    def score(self, hidden: Tensor, base: Tensor, room: int) -> None:
        """Fills the last `room` columns of base logits `[K, V' + room]` for the backbone's output `hidden` `[K, H]`:
        a word each, then -inf.
        """
        count, vocab = len(self), base.shape[1] - room
        if count:
            self._head.fill(hidden, base, vocab, count)
        if count < room:
            base[:, vocab + count :] = -torch.inf


@dataclass(frozen=True)
class Vocabulary:
    """What the columns of a batch's base logits `[B, K, V' + X]` stand for, X = `words`.

    Columns from V' on are each sequence's own; `domino.spread` tells them apart, and `d2t` and `head` know them so.
    """

    own_d2t: Tensor | None
    head: DominoHead | None
    words: int = 0
    word_ids: Tensor | None = None
    """int64 `[B * X]`."""

    @property
    def d2t(self) -> Tensor | None:
        """Offsets `[V' + B * X]` from a draft index to its target id; None where those are the same."""
        return offsets(self.own_d2t, self.word_ids)

    def extended(self, texts: Sequence[ContextWords]) -> Vocabulary:
        """The same with the words of a batch's texts behind it."""
        words = max((len(text) for text in texts), default=0)
        if not words:
            return self
        assert self.own_d2t is not None, "a whole vocabulary lacks no word"
        ids = _side_by_side([text.ids for text in texts]).flatten().to(self.own_d2t.device)
        head = self.head
        if head is not None:
            head = head.extended(ids, _side_by_side([text.inputs for text in texts]))
        return Vocabulary(self.own_d2t, head, words, ids)

    def tokens(self, base: Tensor) -> Tensor | None:
        """Target ids of the columns of `base`, int64 `[B, V' + X]`; None where those are the columns themselves."""
        d2t = self.d2t
        if d2t is None:
            return None
        batch, vocab = base.shape[0], base.shape[-1]
        columns = torch.arange(vocab, device=base.device).expand(batch, -1)
        return to_target_ids(spread(columns, vocab, self.words), d2t)


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    return rows[0][None] if len(rows) == 1 else pad_sequence(list(rows), batch_first=True)
