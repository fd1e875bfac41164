"""Faults that users of other engines met while decoding, tried here: the right value of each."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import SequenceBiasLogitsProcessor

from dominotree.decode import Decoder
from dominotree.drafters.dflash import Draft, Drafter
from dominotree.generation import Generation, Request
from dominotree.methods import METHODS, Drafting, grow
from dominotree.sampling import Sampler, SamplingParams
from dominotree.targets.base import Target
from dominotree.targets.cache import SlotCache
from dominotree.targets.decoder import DecoderTarget
from drafters.synthetic import tiny_config, tiny_tensors
from oracle import OracleDrafter, tiny_drafter
from targets.tiny import tiny_model, tiny_target

PROMPT = [5, 9, 33, 2, 61]
FIXED = [name for name, method in METHODS.items() if method.rule == "fixed" and name != "ar"]
DRAFTED = [name for name in FIXED if METHODS[name].drafts]


@pytest.fixture(scope="module")
def target() -> DecoderTarget:
    return tiny_target("llama")


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 24, "ignore_eos": True, **changes})


def plain(target: Target, sampling: SamplingParams, prompt: list[int] = PROMPT) -> Generation:
    return Decoder(target, context=256).run([Request(prompt, sampling, Drafting("ar"))])[0]


# Sampling transforms


def test_tokens_that_the_transforms_mask_are_never_emitted_though_they_are_drafted() -> None:
    """Whatever the uniform draw: with top-k, top-p or a ban, a masked token has no chance, also in bf16."""
    target = tiny_target("llama", dtype=torch.bfloat16, vocab_size=24)
    prompt, banned = [3, 13, 20, 2], list(range(4, 12))
    for sampling in (
        params(temperature=1.0, seed=3, logit_bias=dict.fromkeys(banned, -float("inf"))),
        params(temperature=1.5, seed=3, top_k=2),
        params(temperature=1.5, seed=3, top_p=0.2),
    ):
        expected = plain(target, sampling, prompt).tokens
        drafter = OracleDrafter(target, [[*prompt, *banned * 8]], mask_token=1)
        for method in ("domino", "dominotree"):
            got = Decoder(target, drafter, context=64).run([Request(prompt, sampling, Drafting(method))])[0]
            assert got.tokens == expected
            assert not sampling.logit_bias or not set(got.new_tokens) & set(banned)


def test_a_processor_sees_prompt_and_emitted_tokens_once_each(target: DecoderTarget) -> None:
    """Drafts that were rejected leave no trace in a processor with a memory."""
    for method in ("ar", *FIXED):
        seen: list[list[int]] = []

        def never_twice(ids: Any, logits: torch.Tensor, seen: list[list[int]] = seen) -> torch.Tensor:
            seen.append(list(ids))
            return logits.index_fill(0, torch.tensor(sorted({*ids})), -30.0)

        sampling = params(logits_processors=(never_twice,))
        reference = plain(target, sampling).tokens
        del seen[:]
        drafter = OracleDrafter(target, [reference], right=0.6, sibling=0.2, wrong=0.2)
        got = Decoder(target, drafter, context=64).run([Request(PROMPT, sampling, Drafting(method))])[0]
        assert got.tokens == reference
        assert seen == [reference[:i] for i in range(len(PROMPT), len(reference))]
        assert len(set(got.new_tokens)) == len(got.new_tokens)


def test_a_ban_reaches_every_verified_token(target: DecoderTarget) -> None:
    free = plain(target, params()).new_tokens
    sampling = params(logit_bias={free[0]: -float("inf")})
    bias = SequenceBiasLogitsProcessor({(free[0],): -float("inf")})
    expected = tiny_model("llama").generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64), do_sample=False,
        max_new_tokens=24, pad_token_id=0, eos_token_id=None, logits_processor=[bias],
    )[0].tolist()  # fmt: skip
    for drafter in (OracleDrafter(target, [PROMPT + free]), OracleDrafter(target, [expected])):
        got = Decoder(target, drafter, context=64).run([Request(PROMPT, sampling)])[0]
        assert got.tokens == expected
        assert free[0] not in got.new_tokens


def test_min_p_near_one_leaves_the_favourite_everywhere(target: DecoderTarget) -> None:
    greedy = plain(target, params()).tokens
    drafter = OracleDrafter(target, [greedy], right=0.5, sibling=0.5)
    got = Decoder(target, drafter, context=64).run([Request(PROMPT, params(temperature=0.7, seed=1, min_p=0.999))])[0]
    assert got.tokens == greedy
    assert got.stats.mean_accepted > 2


def test_an_infinite_bias_leaves_only_what_it_names() -> None:
    logits = torch.zeros(6)
    for transform in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.2}):
        drawn = set()
        for seed in range(40):
            bias = {2: float("inf"), 4: float("inf")}
            sampling = SamplingParams(temperature=1.0, seed=seed, logit_bias=bias, **transform)  # type: ignore[arg-type]
            drawn.add(Sampler(sampling, [1], 6).choose(logits, []))
        assert drawn == {2, 4} or (transform == {"top_p": 0.5} and drawn <= {2, 4})


def test_logprobs_stay_raw_when_a_processor_writes_into_its_logits(target: DecoderTarget) -> None:
    def in_place(ids: Any, logits: torch.Tensor) -> torch.Tensor:
        logits[7] = 1000.0
        return logits

    wanted = plain(target, params(logits_processors=(lambda _, row: in_place(_, row.clone()),), logprobs=2))
    drafter = OracleDrafter(target, [wanted.tokens])
    got = Decoder(target, drafter, context=64).run(
        [Request(PROMPT, params(logits_processors=(in_place,), logprobs=2))]
    )[0]
    assert got.new_tokens == [7] * 24
    for mine, theirs in zip(got.logprobs, wanted.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert mine.logprob < -1


# Drafts


def test_draft_slots_line_up_with_their_depths_whatever_the_labels(target: DecoderTarget) -> None:
    """With shifted labels slot 0 drafts too; every depth of every method is filled from its own slot."""
    features = torch.randn(5, 2 * target.hidden_size, generator=torch.Generator().manual_seed(0))
    drafts: dict[bool, Draft] = {}
    for shift in (True, False):
        for prefix in range(4):
            config = tiny_config(shift_label=shift, prefix_len=prefix)
            drafter = Drafter(config, tiny_tensors(config), target)
            context = drafter.new_cache(1, 64)
            drafter.extend(context, [0], [5], features)
            draft = drafts[shift] = drafter.draft(context, [0], [17])
            assert draft.base.shape[1] == drafter.draft_length == 6 - (not shift)
            for method in DRAFTED:
                candidates = replace(draft, base=draft.base * 20)  # peaked, so that trees are deep
                tree = grow(Drafting(method, 64, 4), drafter, candidates, [drafter.draft_length]).single(0)
                assert set(tree.depth) == set(range(drafter.draft_length)), method
                if method == "dflash":
                    assert tree.token == draft.base[0].argmax(-1).tolist()
                if method == "domino":
                    assert drafter.head is not None
                    assert tree.token[:prefix] == candidates.base[0, :prefix].argmax(-1).tolist()
                    hidden = drafter.head.hidden_part(draft.hidden[0])
                    state = drafter.head.initial_state(draft.roots)
                    for depth, token in enumerate(tree.token):
                        if depth >= prefix:
                            logits = candidates.base[0, depth] + drafter.head.correction(hidden[depth], state[0])
                            assert token == int(logits.argmax())
                        state = drafter.head.advance(state, torch.tensor([token]))
    torch.testing.assert_close(drafts[True].base[:, 1:], drafts[False].base)


class Corrupted(Drafter):
    """Takes note of its logits, then proposes the next `n` tokens of a script and a wrong one, n going round."""

    def __init__(self, *args: Any, script: list[int]) -> None:
        super().__init__(*args)
        self.script, self.noted = script, {}  # type: ignore[var-annotated]

    def draft(self, cache: SlotCache, slots: Any, roots: Any, **options: Any) -> Draft:
        draft = super().draft(cache, slots, roots, **options)
        root = cache.lengths[0]
        self.noted[root] = draft.base[0].clone()
        tokens = corrupted(draft.base[0].argmax(-1).tolist(), self.script[root + 1 :], len(self.noted) % 4)
        base = torch.full_like(draft.base, -9.0)
        base[0, range(len(tokens)), tokens] = 9.0
        return replace(draft, base=base)


def corrupted(tokens: list[int], script: list[int], right: int) -> list[int]:
    tokens = [script[i] if i < min(right, len(script)) else token for i, token in enumerate(tokens)]
    if right < min(len(tokens), len(script)):
        tokens[right] = (script[right] + 1) % 96
    return tokens


def test_drafts_are_those_of_transformers_own_dflash_round_by_round(
    target: DecoderTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights in both, several rounds of decoding, paths accepted in part."""
    try:
        from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
        from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator as Generator
    except ImportError:
        pytest.skip("this transformers has no DFlash")
    c = tiny_config(projector=None, shift_label=False)
    tensors = tiny_tensors(c)
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    same += ("head_dim", "rms_norm_eps", "block_size", "mask_token_id")
    config = MuseGlimmerAssistantConfig(
        **{name: getattr(c, name) for name in same},
        target_layer_ids=list(c.target_layer_ids),
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        layer_types=["full_attention"] * c.num_hidden_layers,
        attn_implementation="eager",
    )
    assistant = MuseGlimmerAssistantModel(config).eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    assistant.load_state_dict({names.get(name, name): tensor for name, tensor in tensors.items()})
    expected = plain(target, params()).tokens
    theirs: dict[int, torch.Tensor] = {}
    propose = Generator.get_candidates

    def get_candidates(self: Any, input_ids: torch.Tensor, **rest: Any) -> Any:
        ids, logits = propose(self, input_ids, **rest)
        if logits is None:
            return ids, logits
        known = input_ids.shape[1]
        theirs[known - 1] = logits[0].clone()
        tokens = corrupted(ids[0, known:].tolist(), expected[known:], len(theirs) % 4)
        return torch.cat([input_ids, torch.tensor([tokens])], dim=1), logits

    monkeypatch.setattr(Generator, "get_candidates", get_candidates)
    got = tiny_model("llama").generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64), do_sample=False,
        assistant_model=assistant, speculation_type="dflash", max_new_tokens=24, pad_token_id=0, eos_token_id=None,
    )[0].tolist()  # fmt: skip
    ours = Corrupted(c, tensors, target, script=expected)
    generation = Decoder(target, ours, context=64).run([Request(PROMPT, params(), Drafting("dflash"))])[0]
    assert got == generation.tokens == expected
    assert set(generation.stats.accepted[:4]) == {1, 2, 3, 4}
    shared = theirs.keys() & ours.noted.keys()
    assert len(shared) >= 8
    for root in shared:
        torch.testing.assert_close(ours.noted[root], theirs[root], atol=1e-5, rtol=0)


