"""Stopping, limits, slots and re-use: what the loop promises beside the tokens themselves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dominotree.adaptive import AdaptiveBudget
from dominotree.calibration import Calibration
from dominotree.decode import Decoder
from dominotree.drafters.coupling import Noise, couple
from dominotree.errors import DominoTreeError, InvalidRequest, NumericalError
from dominotree.generation import Request, Round
from dominotree.methods import METHODS, Drafting, grow
from dominotree.sampling import SamplingParams
from dominotree.tree.batched import build
from dominotree.tree.chain import corrected_chain
from dominotree.tree.scorers import ConditionalScorer, StaticScorer
from dominotree.tree.tree import Tree, Trees
from oracle import OracleDrafter, tiny_costs, tiny_drafter
from targets.tiny import tiny_target
from tree.tabulated import assert_same

PROMPT = [5, 9, 33, 2, 61]


@pytest.fixture(scope="module")
def target():  # type: ignore[no-untyped-def]
    return tiny_target("llama")


@pytest.fixture(scope="module")
def answer(target):  # type: ignore[no-untyped-def]
    sampling = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=1.5, seed=5)
    return Decoder(target, context=128).run([Request(PROMPT, sampling, Drafting("ar"))])[0].new_tokens


def decode(target, answer, **sampling):  # type: ignore[no-untyped-def]
    """With an oracle that has the whole answer accepted, in blocks of 16."""
    oracle = OracleDrafter(target, [PROMPT + answer], block=16)
    params = SamplingParams(temperature=1.5, seed=5, **{"max_new_tokens": 60, "ignore_eos": True, **sampling})
    return Decoder(target, oracle, context=128).run([Request(PROMPT, params)])[0]


def test_the_oracle_is_accepted_in_whole_blocks(target, answer) -> None:  # type: ignore[no-untyped-def]
    generation = decode(target, answer)
    assert generation.new_tokens == answer
    assert generation.stats.mean_accepted > 8


def test_a_chain_is_verified_whole_whatever_the_budget(target, answer) -> None:  # type: ignore[no-untyped-def]
    oracle = OracleDrafter(target, [PROMPT + answer], block=16)
    params = SamplingParams(temperature=1.5, seed=5, max_new_tokens=60, ignore_eos=True)
    for method in ("domino", "dflash"):
        got = Decoder(target, oracle, context=128).run([Request(PROMPT, params, Drafting(method, 1))])[0]
        assert got.new_tokens == answer and max(got.stats.nodes) == oracle.draft_length


class Pauses:
    """A share that drafts in every fourth round and cuts nothing."""

    def __init__(self) -> None:
        self.rounds = 0

    def pays(self, _: int) -> bool:
        self.rounds += 1
        return self.rounds % 4 == 0

    def cut(self, trees: Sequence[Tree], *_: int) -> Sequence[Tree]:
        return trees

    def observe(self, _: int) -> None:
        pass


def test_a_drafter_that_pauses_reads_what_it_missed_at_once(target) -> None:  # type: ignore[no-untyped-def]
    prompts = [PROMPT, PROMPT[::-1]]
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    alone = [g.new_tokens for g in Decoder(target).run([Request(p, params, Drafting("ar")) for p in prompts])]
    contexts, reads = {}, {}
    for share in (None, Pauses()):
        drafter = OracleDrafter(target, [p + a for p, a in zip(prompts, alone, strict=True)], block=4)
        decoder = Decoder(target, drafter, slots=2, share=share)
        counted: list[int] = []
        honest = drafter.extend
        drafter.extend = lambda *a, honest=honest, counted=counted: (counted.append(len(a[1])), honest(*a))  # type: ignore[method-assign, misc]
        done = decoder.run([Request(p, params, Drafting("dominotree", 4)) for p in prompts])
        assert [g.new_tokens for g in done] == alone
        assert max(max(g.stats.nodes) for g in done) == 4 and not any(g.unread for g in done)
        assert decoder._drafts is not None and decoder._drafts.lengths == decoder._cache.lengths
        contexts[share is None] = [
            kept[:, slot, :, :length].clone()
            for slot, length in enumerate(decoder._drafts.lengths)
            for kept in (decoder._drafts.keys, decoder._drafts.values)
        ]
        reads[share is None] = sum(counted) / sum(len(g.stats.nodes) for g in done)
    assert all(torch.equal(*pair) for pair in zip(contexts[True], contexts[False], strict=True))
    assert reads[False] < 0.5 < reads[True]


@pytest.mark.parametrize("at", [0, 1, 2, 5, 20, 59])
def test_a_stop_token_inside_an_accepted_path_ends_the_answer_there(target, answer, at: int) -> None:  # type: ignore[no-untyped-def]
    first = answer.index(answer[at])
    generation = decode(target, answer, stop_token_ids=[answer[at]])
    assert generation.new_tokens == answer[: first + 1]
    assert generation.finish_reason == "stop"
    assert generation.stats.new_tokens == first + 1 == 1 + sum(generation.stats.accepted)


@pytest.mark.parametrize("limit", [1, 2, 3, 17, 18, 40])
def test_max_new_tokens_is_exact(target, answer, limit: int) -> None:  # type: ignore[no-untyped-def]
    generation = decode(target, answer, max_new_tokens=limit)
    assert generation.new_tokens == answer[:limit]
    assert generation.finish_reason == "length"
    assert sum(generation.stats.accepted) == limit - 1


@pytest.mark.parametrize("method", ["ar", "dominotree", "domino", "ddtree"])
@pytest.mark.parametrize("length", [120, 126, 127])
def test_decoding_ends_cleanly_at_the_end_of_the_context(target, method: str, length: int) -> None:  # type: ignore[no-untyped-def]
    prompt = random.Random(1).choices(range(96), k=length)
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    decoder = Decoder(target, tiny_drafter(target, block=9), context=128, max_nodes=40)
    generation = decoder.run([Request(prompt, params, Drafting(method, 40))])[0]
    assert len(generation.tokens) == 128
    assert generation.finish_reason == "length"
    longer = Decoder(target, context=256).run([Request(prompt, params, Drafting("ar"))])[0]
    assert generation.tokens == longer.tokens[:128]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [([], "no tokens"), ([96], "96"), ([-1], "-1"), (list(range(90)) * 2, "180 tokens and the context is 128")],
)
def test_prompts_that_cannot_run_are_refused_in_one_line(target, prompt: list[int], says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest, match=says) as caught:
        Decoder(target, context=128).add(Request(prompt, drafting=Drafting("ar")))
    assert "\n" not in str(caught.value)


def test_methods_that_lack_a_drafter_say_so(target) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest, match="needs a drafter"):
        Decoder(target).add(Request(PROMPT, drafting=Drafting("dominotree")))
    plain = tiny_drafter(target, projector=None)
    with pytest.raises(InvalidRequest, match="needs a Domino drafter"):
        Decoder(target, plain).add(Request(PROMPT, drafting=Drafting("dominotree")))
    with pytest.raises(InvalidRequest, match="room for 16"):
        Decoder(target, plain).add(Request(PROMPT, drafting=Drafting("ddtree", 17)))
    with pytest.raises(InvalidRequest, match="unknown"):
        Drafting("tree")


def test_all_equal_logits_and_a_prompt_of_one_token_decode(target) -> None:  # type: ignore[no-untyped-def]
    flat = tiny_target("llama", scale=0.0)
    drafter = tiny_drafter(flat)
    for method in ("dominotree", "domino", "static", "marginal", "ddtree", "dflash"):
        generation = Decoder(flat, drafter).run([Request([7], SamplingParams(max_new_tokens=9), Drafting(method))])[0]
        assert generation.new_tokens == [0] * 9


@pytest.mark.parametrize("method", ["ar", "dominotree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_weights_are_a_clear_error(method: str, temperature: float) -> None:
    broken = tiny_target("llama")
    broken._stack.norm[0] = float("nan")
    decoder = Decoder(broken, tiny_drafter(broken))
    with pytest.raises(NumericalError, match="NaN"):
        decoder.run([Request(PROMPT, SamplingParams(temperature=temperature), Drafting(method))])
    assert not decoder.busy
    assert decoder._cache.free == [0]


def test_one_decoder_serves_again_after_long_short_and_failed_requests(target) -> None:  # type: ignore[no-untyped-def]
    decoder = Decoder(target, tiny_drafter(target), context=200)
    params = SamplingParams(max_new_tokens=25, ignore_eos=True)

    def explode(ids, logits):  # type: ignore[no-untyped-def]
        raise RuntimeError("a processor's own fault")

    long, short = PROMPT * 20, PROMPT[:2]
    expected = {
        len(p): Decoder(target, context=200).run([Request(p, params, Drafting("ar"))])[0].tokens for p in (long, short)
    }
    assert decoder.run([Request(long, params)])[0].tokens == expected[len(long)]
    with pytest.raises(RuntimeError):
        decoder.run([Request(long, SamplingParams(logits_processors=(explode,)))])
    for prompt in (short, short, long):
        assert decoder.run([Request(prompt, params)])[0].tokens == expected[len(prompt)]


def test_a_stream_that_is_dropped_frees_its_slot(target) -> None:  # type: ignore[no-untyped-def]
    decoder = Decoder(target, tiny_drafter(target))
    stream = decoder.stream(Request(PROMPT, SamplingParams(max_new_tokens=100, ignore_eos=True)))
    next(stream)
    stream.close()
    assert not decoder.busy
    assert decoder._cache.free == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reused_prefixes_change_nothing(dtype: torch.dtype) -> None:
    """A conversation in one slot, plain decoding in between, equals fresh decoders."""
    target = tiny_target("qwen2", dtype=dtype)
    drafter = tiny_drafter(target)
    decoder = Decoder(target, drafter, slots=2, context=400)
    rng = random.Random(2)
    history: list[int] = []
    for turn, method in enumerate(["dominotree", "ar", "dominotree", "domino", "ar", "ar", "dominotree"]):
        history = history[: rng.choice([len(history), len(history), 20])] + rng.choices(range(2, 96), k=11)
        params = SamplingParams(temperature=0.8, seed=turn, max_new_tokens=20, ignore_eos=True)
        got = decoder.run([Request(history, params, Drafting(method), reuse=True)])[0]
        fresh = Decoder(target, drafter, context=400).run([Request(history, params, Drafting(method))])[0]
        assert got.tokens == fresh.tokens
        assert turn == 0 or got.stats.reused_tokens > 0
        history = list(got.tokens)
    whole = decoder.run([Request(history[:-1], params, Drafting("ar"), reuse=True)])[0]
    assert whole.stats.reused_tokens <= len(history) - 2


def test_logprobs_are_those_of_the_raw_distribution(target, answer) -> None:  # type: ignore[no-untyped-def]
    from dominotree.targets.rows import Segment

    for sampling in ({"logprobs": 5}, {"logprobs": 0, "frequency_penalty": 1.0}):
        generation = decode(target, answer, **sampling)
        tokens = generation.tokens
        raw = target.forward(target.new_cache(1, 128), [Segment(0, 0, tokens)]).logits.float().log_softmax(-1)
        assert len(generation.logprobs) == len(generation.new_tokens)
        for i, found in enumerate(generation.logprobs):
            row = raw[len(PROMPT) + i - 1]
            assert found.token == tokens[len(PROMPT) + i]
            assert found.logprob == pytest.approx(float(row[found.token]), abs=1e-4)
            assert [t for t, _ in found.top] == row.topk(sampling["logprobs"]).indices.tolist()


@pytest.mark.parametrize("shift_label", [True, False])
def test_no_more_depths_are_drafted_than_the_tree_has_nodes(shift_label: bool) -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target, shift_label=shift_label)
    cache = drafter.new_cache(1, 32)
    whole = drafter.draft(cache, [0], [5])
    for depths in (1, 3, whole.base.shape[1], 40):
        draft = drafter.draft(cache, [0], [5], depths=depths)
        drafted = min(depths, drafter.draft_length)
        assert draft.base.shape[1] == draft.hidden.shape[1] == drafted
    pair_drafts: list[int] = []
    honest = drafter.draft

    def spy(*args: Any, depths: int | None = None, **options: Any) -> Any:
        assert depths is not None
        pair_drafts.append(depths)
        return honest(*args, depths=depths)

    drafter.draft = spy  # type: ignore[method-assign]
    for method, budget, expected in (
        ("dominotree", 2, 2),
        ("dominotree", 40, drafter.draft_length),
        ("domino", None, drafter.draft_length),
    ):
        pair_drafts.clear()
        Decoder(target, drafter, max_nodes=64, context=64).run(
            [Request([4, 5, 6], SamplingParams(max_new_tokens=12, ignore_eos=True), Drafting(method, budget))]
        )
        assert set(pair_drafts) == {expected}


@pytest.mark.parametrize("method", ["dominotree", "domino", "ddtree"])
def test_a_broken_draft_ends_its_own_request_only(target, method: str, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    drafter = tiny_drafter(target)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    prompts = [PROMPT, PROMPT[::-1], PROMPT[1:]]
    requests = [Request(prompt, params, Drafting(method, 6)) for prompt in prompts]
    expected = [g.new_tokens for g in Decoder(target, drafter, slots=3, context=64).run(requests)]
    decoder = Decoder(target, drafter, slots=3, context=64)
    generations = [decoder.add(request) for request in requests]
    for _ in range(4):
        decoder.step()
    made = drafter.draft

    def spoilt(cache: Any, slots: Any, roots: Any, **options: Any) -> Any:
        draft = made(cache, slots, roots, **options)
        for row, slot in enumerate(slots):
            if slot == generations[1].slot:
                draft.base[row, 0, 3] = float("nan")
        return draft

    monkeypatch.setattr(drafter, "draft", spoilt)
    with pytest.raises(NumericalError):
        decoder.step()
    while decoder.busy:
        decoder.step()
    assert [g.finish_reason for g in generations] == ["length", "abort", "length"]
    assert [g.new_tokens for i, g in enumerate(generations) if i != 1] == [expected[0], expected[2]]


THREE = [PROMPT, PROMPT[::-1], PROMPT[1:]]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


def alone(target, drafter, method: str) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """What each of three prompts is answered by itself."""
    return [Decoder(target, drafter).run([Request(p, GREEDY, Drafting(method, 6))])[0].new_tokens for p in THREE]


@pytest.mark.parametrize("method", ["ar", "dominotree"])
@pytest.mark.parametrize("aborts", [0, 1])
def test_a_callback_may_abort_requests_of_its_own_round(target, method: str, aborts: int) -> None:  # type: ignore[no-untyped-def]
    drafter = tiny_drafter(target)
    expected = alone(target, drafter, method)
    decoder = Decoder(target, drafter, slots=3, context=64)

    def stopping(tokens: Sequence[int]) -> bool:
        if len(tokens) == len(PROMPT) + 4:
            decoder.abort(generations[aborts])
        return False

    told: dict[int, list[int]] = {0: [], 1: [], 2: []}
    generations = [
        decoder.add(
            Request(
                prompt,
                GREEDY,
                Drafting(method, 6),
                stopping=stopping if i == 0 else None,
                recorder=lambda found, i=i: told[i].extend(found.tokens),  # type: ignore[misc]
            )
        )
        for i, prompt in enumerate(THREE)
    ]
    while decoder.busy:
        decoder.step()
    assert [g.finish_reason for g in generations] == ["abort" if i == aborts else "length" for i in range(3)]
    for i, generation in enumerate(generations):
        assert generation.new_tokens == expected[i][: len(generation.new_tokens)]
        assert [*generation.new_tokens[:1], *told[i]] == generation.new_tokens
    assert decoder._cache.free == [0, 1, 2]


@pytest.mark.parametrize("method", ["ar", "dominotree"])
def test_an_interrupt_between_choosing_and_keeping_ends_the_request_it_hit(target, method: str) -> None:  # type: ignore[no-untyped-def]
    drafter = tiny_drafter(target)
    expected = alone(target, drafter, method)
    decoder = Decoder(target, drafter, slots=3, context=64)
    generations = [decoder.add(Request(p, GREEDY, Drafting(method, 6))) for p in THREE]
    for _ in range(3):
        decoder.step()
    commit = decoder._cache.commit

    def interrupted(slot: int, tail: Sequence[int]) -> None:
        if slot == generations[1].slot:
            raise KeyboardInterrupt
        commit(slot, tail)

    decoder._cache.commit = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        decoder.step()
    while decoder.busy:
        decoder.step()
    assert [g.finish_reason for g in generations] == ["length", "abort", "length"]
    assert [generations[i].new_tokens for i in (0, 2)] == [expected[0], expected[2]]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_fails_while_a_slot_is_given_back_loses_no_slot_and_no_answer(  # type: ignore[no-untyped-def]
    target, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read then serves only a later prompt."""
    drafter = tiny_drafter(target)
    decoder, request = Decoder(target, drafter, context=64), Request(PROMPT, GREEDY, Drafting("dominotree", 6))
    expected, read = alone(target, drafter, "dominotree")[0], decoder._read

    def failing(behind: Any) -> None:
        if any(generation.finished for generation in behind):
            raise error
        read(behind)

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "_read", failing)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                decoder.run([request])
        else:
            assert decoder.run([request])[0].new_tokens == expected
    assert not decoder.busy and decoder._cache.free == [0]
    assert decoder.run([request])[0].new_tokens == expected


