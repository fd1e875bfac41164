"""What a text says about how it goes on."""

from __future__ import annotations

import random

import pytest

from dominotree.decode import Decoder
from dominotree.generation import Request
from dominotree.lookup import LONGEST_KEY, MOST_AGREED, TextLookup
from dominotree.methods import Drafting
from dominotree.sampling import SamplingParams
from dominotree.serve.sharing import RowShare
from oracle import OracleDrafter, tiny_drafter
from targets.tiny import tiny_target


def proposed(tokens: list[int], most: int = 4) -> list[int]:
    return TextLookup().propose(tokens, most).tokens


def test_what_followed_last_time_is_proposed() -> None:
    assert proposed([1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5, 6]
    assert proposed([1, 2, 3, 4, 5, 6, 1, 2], most=2) == [3, 4]
    assert proposed([1, 7, 8, 1, 9, 8, 1]) == [9, 8, 1, 9]  # the latest place, and round again
    assert proposed([5, 1, 2, 6, 1, 2, 7, 5, 1, 2], most=1) == [6]  # an earlier place that agrees further
    for nothing_like_it in ([], [1], [1, 2, 3]):
        assert proposed(nothing_like_it) == []
    assert proposed([1, 2, 1], most=0) == []


def test_a_text_that_goes_in_circles_goes_on_so() -> None:
    assert proposed([4, 1, 2, 1, 2, 1, 2], most=5) == [1, 2, 1, 2, 1]


def test_the_more_agreed_the_likelier() -> None:
    lookup = TextLookup()
    chances = [lookup.chance(agreed) for agreed in range(1, MOST_AGREED + 3)]
    assert chances[:MOST_AGREED] == sorted(set(chances))
    assert chances[MOST_AGREED - 1 :] == [chances[-1]] * 3
    assert 0 < chances[0] < 0.3 and 0.9 < chances[-1] < 1
    text = list(range(30))
    for agreed in (1, 2, LONGEST_KEY, LONGEST_KEY + 1, 9, 25):
        found = TextLookup().propose([*text, *text[20 - min(agreed, 20) : 20]], 3)
        assert found.tokens == [20, 21, 22]
        assert found.chances == [lookup.chance(agreed + ahead) for ahead in range(3)]


@pytest.mark.parametrize("comes_true", [True, False])
def test_what_came_of_proposals_is_learned(comes_true: bool) -> None:
    lookup, fresh = TextLookup(), TextLookup()
    tokens = [1, 2, 3, 4, 5] * 2 if comes_true else [1]
    for step in range(40):
        lookup.propose(tokens, 3)
        tokens.append(step % 5 + 1 if comes_true else 1 if step % 2 else 100 + step)
    for agreed in (1, 4, 12):
        assert (lookup.chance(agreed) > fresh.chance(agreed)) is comes_true
        assert 0 < lookup.chance(agreed) < 1


def test_a_text_read_bit_by_bit_is_the_same_text() -> None:
    rng = random.Random(0)
    for _ in range(30):
        tokens = [rng.randrange(4) for _ in range(rng.randint(2, 60))]
        growing, at = TextLookup(), 1
        while at < len(tokens):
            growing.propose(tokens[:at], 3)
            at += rng.randint(1, 7)
        assert growing.propose(tokens, 6).tokens == proposed(tokens, 6)


def test_asked_twice_it_says_the_same_and_learns_once() -> None:
    rng = random.Random(1)
    once, twice, tokens = TextLookup(), TextLookup(), [1, 2]
    for _ in range(50):
        assert once.propose(tokens, 4) == twice.propose(tokens, 4) == twice.propose(tokens, 4)
        twice.propose(tokens, 2)
        twice.propose(tokens, 4)
        tokens = [*tokens, rng.randrange(3)]
    assert once.chance(3) == twice.chance(3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("with_drafter", [False, True])
def test_the_text_alone_drafts_where_there_is_no_drafter(temperature: float, with_drafter: bool) -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target) if with_drafter else None  # others in the batch may use it
    prompts = [[5, 9, 33, 2] * 4, [7], [61, 3, 3, 8, 3, 3]]
    params = [SamplingParams(temperature=temperature, seed=i, max_new_tokens=50, ignore_eos=True) for i in range(3)]
    plain = [
        Decoder(target, context=128).run([Request(*each, Drafting("ar"))])[0]
        for each in zip(prompts, params, strict=True)
    ]
    for share in (None, RowShare(5)):
        decoder = Decoder(target, drafter, slots=3, context=128, share=share)
        requests = [Request(*each, Drafting("lookup", 6)) for each in zip(prompts, params, strict=True)]
        if drafter is not None:
            requests[1] = Request(prompts[1], params[1], Drafting("dominotree", 3))
        together = decoder.run(requests)
        assert [one.tokens for one in together] == [one.tokens for one in plain]
        assert all(max(one.stats.nodes) <= 6 for one in together)
        assert temperature or together[0].stats.mean_accepted > 1.2  # a random model's greedy answers go in circles
        assert max(together[0].stats.nodes) > 0


def test_a_drafted_tree_is_joined_by_what_the_text_says() -> None:
    target, prompt = tiny_target("llama"), [5, 9, 33, 2] * 4
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    plain = Decoder(target, context=128).run([Request(prompt, params, Drafting("ar"))])[0]
    taus = {}
    for method in ("dominotree", "lookuptree"):
        never = OracleDrafter(target, [plain.tokens], right=0.0, wrong=1.0)
        got = Decoder(target, never, context=128).run([Request(prompt, params, Drafting(method, 16))])[0]
        assert got.tokens == plain.tokens
        taus[method] = got.stats.mean_accepted
    assert taus["dominotree"] < 1.1 < 1.2 < taus["lookuptree"]


def test_nothing_is_learned_from_behind_the_first_wrong_token() -> None:
    one, three, text = TextLookup(), TextLookup(), [1, 2, 3, 4, 1]
    for tokens in (text, [*text, 9, 8, 7]):
        one.propose(tokens, 1)
        three.propose(tokens, 3)
    assert one.chance(2) == three.chance(2) < TextLookup().chance(2)
