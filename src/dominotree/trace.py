"""What the decoder did, round by round, as plain data: for the server's clients and for `dominotree trace`."""

from __future__ import annotations

from typing import Any

from dominotree.generation import Generation, Round
from dominotree.text import TextCodec, TextStream
from dominotree.token_names import TokenNames

Json = dict[str, Any]


class Trace:
    """The rounds of one answer. `record` is the recorder that its request is made with.

    Entry 0 is the pass over the prompt, which yields the first token; the tokens of all entries are the answer's.
    """

    def __init__(self, codec: TextCodec, names: TokenNames) -> None:
        self._names, self._text = names, TextStream(codec)
        self._waiting: list[Round] = []
        self._taken = 0
        self._root: int | None = None

    def record(self, done: Round) -> None:
        """Keeps a round until `take`."""
        self._waiting.append(done)

    def take(self, generation: Generation) -> list[Json]:
        """The entries that are new since the last call, fit for JSON."""
        entries = []
        if self._root is None and generation.new_tokens:
            prefill = {"prefill": 1000 * generation.stats.prefill_s}
            entries.append(self._entry([], [], generation.new_tokens[:1], prefill))
        for done in self._waiting:
            tree = done.tree
            columns = zip(tree.token, tree.parent, tree.depth, tree.given, tree.score, strict=True)
            nodes = [
                {**self._named(token), "parent": parent, "depth": depth, "prob": round(p, 6), "score": round(score, 4)}
                for token, parent, depth, p, score in columns
            ]
            entries.append(self._entry(nodes, list(done.path), list(done.tokens), dict(done.stage_ms)))
        self._waiting = []
        if entries and generation.finished:
            known = len(self._text.text)
            self._text.finish()
            entries[-1]["tokens"][-1]["piece"] += self._text.text[known:]
        return entries

    def _entry(self, nodes: list[Json], path: list[int], tokens: list[int], ms: dict[str, float]) -> Json:
        entry = {
            "round": self._taken,
            "root": None if self._root is None else self._named(self._root),
            "nodes": nodes,
            "path": path,
            "tokens": [{**self._named(token), "piece": self._piece(token)} for token in tokens],
            "ms": {stage: round(spent, 3) for stage, spent in ms.items()},
        }
        self._taken, self._root = self._taken + 1, tokens[-1]
        return entry

    def _named(self, token: int) -> Json:
        return {"id": token, "text": self._names.shown_text_of(token)}

    def _piece(self, token: int) -> str:
        """What the token adds to the text: a character that spans tokens comes with its last one."""
        known = len(self._text.text)
        self._text.push(token)
        return self._text.text[known:]