def test_an_error_reaches_who_waits_for_the_request_that_made_it(target) -> None:  # type: ignore[no-untyped-def]
    def explode(path: Any, logits: torch.Tensor) -> torch.Tensor:
        if len(path) > len(PROMPT) + 3:
            raise RuntimeError("a processor's own fault")
        return logits

    decoder = Decoder(target, slots=2, context=64)
    bad = SamplingParams(max_new_tokens=12, ignore_eos=True, logits_processors=(explode,))
    theirs = decoder.stream(Request(PROMPT, bad, Drafting("ar")))
    next(theirs)
    [ours] = decoder.run([Request(THREE[1], GREEDY, Drafting("ar"))])
    assert ours.new_tokens == alone(target, None, "ar")[1]
    with pytest.raises(RuntimeError, match="own fault"):
        next(theirs)
    assert not decoder.busy


def test_a_recorder_that_fails_ends_its_own_request_only(target) -> None:  # type: ignore[no-untyped-def]
    def fail(_: object) -> None:
        raise RuntimeError("a recorder's own fault")

    decoder = Decoder(target, slots=3, context=64)
    recorders = (None, fail, None)
    generations = [
        decoder.add(Request(p, GREEDY, Drafting("ar"), recorder=r)) for p, r in zip(THREE, recorders, strict=True)
    ]
    with pytest.raises(RuntimeError, match="own fault"):
        decoder.step()
    while decoder.busy:
        decoder.step()
    assert [g.finish_reason for g in generations] == ["length", "abort", "length"]


