"""The decode loop: draft -> build -> verify -> commit, for a batch of sequences that come and go."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from dominotree.adaptive import AdaptiveBudget
from dominotree.drafters.coupling import Noise
from dominotree.drafters.dflash import Draft, Drafter
from dominotree.drafters.words import ContextWords
from dominotree.errors import DominoTreeError, InvalidRequest, NumericalError
from dominotree.generation import Generation, Request, Round, Stopwatch
from dominotree.lookup import Continuation
from dominotree.methods import grow
from dominotree.sampling import broken_logits
from dominotree.targets.base import Forward, Target
from dominotree.targets.cache import SlotCache
from dominotree.targets.rows import Segment
from dominotree.text import TextCodec
from dominotree.tree.join import join, path_of
from dominotree.tree.tree import Tree

PREFILL_CHUNK = 256
"""Prompt tokens per pass, so that memory stays bounded and other sequences are not held up for long."""

NO_TREE = Tree()


class Share(Protocol):
    """Shares a pass out among the sequences of a round."""

    def pays(self, sequences: int) -> bool:
        """Whether the next round, of so many sequences, should draft."""
        ...

    def cut(self, trees: Sequence[Tree], sequences: int, context: int, drafted: int) -> Sequence[Tree]:
        """Leading parts of the trees, for a round of so many sequences behind at most `context` tokens.

        So many of the sequences drafted; the other trees are what texts themselves say.
        """
        ...

    def observe(self, accepted: int) -> None:
        """Is told how many of the nodes it left were accepted."""
        ...


class Decoder:
    """Decodes requests over `slots` sequences at a time.

    Owns the caches: the target's keys and values and the drafter's context. Whenever a sequence drafts: cached target
    columns = drafter context = position of its root. Several threads may share one: each drives the rounds of all, one
    at a time.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        codec: TextCodec | None = None,
        *,
        slots: int = 1,
        context: int = 2048,
        max_nodes: int = 16,
        adaptive: AdaptiveBudget | None = None,
        share: Share | None = None,
    ) -> None:
        """`context` bounds prompt and answer together, `max_nodes` the tree of any request.

        `adaptive` sizes the trees of methods with a cost-aware budget, which are refused without it. `share` may cut
        the trees of a round that several sequences take part in, or leave out its draft.
        """
        if slots < 1 or context < 2:
            raise InvalidRequest(f"{slots} slots of {context} tokens cannot decode; at least 1 slot of 2 is expected")
        self.target, self.drafter, self.codec, self.adaptive = target, drafter, codec, adaptive
        self._share = share
        self.slots, self.context, self.max_nodes = slots, context, max_nodes
        self._cache: SlotCache = target.new_cache(slots, _rounded(context + max_nodes + 1))
        self._drafts: SlotCache | None = None if drafter is None else drafter.new_cache(slots, context)
        self._cached: list[list[int]] = [[] for _ in range(slots)]
        self._waiting: deque[Generation] = deque()
        self._prefilling: list[Generation] = []
        self._decoding: list[Generation] = []
        self._lock = threading.RLock()
        self._stepping = False
        self._ended: BaseException | None = None
        """The last error that was some requests' own."""

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._waiting or self._prefilling or self._decoding)

    def add(self, request: Request) -> Generation:
        """Queues a request; raises `InvalidRequest` if it can never run here."""
        request.drafting.check(self.drafter)
        if request.drafting.kind.rule != "fixed" and self.adaptive is None:
            raise InvalidRequest(
                f"method {request.drafting.method} needs a cost profile of this machine; run `dominotree profile` first"
            )
        nodes = request.drafting.nodes(self.drafter.draft_length if self.drafter else 0)
        if nodes > self.max_nodes:
            raise InvalidRequest(
                f"the request drafts up to {nodes} nodes and this decoder has room for {self.max_nodes}"
            )
        target = self.target
        generation = Generation(request, self.codec, target.vocab_size, target.eos_token_ids, self.context)
        with self._lock:
            self._waiting.append(generation)
        return generation

    def abort(self, generation: Generation) -> None:
        """Ends a request where it is and frees its slot; where a callback of a round asks, once that round is over."""
        with self._lock:
            if not generation.finished:
                generation.finish("abort")
                if not self._stepping:
                    self._release_finished()
                if generation in self._waiting:
                    self._waiting.remove(generation)

    def run(self, requests: Iterable[Request]) -> list[Generation]:
        """Decodes all requests to the end, in the order given; an error of one of them ends them all."""
        generations: list[Generation] = []
        try:
            for request in requests:
                generations.append(self.add(request))
            while not all(generation.finished for generation in generations):
                self._advance(generations)
            for generation in generations:  # one that another thread's round ended
                _raise_error(generation)
        finally:
            for generation in generations:
                self.abort(generation)
        return generations

    def stream(self, request: Request) -> Generator[Generation, None, None]:
        """Decodes one request, handing it out after every step, at last when it is finished; the first steps wait for a
        slot and encode the prompt.
        """
        generation = self.add(request)
        try:
            complete = False
            while not complete:
                if not generation.finished:  # another request's rounds may have finished it
                    self._advance([generation])
                complete = generation.finished
                _raise_error(generation)
                yield generation
        finally:
            self.abort(generation)

    def _advance(self, own: Sequence[Generation]) -> None:
        """A step on behalf of some requests: an error that is another's own is left to who waits for that one."""
        with self._lock:
            try:
                self.step()
            except Exception as error:
                if error is not self._ended or any(generation.error is error for generation in own):
                    raise

    @torch.inference_mode()
    def step(self) -> None:
        """Admits waiting requests, encodes one chunk of each prompt, and decodes one round of all others.

        An error that is one request's own (its logits processor's, NaN in its rows or its draft, one while its prompt
        is encoded) comes through, ends that request, and leaves the others in order.
        """
        with self._lock:
            self._stepping = True
            try:
                self._release_finished()  # what an interrupt has left
                self._admit()
                for generation in list(self._prefilling):
                    if not generation.finished:
                        with self._ends([generation]):
                            self._prefill_chunk(generation)
                self._release_finished()
                if self._decoding:
                    with Stopwatch(generation.stats for generation in self._decoding) as watch:
                        self._round(list(self._decoding), watch)
            except BaseException as error:
                self._end_torn(error)
                raise
            finally:
                self._stepping = False
                self._release_finished()

    def _end_torn(self, error: BaseException) -> None:
        """Ends the sequences that an error has left between two states: their caches do not hold what they should."""
        self._prefilling = [generation for generation in self._prefilling if generation not in self._decoding]
        for generation in (*self._prefilling, *self._decoding):
            held = generation.prefilled if generation in self._prefilling else len(generation.tokens) - 1
            if not generation.finished and not self._holds(generation, held):
                generation.error = error
                generation.finish("abort")

    def _holds(self, generation: Generation, columns: int) -> bool:
        """Whether a sequence's caches hold so many columns, what its drafter has not read yet counted."""
        if generation.slot is None or self._cache.lengths[generation.slot] != columns:
            return False
        if self._drafts is None or not self._drafts_for(generation):
            return True
        return self._drafts.lengths[generation.slot] + sum(map(len, generation.unread)) == columns

    # One round, as in the paper

    def _round(self, batch: Sequence[Generation], watch: Stopwatch) -> None:
        share = self._share if len(batch) > 1 else None
        drafting = [g for g in batch if self._max_depth(g) > 0 and self._pays(g)]
        if drafting and share is not None and not share.pays(len(batch)):
            drafting = []
        with watch.stage("draft"):
            self._extend_context([g for g in batch if g in drafting or sum(map(len, g.unread)) >= PREFILL_CHUNK])
            draft = self._draft(drafting)
        with watch.stage("build"):
            trees = self._build(drafting, draft)
            trees |= self._look_up([generation for generation in batch if generation not in drafting])
            if share is not None and trees:
                longest = max(len(generation.tokens) for generation in batch)
                parts = share.cut(list(trees.values()), len(batch), longest, len(drafting))
                trees = dict(zip(trees, parts, strict=True))
        with watch.stage("verify"):
            segments = [_segment(g, trees.get(id(g), NO_TREE)) for g in batch]
            greedy = any(generation.request.sampling.is_plain_greedy for generation in batch)
            layers = self._feature_layers(batch)
            out = self.target.forward(self._cache, segments, feature_layers=layers, best=greedy)
        kept: list[list[int]] = []
        try:
            with watch.stage("commit"):
                self._commit(batch, trees, segments, out, kept)
        finally:  # a request that fails must not leave those before it without their drafter's context
            self._hand_over(batch[: len(kept)], kept, out.features)
            if share is not None and trees:
                share.observe(sum(len(rows) - 1 for rows in kept if rows))
            self._record(batch, trees, kept, watch)

    def _commit(
        self,
        batch: Sequence[Generation],
        trees: dict[int, Tree],
        segments: Sequence[Segment],
        out: Forward,
        kept: list[list[int]],
    ) -> None:
        """Accepts and keeps each sequence's path; adds its rows, counted through the batch, to `kept`: none of one that
        another's callback has ended.
        """
        first = 0
        for generation, segment in zip(batch, segments, strict=True):
            rows, path = slice(first, first + len(segment.tokens)), []
            if not generation.finished:
                with self._ends([generation]):  # its tokens may be ahead of its cache
                    tree = trees.get(id(generation), NO_TREE)
                    path = self._accept(generation, tree, out.logits[rows], out.best[rows])
                    self._keep(generation, path)
            kept.append([first + row for row in path])
            first = rows.stop

    def _draft(self, batch: Sequence[Generation]) -> Draft | None:
        if not batch or self.drafter is None or self._drafts is None:
            return None
        for generation in batch:
            root = len(generation.tokens) - 1
            assert self._cache.lengths[_slot(generation)] == self._drafts.lengths[_slot(generation)] == root
        depths = max(_most_depth(g, self.drafter.draft_length) for g in batch)
        slots, roots = [_slot(g) for g in batch], [g.tokens[-1] for g in batch]
        return self.drafter.draft(self._drafts, slots, roots, depths=depths, texts=self._texts(batch))

    def _texts(self, batch: Sequence[Generation]) -> Sequence[ContextWords]:
        """The words of each sequence up to its root, for a drafter that uses them."""
        assert self.drafter is not None
        texts = []
        for generation in batch:
            if generation.words is None:
                generation.words = self.drafter.words()
            if generation.words is not None:
                generation.words.read(generation.tokens)
                texts.append(generation.words)
        return texts

    def _build(self, batch: Sequence[Generation], draft: Draft | None) -> dict[int, Tree]:
        """The tree of each sequence that drafts; requests with equal drafting are built together."""
        if draft is None or self.drafter is None:
            return {}
        groups: dict[object, list[int]] = {}
        for i, generation in enumerate(batch):
            groups.setdefault(generation.request.drafting, []).append(i)
        trees: dict[int, Tree] = {}
        for members in groups.values():
            try:
                trees |= self._grow(batch, draft, members)
            except NumericalError:  # broken values of one of them are not to end the others
                for i in members:
                    with self._ends([batch[i]]):
                        trees |= self._grow(batch, draft, [i])
        return trees

    def _grow(self, batch: Sequence[Generation], draft: Draft, members: Sequence[int]) -> dict[int, Tree]:
        """The trees of those sequences of the draft's batch, whose drafting is the same."""
        assert self.drafter is not None
        ours = [batch[i] for i in members]
        part = draft.part(members) if len(members) < len(batch) else draft
        depths, noise = [self._max_depth(g) for g in ours], [_noise(g) for g in ours]
        caps, contexts = [g.most_nodes for g in ours], [len(g.tokens) - 1 for g in ours]
        drafting, budget = ours[0].request.drafting, self._budget(ours[0])
        paces = [g.pace for g in ours]
        sizing = None if budget is None else budget.sizing(drafting.kind, max(caps), contexts, paces)
        grown = grow(drafting, self.drafter, part, depths, noise, caps, sizing)
        sized = grown.given is not None
        return {id(g): self._shaped(g, grown.single(row), sized) for row, g in enumerate(ours)}

    def _shaped(self, generation: Generation, tree: Tree, sized: bool) -> Tree:
        """A grown tree joined by what the text itself says, cut to what pays, and pruned as the request wants.

        `sized`: it was grown no further than could pay.
        """
        kind, budget, text = generation.request.drafting.kind, self._budget(generation), _said(generation)
        if budget is not None and not sized:
            tree = budget.believed(tree, kind)
        if text.tokens:
            tree = join(tree, text.tokens, text.chances, generation.most_nodes)
        if budget is not None:
            alone = path_of(text.tokens, text.chances)
            tree = budget.cut(tree, kind, len(generation.tokens) - 1, generation.pace, alone, sized=sized)
        return self._pruned(generation, tree)

    def _look_up(self, resting: Sequence[Generation]) -> dict[int, Tree]:
        """What the texts themselves say, of sequences whose round goes without a draft."""
        trees: dict[int, Tree] = {}
        for generation in resting:
            if generation.lookup is None or generation.remaining < 2:
                continue
            text, budget = _said(generation), self._budget(generation)
            tree = path_of(text.tokens, text.chances)
            if budget is not None:
                tree = budget.cut_undrafted(tree, len(generation.tokens) - 1, generation.pace)
            trees[id(generation)] = self._pruned(generation, tree)
        return trees

    def _pruned(self, generation: Generation, tree: Tree) -> Tree:
        if generation.request.prune is None:
            return tree
        with self._ends([generation]):
            return generation.request.prune(generation.tokens, tree)

    def _pays(self, generation: Generation) -> bool:
        """Whether to draft at all: fixed budgets always do."""
        if generation.request.drafting.kind.rule != "calibrated":
            return True
        return generation.pace.drafts(next(iter(_said(generation).chances), 0.0))

    def _budget(self, generation: Generation) -> AdaptiveBudget | None:
        """What sizes the sequence's trees, where that is not its fixed budget."""
        return None if generation.request.drafting.kind.rule == "fixed" else self.adaptive

    def _accept(self, generation: Generation, tree: Tree, logits: torch.Tensor, best: Sequence[int]) -> list[int]:
        """Walks down the tree along the target's own choices, adding each to the answer, until one is not in it.

        `best` has the likeliest token of every row, or nothing where no request of the round asks for it. Returns the
        rows to keep: the root's (0) and those of the accepted nodes.
        """
        node, path, before = -1, [0], len(generation.tokens)
        while True:
            token = _choose_next(generation, logits[node + 1], best[node + 1] if best else None)
            child = tree.child_with_token(node, token)
            if generation.finished or child is None:
                break
            node = child
            path.append(node + 1)
        chosen = generation.tokens[before:]
        generation.stats.accepted.append(len(chosen))
        generation.stats.nodes.append(len(tree))
        budget = self._budget(generation)
        if budget is not None:
            budget.observe(tree, [row - 1 for row in path], chosen)
        return path

    def _keep(self, generation: Generation, path: Sequence[int]) -> None:
        slot = _slot(generation)
        start = self._cache.lengths[slot]
        self._cache.commit(slot, path)
        self._cached[slot] = generation.tokens[: start + len(path)]

    def _hand_over(
        self, batch: Sequence[Generation], kept: Sequence[Sequence[int]], features: torch.Tensor | None
    ) -> None:
        """Keeps the features of the rows that each sequence kept, for its next draft: rounds may go without one."""
        drafting = [(g, rows) for g, rows in zip(batch, kept, strict=True) if rows and self._drafts_for(g)]
        if features is None or not drafting:
            return
        with self._ends([generation for generation, _ in drafting]):
            flat = torch.tensor([row for _, rows in drafting for row in rows], device=features.device)
            parts = torch.split(features.index_select(0, flat), [len(rows) for _, rows in drafting])
            for (generation, _), part in zip(drafting, parts, strict=True):
                generation.unread.append(part)

    def _extend_context(self, batch: Sequence[Generation]) -> None:
        """Has the drafter read what each sequence has kept since it last did."""
        behind = [generation for generation in batch if generation.unread]
        with self._ends(behind):
            self._read(behind)

    def _read(self, behind: Sequence[Generation]) -> None:
        if not behind or self.drafter is None or self._drafts is None:
            return
        counts = [sum(map(len, generation.unread)) for generation in behind]
        features = torch.cat([part for generation in behind for part in generation.unread])
        self.drafter.extend(self._drafts, [_slot(generation) for generation in behind], counts, features)
        for generation in behind:
            generation.unread.clear()

    @contextmanager
    def _ends(self, generations: Sequence[Generation]) -> Iterator[None]:
        """Ends the generations to which an error belongs, and lets it through."""
        try:
            yield
        except BaseException as error:
            self._ended = error
            for generation in generations:
                generation.error = error
                generation.finish("abort")
            raise

    def _record(
        self, batch: Sequence[Generation], trees: dict[int, Tree], kept: Sequence[Sequence[int]], watch: Stopwatch
    ) -> None:
        """Tells those who want to know what the round did; the first error of one of them comes through in the end."""
        failed: list[Exception] = []
        for generation, rows in zip(batch, kept, strict=False):
            if generation.request.recorder is not None and rows:
                path = [row - rows[0] - 1 for row in rows[1:]]
                tokens = generation.tokens[-generation.stats.accepted[-1] :]
                tree = trees.get(id(generation), NO_TREE)
                try:
                    with self._ends([generation]):
                        generation.request.recorder(Round(tree, path, tokens, watch.stage_ms))
                except Exception as error:
                    failed.append(error)
        if failed:
            raise failed[0]

    # Sequences come and go

    def _admit(self) -> None:
        while self._waiting and len(self._prefilling) + len(self._decoding) < self.slots:
            generation = self._waiting.popleft()
            if not generation.finished:
                self._prefilling.append(generation)
                with self._ends([generation]):
                    self._claim(generation)

    def _claim(self, generation: Generation) -> None:
        """Takes a free slot; with `reuse` the one that holds the longest beginning of the prompt."""
        prompt = generation.tokens
        slot = self._cache.free[0]
        if generation.request.reuse:
            slot = max(self._cache.free, key=lambda s: self._reusable(s, generation))
        keep = self._reusable(slot, generation) if generation.request.reuse else 0
        generation.slot = slot
        self._cache.claim(slot, keep)
        if self._drafts is not None:
            self._drafts.claim(slot, min(keep, self._drafts.lengths[slot]))
        self._cached[slot] = prompt[:keep]
        generation.prefilled, generation.stats.reused_tokens = keep, keep

    def _reusable(self, slot: int, generation: Generation) -> int:
        """Leading prompt tokens whose cached columns the sequence can take over; never the whole prompt."""
        held = self._cached[slot][: self._cache.lengths[slot]]
        if self._drafts is not None and self._drafts_for(generation):
            held = held[: self._drafts.lengths[slot]]
        prompt = generation.tokens[:-1]
        return next(
            (i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt))
        )

    def _prefill_chunk(self, generation: Generation) -> None:
        started = time.perf_counter()
        slot, prompt = _slot(generation), generation.tokens
        chunk = prompt[generation.prefilled : generation.prefilled + PREFILL_CHUNK]
        segment = Segment(slot, generation.prefilled, chunk)
        out = self.target.forward(
            self._cache, [segment], feature_layers=self._feature_layers([generation]), last_only=True
        )
        self._cache.commit(slot, range(len(chunk)))
        if out.features is not None and self.drafter is not None and self._drafts is not None:
            self.drafter.extend(self._drafts, [slot], [len(chunk)], out.features)
        generation.prefilled += len(chunk)
        self._cached[slot] = prompt[: generation.prefilled]
        if generation.prefilled == len(prompt):
            _choose_next(generation, out.logits[-1])
            self._decoding.append(generation)
            self._prefilling.remove(generation)
        generation.stats.prefill_s += time.perf_counter() - started

    def _release_finished(self) -> None:
        for running in (self._prefilling, self._decoding):
            for generation in [g for g in running if g.finished]:
                try:
                    if generation.unread and generation.error is None:
                        with suppress(Exception):  # only for a later prompt that begins with this one
                            self._read([generation])
                finally:
                    self._free(generation)
                    running.remove(generation)

    def _free(self, generation: Generation) -> None:
        """Gives a slot back, whole or again where an interrupt came between; broken values do not stay in it."""
        slot = generation.slot
        generation.unread.clear()
        for cache in (self._cache, self._drafts):
            if cache is not None and slot is not None and slot not in cache.free:
                if isinstance(generation.error, NumericalError):
                    cache.clear(slot)
                cache.release(slot)
        generation.slot = None

    def _max_depth(self, generation: Generation) -> int:
        """Depths worth drafting: the target adds one token itself, and nothing may pass the limit."""
        if not self._drafts_for(generation) or self.drafter is None:
            return 0
        return min(self.drafter.draft_length, generation.remaining - 1)

    def _drafts_for(self, generation: Generation) -> bool:
        return generation.request.drafting.kind.drafts

    def _feature_layers(self, batch: Sequence[Generation]) -> Sequence[int]:
        wanted = self.drafter is not None and any(self._drafts_for(g) for g in batch)
        return self.drafter.feature_layers if wanted and self.drafter else ()


