"""Stopping, limits, slots and re-use: what the loop promises beside the tokens themselves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dominotree.decode import Decoder
from dominotree.errors import InvalidRequest, NumericalError
from dominotree.generation import Request
from dominotree.methods import Drafting
from dominotree.sampling import SamplingParams
from dominotree.tree.tree import Tree
from oracle import OracleDrafter, tiny_drafter
from targets.tiny import tiny_target

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