def test_what_a_resting_drafter_has_not_read_stays_bounded(target, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    class Never(Pauses):
        def pays(self, _: int) -> bool:
            return False

    monkeypatch.setattr("dominotree.decode.PREFILL_CHUNK", 8)
    decoder = Decoder(target, tiny_drafter(target), slots=2, context=64, share=Never())
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    generations = [decoder.add(Request(p, params, Drafting("dominotree", 4))) for p in THREE[:2]]
    most = 0
    while decoder.busy:
        decoder.step()
        most = max(most, *(sum(map(len, g.unread)) for g in generations))
    assert most == 8


def test_broken_values_do_not_stay_in_a_slot(target) -> None:  # type: ignore[no-untyped-def]
    decoder = Decoder(target, context=64)

    def spoil(path: Any, logits: torch.Tensor) -> torch.Tensor:
        decoder._cache.keys[:, 0, :, 3:] = float("nan")
        return logits * float("nan")

    broken = SamplingParams(max_new_tokens=12, logits_processors=(spoil,))
    with pytest.raises((NumericalError, InvalidRequest)):
        decoder.run([Request(PROMPT, broken, Drafting("ar"))])
    assert decoder._cache.keys.isfinite().all() and decoder._cache.lengths == [0]


def test_the_default_dtype_of_torch_does_not_matter(target, answer) -> None:  # type: ignore[no-untyped-def]
    drafter = tiny_drafter(target)
    requests = [
        Request(
            PROMPT, SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=1.5, seed=5), Drafting(method, 6)
        )
        for method in ("dominotree", "domino", "ddtree")
    ]
    try:
        torch.set_default_dtype(torch.bfloat16)
        got = [g.new_tokens for g in Decoder(target, drafter, context=64).run(requests)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert got == [answer[:20]] * 3


def test_a_logits_processor_is_asked_once_a_token(target) -> None:  # type: ignore[no-untyped-def]
    asked = []

    def processor(path: Any, logits: torch.Tensor) -> torch.Tensor:
        asked.append(len(path))
        return logits.index_fill(0, torch.tensor([7]), float("inf")) if len(path) % 2 else logits

    params = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=1.0, seed=1, logits_processors=[processor])
    Decoder(target, context=64).run([Request(PROMPT, params, Drafting("ar"))])
    assert asked == [5, 6, 7, 8, 9, 10]