def _raise_error(generation: Generation) -> None:
    """Raises what has ended a request, where that was an error of its own."""
    error = generation.error
    if isinstance(error, Exception):
        raise error
    if error is not None:  # of the thread whose step it was
        raise DominoTreeError("decoding was interrupted in the middle of a round") from error


def _choose_next(generation: Generation, logits: torch.Tensor, best: int | None = None) -> int:
    """Adds the target's choice from a row of logits to the answer; `best` is the likeliest token, -1 in broken rows."""
    sampler = generation.sampler
    if best is not None and sampler.params.is_plain_greedy:
        if best < 0:
            raise broken_logits()
        token = best
    else:
        token = sampler.choose(logits, generation.new_tokens)
    found = sampler.logprobs(logits, token)
    if found is not None:
        generation.logprobs.append(found)
    generation.append(token)
    return token


def _said(generation: Generation) -> Continuation:
    """What the text itself says will follow; that may reach deeper than drafts do."""
    if generation.lookup is None:
        return Continuation()
    most = min(generation.most_nodes, generation.remaining - 1)
    return generation.lookup.propose(generation.tokens, most)


def _noise(generation: Generation) -> Noise | None:
    params = generation.request.sampling
    if not generation.request.drafting.noise_aware or params.temperature == 0:
        return None
    return Noise(params.temperature, generation.sampler.seed, len(generation.tokens))


def _most_depth(generation: Generation, draft_length: int) -> int:
    """Depths that the next tree can reach: one for each of its nodes at most."""
    kind = generation.request.drafting.kind
    if kind.shape == "chain":
        return draft_length
    reach = generation.pace.reach if kind.rule == "calibrated" else draft_length
    return min(draft_length, reach, max(1, generation.most_nodes))


def _segment(generation: Generation, tree: Tree) -> Segment:
    root = len(generation.tokens) - 1
    tokens = [generation.tokens[-1], *tree.token]
    return Segment(_slot(generation), root, tokens, [parent + 1 for parent in tree.parent])


def _slot(generation: Generation) -> int:
    assert generation.slot is not None, "the request holds no slot"
    return generation.slot


def _rounded(columns: int) -> int:
    return (columns + 63) // 64 * 64
