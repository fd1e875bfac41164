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

from dominotree.drafters.domino import DominoHead

Look = Callable[[Tensor], Tensor]
"""Token ids `[n]` to a row each."""


class ContextWords:
    """The words of one text, the latest `size` of them; `read` it as it grows."""

    def __init__(self, size: int, known: Set[int], output_rows: Look, input_part: Look | None) -> None:
        """`known` is the draft vocabulary, `output_rows` gives rows of the target's output matrix, `input_part` those
        of the correction head's GRU (None: there is no such head).
        """
        self._size, self._known, self._output_rows, self._input_part = size, known, output_rows, input_part
        self._held: list[int] = []
        self._next = 0  # the row that the next word takes
        self._read = 0
        self._rows: tuple[Tensor, Tensor, Tensor | None] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def read(self, tokens: Sequence[int]) -> None:
        """Takes in what has come behind the tokens read before."""
        held = set(self._held)
        new = [t for t in dict.fromkeys(tokens[self._read :]) if t not in self._known and t not in held]
        self._read = len(tokens)
        new = new[-self._size :]
        if not new:
            return
        places = [(self._next + i) % self._size for i in range(len(new))]
        self._next = (places[-1] + 1) % self._size
        for place, token in zip(places, new, strict=True):
            if place < len(self._held):
                self._held[place] = token
            else:
                self._held.append(token)
        self._store(places, new)

    @property
    def ids(self) -> Tensor:
        """Token ids, int64 `[count]`."""
        return self._table(0)

    @property
    def outputs(self) -> Tensor:
        """Rows of the target's output matrix, `[count, H]`."""
        return self._table(1)

    @property
    def inputs(self) -> Tensor:
        """The GRU's input parts, fp32 `[count, 3G]`."""
        return self._table(2)

    def _table(self, which: int) -> Tensor:
        assert self._rows is not None, "there are no words"
        table = self._rows[which]
        assert table is not None, "there is no correction head"
        return table[: len(self._held)]

    def _store(self, places: Sequence[int], new: Sequence[int]) -> None:
        ids = torch.tensor(new)
        rows = (ids, self._output_rows(ids), None if self._input_part is None else self._input_part(ids))
        if self._rows is None:
            ids_table, outputs, inputs = (
                None if row is None else row.new_zeros(self._size, *row.shape[1:]) for row in rows
            )
            assert ids_table is not None and outputs is not None
            self._rows = ids_table, outputs, inputs
        for table, row in zip(self._rows, rows, strict=True):
            if table is not None and row is not None:
                table[list(places)] = row


@dataclass(frozen=True)
class Vocabulary:
    """What the columns of a batch's base logits `[B, K, V' + X]` stand for, X = `words`.

    Columns from V' on are each sequence's own; `domino.spread` tells them apart, and `d2t` and `head` know them so.
    `columns` `[V']` or `[B, V' + X]` are target ids, None where those are the columns themselves.
    """

    d2t: Tensor | None
    columns: Tensor | None
    head: DominoHead | None
    words: int = 0

    def extended(self, texts: Sequence[ContextWords], words: int) -> Vocabulary:
        """The same with the words of a batch's texts behind it, none of which has more than `words`."""
        if not words:
            return self
        assert self.d2t is not None and self.columns is not None, "a whole vocabulary lacks no word"
        size, device = len(self.columns), self.columns.device
        ids = torch.zeros(len(texts), words, dtype=torch.int64)
        for row, text in enumerate(texts):
            if len(text):
                ids[row, : len(text)] = text.ids
        ids = ids.to(device)
        d2t = torch.cat([self.d2t, ids.flatten() - torch.arange(size, size + ids.numel(), device=device)])
        head = self.head
        if head is not None:
            inputs = torch.zeros(*ids.shape, 3 * head.state_size, device=device)
            for row, text in enumerate(texts):
                if len(text):
                    inputs[row, : len(text)] = text.inputs
            head = head.extended(d2t, inputs)
        columns = torch.cat([self.columns.expand(len(texts), -1), ids], dim=1)
        return Vocabulary(d2t, columns, head, words)