def test_a_drafters_context_does_not_overflow(target) -> None:  # type: ignore[no-untyped-def]
    drafter = tiny_drafter(target)
    cache = drafter.new_cache(1, 8)
    features = torch.zeros(cache.length + 1, len(drafter.feature_layers) * target.hidden_size)
    with pytest.raises(InvalidRequest, match="room"):
        drafter.extend(cache, [0], [len(features)], features)
    cache.lengths[0] = cache.length
    with pytest.raises(InvalidRequest, match="room"):
        drafter.draft(cache, [0], [5])


def test_drafts_that_know_the_noise_foresee_what_it_alone_decides() -> None:
    flat = tiny_target("llama", scale=0.0)  # every token is as likely, so the draw is the noise's
    drafter = tiny_drafter(flat)
    whole = drafter.draft_length + 1
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=1 + 4 * whole, ignore_eos=True)
    runs = [
        Decoder(flat, drafter, context=64).run([Request([7, 8], params, Drafting("dflash", noise_aware=aware))])[0]
        for aware in (True, False)
    ]
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].stats.mean_accepted > 3 > 2 > runs[1].stats.mean_accepted


@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_noise_and_its_factor_reach_tree_and_chain(target, draft_vocab: int | None) -> None:  # type: ignore[no-untyped-def]
    drafter, noise = tiny_drafter(target, draft_vocab=draft_vocab), [Noise(0.7, 3, 9)]
    draft, depths = drafter.draft(drafter.new_cache(1, 32), [0], [5]), [drafter.draft_length]
    assert drafter.head is not None
    base, scale = couple(draft.base, noise, drafter.vocabulary(draft).tokens(draft.base))
    given = base, draft.hidden, draft.roots, drafter.head
    grown = grow(Drafting("dominotree", 300), drafter, draft, depths, noise)
    assert max(grown.single(0).depth) > 1  # the first depth is not corrected
    assert_same(grown, build(ConditionalScorer(*given, 64, scale), 300))
    assert not torch.equal(grown.score, grow(Drafting("dominotree", 300), drafter, draft, depths).score)
    assert_same(grow(Drafting("domino"), drafter, draft, depths, noise), corrected_chain(*given, scale=scale))