# Vocabularies and contexts that differ


@pytest.mark.parametrize(("padded", "others"), [(128, 112), (112, 128)])
def test_vocabularies_padded_differently_draft_only_what_both_hold(padded: int, others: int) -> None:
    target = tiny_target("llama", vocab_size=padded)
    config = tiny_config(vocab=others)
    drafter = Drafter(config, tiny_tensors(config), target)
    context = drafter.new_cache(1, 64)
    drafter.extend(context, [0], [2], torch.randn(2, 2 * target.hidden_size))
    draft = drafter.draft(context, [0], [5])
    for method in DRAFTED:
        tree = grow(Drafting(method, 200, 0), drafter, draft, [6]).single(0)
        assert 0 <= min(tree.token) <= max(tree.token) < 112
        got = Decoder(target, drafter, context=64, max_nodes=200).run(
            [Request(PROMPT, params(), Drafting(method, 200, 0))]
        )
        assert got[0].tokens == plain(target, params()).tokens


def test_a_drafter_made_for_shorter_texts_goes_on_drafting(target: DecoderTarget) -> None:
    config = replace(tiny_config(), max_position_embeddings=64)
    drafter = Drafter(config, tiny_tensors(config), target)
    prompt = [2 + i % 90 for i in range(100)]
    got = Decoder(target, drafter, context=256).run([Request(prompt, params(max_new_tokens=200))])[0]
    assert got.tokens == plain(target, params(max_new_tokens=200), prompt).tokens
    assert got.finish_reason == "length"
    assert sum(got.stats.nodes) > 0


