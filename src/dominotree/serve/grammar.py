"""Answers that fit a JSON schema: at every token the target chooses, what the grammar rules out is impossible.

The rule is part of the target's distribution, as a logit bias is, so every method gives the tokens that plain decoding
under the same rule gives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dominotree.errors import InvalidRequest
from dominotree.text import TextCodec
from dominotree.tree.tree import Tree

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_WHITE_SPACE = r"[\x20\x0A]{0,16}"
"""Between the parts of the JSON; bounded, or a weak model might write nothing else."""
_LONGEST_REASON = 200


class Grammars:
    """Makes logits processors that hold an answer to a schema."""

    def __init__(self, codec: TextCodec, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self._codec, self._vocab_size, self._ends = codec, vocab_size, list(stop_token_ids)
        self._tokenizer: LLTokenizer | None = None

    def processors(
        self, schema: dict[str, Any], prompt_tokens: int, count: int, field: str = "response_format"
    ) -> list[JsonGrammar]:
        """`count` processors, one for each answer to a prompt.

        Raises `InvalidRequest`, which names the `field` of the schema, for one it cannot hold.
        """
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise InvalidRequest(f"{field} needs the package llguidance, which is not installed here") from None
        if not self._ends:
            raise InvalidRequest(f"{field} needs a model with an end token, and this one has none")
        try:
            text = json.dumps(schema)
            grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITE_SPACE})
            matcher = LLMatcher(self._vocabulary(), grammar, log_level=0)
            reason = matcher.get_error() if matcher.is_error() else ""
            if not reason and _allows_nothing(matcher.deep_copy()):
                reason = "no JSON fits it"
        except (ValueError, RecursionError) as error:
            reason = str(error) or type(error).__name__
        if reason:
            reason = " ".join(reason.split())[:_LONGEST_REASON]
            raise InvalidRequest(f"{field} has a schema that cannot be held: {reason}")
        return [JsonGrammar(matcher.deep_copy(), prompt_tokens, self._ends) for _ in range(count)]

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            tokenizer = self._codec.tokenizer.to_str()
            self._tokenizer = LLTokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=self._ends)
        return self._tokenizer


def _allows_nothing(matcher: LLMatcher) -> bool:
    """Whether an answer would end before it began; uses the matcher up."""
    matcher.compute_bitmask()
    return bool(matcher.is_stopped())


class JsonGrammar:
    """A logits processor for one answer; follows its tokens, and steps back where a walk took another way."""

    def __init__(self, matcher: LLMatcher, prompt_tokens: int, ends: Sequence[int]) -> None:
        self._matcher, self._prompt_tokens, self._ends = matcher, prompt_tokens, set(ends)
        self._seen: list[int] = []

    def __call__(self, tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """The logits `[vocab]` with minus infinity for what may not follow `tokens` (prompt and answer)."""
        self._follow(list(tokens[self._prompt_tokens :]))
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(mask, bitorder="little")[: len(logits)].astype(bool))
        if len(allowed) < len(logits):
            allowed = torch.cat([allowed, allowed.new_zeros(len(logits) - len(allowed))])
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def prune(self, tokens: Sequence[int], tree: Tree) -> Tree:
        """The tree without what may not follow `tokens` (prompt and answer): rows that need not be verified."""
        self._follow(list(tokens[self._prompt_tokens :]))
        return tree.pruned(lambda path: bool(self._matcher.validate_tokens(path) == len(path)))

    def _follow(self, path: list[int]) -> None:
        common = next((i for i, (a, b) in enumerate(zip(self._seen, path, strict=False)) if a != b), None)
        common = min(len(self._seen), len(path)) if common is None else common
        if common < len(self._seen):
            self._matcher.rollback(len(self._seen) - common)
        fresh = path[common:]
        if fresh and not self._matcher.consume_tokens(fresh):
            raise InvalidRequest("response_format lost track of the answer: the schema is too complex to be held")
        self._seen = path