def test_every_conversation_finds_its_own_slot_again(target) -> None:  # type: ignore[no-untyped-def]
    decoder, params = Decoder(target, slots=2, context=128), SamplingParams(max_new_tokens=4, ignore_eos=True)

    def ask(*prompts: list[int]) -> list[int]:
        requests = [Request(prompt, params, Drafting("ar"), reuse=True) for prompt in prompts]
        return [generation.stats.reused_tokens for generation in decoder.run(requests)]

    first, second = list(range(2, 22)), list(range(50, 70))
    ask(first, second)
    assert ask(second) == ask(first) == [19]


def test_plain_turns_do_not_need_a_drafters_context(target) -> None:  # type: ignore[no-untyped-def]
    decoder = Decoder(target, tiny_drafter(target), context=128)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    first = decoder.run([Request(PROMPT, params, Drafting("ar"), reuse=True)])[0]
    again = decoder.run([Request([*first.tokens, 7], params, Drafting("ar"), reuse=True)])[0]
    assert again.stats.reused_tokens == len(first.tokens) - 1


def test_adaptive_drafts_fewer_depths_and_rests_where_nothing_pays(target, answer) -> None:  # type: ignore[no-untyped-def]
    oracle = OracleDrafter(target, [PROMPT + answer], block=16)
    depths, honest = [], oracle.draft

    def watched(*args: Any, **options: Any) -> Any:
        depths.append(options["depths"])
        return honest(*args, **options)

    oracle.draft = watched  # type: ignore[method-assign]
    adaptive = AdaptiveBudget(tiny_costs(50.0), Calibration.fresh(oracle.draft_length))  # no node ever pays
    params = SamplingParams(temperature=1.5, seed=5, max_new_tokens=60, ignore_eos=True)
    decoder = Decoder(target, oracle, context=128, max_nodes=64, adaptive=adaptive)
    got = decoder.run([Request(PROMPT, params, Drafting("adaptive"))])[0]
    assert got.new_tokens == answer and got.stats.rounds == 59
    assert depths[0] == 8 and set(depths[1:]) == {3} and len(depths) < 20