@pytest.mark.parametrize("length", [120, 124, 126])
def test_drafts_shrink_towards_the_end_of_the_context(target: DecoderTarget, length: int) -> None:
    prompt = [2 + i % 90 for i in range(length)]
    depths: list[tuple[int, int]] = []
    decoder = Decoder(target, tiny_drafter(target, block=9), context=128, max_nodes=64)
    build = decoder._build

    def spy(batch: Any, draft: Any) -> Any:
        trees = build(batch, draft)
        depths.extend((g.remaining, max(trees[id(g)].depth, default=-1) + 1) for g in batch)
        return trees

    decoder._build = spy  # type: ignore[method-assign]
    got = decoder.run([Request(prompt, params(max_new_tokens=50), Drafting("dominotree", 64))])[0]
    assert got.finish_reason == "length"
    assert len(got.tokens) == 128
    assert all(0 < depth < remaining for remaining, depth in depths)
    assert bool(depths) == (length < 126)  # the last token of all is the target's own


@pytest.mark.parametrize(
    "sizes",
    [
        dict(head_dim=2, num_attention_heads=1, num_key_value_heads=1),
        dict(head_dim=6, num_attention_heads=8, num_key_value_heads=1),
        dict(head_dim=34, num_attention_heads=5, num_key_value_heads=1, hidden_size=30),
        dict(
            head_dim=66, num_attention_heads=7, num_key_value_heads=7, hidden_size=14, intermediate_size=1, vocab_size=5
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_odd_sizes_decode_losslessly(sizes: dict[str, int], dtype: torch.dtype) -> None:
    """Nothing here is a multiple of a vector; fp16 takes PyTorch's attention."""
    target = tiny_target("qwen3", dtype=dtype, **sizes)
    prompt = [i % target.vocab_size for i in range(3, 40)]
    expected = plain(target, params(), prompt).tokens
    shape = dict(heads=1, kv_heads=1, mask_token=2, block=7)
    drafter = OracleDrafter(target, [expected], right=0.7, sibling=0.2, wrong=0.1, **shape)
    decoder = Decoder(target, drafter, context=256, max_nodes=40)
    got = decoder.run([Request(prompt, params(), Drafting("dominotree", 40, 64))])[0]
    assert got.stats.mean_accepted > 2
    if target.row_invariant or dtype == torch.float32:
        assert got.tokens == expected


# Requests that share a decoder


def test_streams_read_in_turns_lose_nothing(target: DecoderTarget) -> None:
    decoder = Decoder(target, tiny_drafter(target), context=64)
    expected = [plain(target, params(), prompt).tokens for prompt in (PROMPT, PROMPT[:2])]
    first = decoder.stream(Request(PROMPT, params()))
    next(first)
    second = list(decoder.stream(Request(PROMPT[:2], params())))  # drives the first one to its end as well
    rest = list(first)
    assert rest[-1].finished
    assert [rest[-1].tokens, second[-1].tokens] == expected
    assert not decoder.busy


def test_threads_may_share_a_decoder(target: DecoderTarget) -> None:
    decoder = Decoder(target, tiny_drafter(target), slots=2, context=64)
    prompts = [[5 + i, 9, 33] for i in range(4)]
    expected = [plain(target, params(), prompt).tokens for prompt in prompts]
    got: list[list[list[int]]] = [[] for _ in prompts]

    def work(i: int) -> None:
        for _ in range(4):
            got[i].append(decoder.run([Request(prompts[i], params())])[0].tokens)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert got == [[tokens] * 4 for tokens in expected]


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_request_that_fails_leaves_those_beside_it_in_order(target: DecoderTarget, at: int) -> None:
    calls = iter(range(1, 1000))

    def fails(ids: Any, logits: torch.Tensor) -> torch.Tensor:
        if next(calls) == at:
            raise RuntimeError("a processor's own fault")
        return logits

    prompts = [[5, 6, 7], [9, 8], [40, 41, 42, 43]]
    expected = [plain(target, params(), prompt).tokens for prompt in prompts]
    drafter = OracleDrafter(target, expected, right=0.8, wrong=0.2)
    decoder = Decoder(target, drafter, slots=3, context=64)
    generations = [
        decoder.add(Request(prompt, params(logits_processors=(fails,) if i == 1 else ())))
        for i, prompt in enumerate(prompts)
    ]
    failures = 0
    while decoder.busy:
        try:
            decoder.step()
        except RuntimeError:
            failures += 1
    assert failures == 1
    assert generations[1].finish_reason == "abort"
    assert [generations[0].tokens, generations[2].tokens] == [expected[0], expected[2]]
    assert decoder.run([Request(prompts[1], params())])[0].tokens == expected[1]


def test_a_stopping_rule_that_fails_ends_its_own_request(target: DecoderTarget) -> None:
    def fails(tokens: Sequence[int]) -> bool:
        if len(tokens) > len(PROMPT) + 5:
            raise RuntimeError("no")
        return False

    for method in ("ar", "lookuptree"):
        decoder = Decoder(target, tiny_drafter(target), slots=2, context=64)
        spoilt = decoder.add(Request(PROMPT, params(), Drafting(method), stopping=fails))
        sound = decoder.add(Request(PROMPT, params(), Drafting(method)))
        with pytest.raises(RuntimeError, match="no"):
            while not spoilt.finished:
                decoder.step()
        while not sound.finished:
            decoder.step()
        assert spoilt.finish_reason == "abort" and not decoder.busy
        assert sound.tokens == plain(target, params()).tokens


def test_a_batch_that_is_refused_or_interrupted_leaves_nothing_behind(
    target: DecoderTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(target, tiny_drafter(target), slots=2, context=64)
    with pytest.raises(Exception, match="no tokens"):
        decoder.run([Request(PROMPT, params()), Request([], params())])
    assert not decoder.busy

    forward, calls = target.forward, iter(range(100))

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return forward(*args, **options)

    monkeypatch.setattr(target, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.run([Request(PROMPT, params()) for _ in range(5)])
    monkeypatch.undo()
    assert not decoder.busy
    assert decoder.run([Request(PROMPT, params())])[0].tokens == plain(target, params()).tokens


def test_counts_add_up_for_every_method(target: DecoderTarget) -> None:
    expected = plain(target, params(max_new_tokens=40)).tokens
    drafter = OracleDrafter(target, [expected], right=0.7, sibling=0.2, wrong=0.1)
    for method in ("ar", *FIXED):
        for limit in (1, 2, 40):
            decoder = Decoder(target, drafter, context=64)
            generation = decoder.run([Request(PROMPT, params(max_new_tokens=limit), Drafting(method, 12))])[0]
            stats = generation.stats
            assert stats.new_tokens == len(generation.new_tokens) == 1 + sum(stats.accepted) == limit
            assert stats.rounds == len(stats.accepted)
            deepest = 12 if METHODS[method].lookup else drafter.draft_length
            assert all(1 <= n <= deepest + 1 for n in stats.accepted)
            assert stats.mean_accepted == (0.0 if limit == 1 else (limit - 1) / stats.rounds)
            assert sum(stats.accepted) - stats.rounds <= sum(stats.nodes) <= 12 * stats.rounds