def test_a_small_tree_beside_it_leaves_a_draft_its_depth(target, answer) -> None:  # type: ignore[no-untyped-def]
    oracle = OracleDrafter(target, [PROMPT + answer] * 2, block=16)
    params = SamplingParams(temperature=1.5, seed=5, max_new_tokens=60, ignore_eos=True)
    requests = [Request(PROMPT, params, Drafting("dominotree", budget)) for budget in (1, 16)]
    small, large = Decoder(target, oracle, slots=2, context=128).run(requests)
    assert small.new_tokens == large.new_tokens == answer and large.stats.mean_accepted > 8


def test_every_option_of_drafting_shapes_the_tree(target) -> None:  # type: ignore[no-untyped-def]
    drafter = tiny_drafter(target)
    draft, depths = drafter.draft(drafter.new_cache(1, 32), [0], [5]), [drafter.draft_length]
    assert drafter.head is not None

    def tree(method: str, candidates: int = 64, **options: Any) -> Trees:
        return grow(Drafting(method, 40, candidates, **options), drafter, draft, depths)

    def most_children(found: Tree) -> int:
        return max(len(found.children(node)) for node in range(-1, len(found)))

    assert most_children(tree("dominotree").single(0)) > 3
    assert most_children(tree("dominotree", node_topk=2).single(0)) == 2
    few = tree("dominotree", 3).single(0)
    likeliest = set(draft.base[0, 0].topk(3).indices.tolist())
    assert most_children(few) <= 3 and {few.token[node] for node in few.children(-1)} <= likeliest
    assert tree("dominotree", 3, sampled_candidates=True).single(0).token != few.token
    static = StaticScorer(draft.base, draft.hidden, draft.roots, drafter.head, 8)
    assert_same(tree("static", 8), build(static, 40))
    assert not torch.equal(tree("static", 8).score, tree("dominotree", 8).score)


@pytest.mark.parametrize("method", ["lookup", "lookuptree", "domino", "dflash", "static"])
def test_nothing_is_drafted_past_the_limit(target, method: str) -> None:  # type: ignore[no-untyped-def]
    rounds: list[Round] = []
    budget = 12 if METHODS[method].shape == "tree" else None
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    request = Request([5, 9, 33, 2] * 4, params, Drafting(method, budget), recorder=rounds.append)
    Decoder(target, tiny_drafter(target, block=9), context=64).run([request])
    left = 8  # of nine, the prompt's pass makes one
    for done in rounds:
        assert max(done.tree.depth, default=-1) + 1 < left
        left -= len(done.tokens)
    assert left == 0


class Told(Pauses):
    """A share that always drafts, and keeps what it is told."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.cuts: list[tuple[int, ...]] = []
        self.seen: list[int] = []

    def pays(self, sequences: int) -> bool:
        self.asked.append(sequences)
        return True

    def cut(self, trees: Sequence[Tree], *about: int) -> Sequence[Tree]:
        self.cuts.append(about)
        return trees

    def observe(self, accepted: int) -> None:
        self.seen.append(accepted)


def test_a_share_is_told_of_rounds_of_several_and_of_those_alone(target) -> None:  # type: ignore[no-untyped-def]
    prompts, share, lone = [PROMPT[:3], PROMPT], Told(), Told()
    plain = [Decoder(target).run([Request(p, GREEDY, Drafting("ar"))])[0].tokens for p in prompts]
    drafter = OracleDrafter(target, plain, block=4)
    tree, ar = Request(prompts[0], GREEDY, Drafting("dominotree", 4)), Request(prompts[1], GREEDY, Drafting("ar"))
    drafted, _ = Decoder(target, drafter, slots=2, share=share).run([tree, ar])
    assert share.cuts[0] == (2, 6, 1) and set(share.asked) == {2}
    assert {(sequences, drafts) for sequences, _, drafts in share.cuts} == {(2, 1)}
    assert sum(share.seen) == sum(drafted.stats.accepted) - drafted.stats.rounds > 0
    Decoder(target, drafter, share=lone).run([tree])
    assert not lone.asked and not lone.cuts and not lone.seen


@pytest.mark.parametrize("where", ["_hand_over", "_record", "_claim"])
def test_an_interrupt_anywhere_leaves_a_decoder_that_works(target, where: str, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    drafter = tiny_drafter(target)
    expected = alone(target, drafter, "dominotree")
    decoder = Decoder(target, drafter, slots=2, context=64)
    requests = [Request(prompt, GREEDY, Drafting("dominotree", 6)) for prompt in THREE]
    theirs = decoder.stream(requests[0])
    next(theirs)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decoder, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.run([requests[1]])
    assert [g.new_tokens for g in decoder.run(requests[1:])] == expected[1:]
    if where == "_hand_over":  # it lost what its drafter had to read
        with pytest.raises(DominoTreeError, match="interrupted"):
            list(theirs)
    else:
        assert list(theirs)[-1].new_tokens == expected[0]
    assert not decoder.busy and decoder._cache.free == [0, 1]
