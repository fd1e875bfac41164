"""`model.generate(ids, custom_generate=decoder(...))`: the same answers, and everything `generate` is asked for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import (
    DynamicCache,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StopStringCriteria,
    TextIteratorStreamer,
)

from dominotree.decode import Decoder
from dominotree.errors import DominoTreeError, InvalidCheckpoint, InvalidRequest, UnsupportedModel
from dominotree.generation import Request
from dominotree.methods import METHODS, Drafting
from dominotree.sampling import SamplingParams
from dominotree.targets.transformers import TransformersTarget
from dominotree.transformers import decoder
from drafters.synthetic import write_tiny_drafter
from engines.zoo import FULL_ATTENTION, HIDDEN, LAYERS, REFUSED, VOCAB, WIDE_WINDOW, tiny
from oracle import OracleDrafter, tiny_drafter

ALL = [*FULL_ATTENTION.items(), *WIDE_WINDOW.items()]
NAMES = [*FULL_ATTENTION, *(f"{kind}-window" for kind in WIDE_WINDOW)]
PROMPT = [5, 9, 33, 2, 61]
IDS = torch.tensor([PROMPT])
GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=40, eos_token_id=None)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("phi", partial_rotary_factor=0.5)


def spoiled(script: list[int], **settings: Any) -> Any:
    """An oracle that knows `script` and spoils what it knows."""
    weights = {"right": 0.6, "sibling": 0.25, "wrong": 0.15, **settings}
    return lambda target: OracleDrafter(target, [script], **weights)


def name_of(cache: Any) -> str:
    """What `generate` calls its cache in this version of transformers."""
    import inspect

    from transformers import LlamaForCausalLM

    return "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


# The same tokens


@pytest.mark.parametrize(("kind", "settings"), ALL, ids=NAMES)
def test_greedy_answers_are_those_of_generate(kind: str, settings: dict[str, Any]) -> None:
    model = tiny(kind, **settings)
    expected = model.generate(IDS, **GREEDY)
    for budget in (2, 16, 40):
        tree = decoder(spoiled(expected[0].tolist()), budget=budget)
        assert torch.equal(model.generate(IDS, custom_generate=tree, **GREEDY), expected)
    assert tree.outputs[0].stats.mean_accepted > 1.5
    looked_up = decoder(method="lookup", budget=5)
    assert torch.equal(model.generate(IDS, custom_generate=looked_up, **GREEDY), expected)
    random_tree = decoder(tiny_drafter)
    assert torch.equal(model.generate(IDS, custom_generate=random_tree, **GREEDY), expected)


@pytest.mark.parametrize(("kind", "settings"), ALL, ids=NAMES)
def test_sampled_answers_are_those_of_our_plain_decoding(kind: str, settings: dict[str, Any]) -> None:
    model = tiny(kind, **settings)
    sampled = dict(do_sample=True, temperature=0.9, top_k=0, max_new_tokens=40, eos_token_id=None)
    params = SamplingParams(temperature=0.9, seed=4, max_new_tokens=40, ignore_eos=True)
    plain = Decoder(TransformersTarget(model), context=64).run([Request(PROMPT, params, Drafting("ar"))])[0].tokens
    for drafter, noise_aware in ((None, False), (spoiled(plain), False), (spoiled(plain), True), (tiny_drafter, False)):
        tree = decoder(drafter, noise_aware=noise_aware, seed=4)
        assert model.generate(IDS, custom_generate=tree, **sampled)[0].tolist() == plain


def test_sampling_follows_the_seed_given_or_torchs_own(model: Any) -> None:
    tree, sampled = decoder(tiny_drafter), dict(do_sample=True, max_new_tokens=12, eos_token_id=None)

    def answer(**more: Any) -> list[int]:
        return list(model.generate(IDS, custom_generate=tree, **sampled, **more)[0].tolist())

    assert answer(seed=1) == answer(seed=1) != answer(seed=2)
    torch.manual_seed(5)
    first = answer()
    second = answer()
    torch.manual_seed(5)
    assert answer() == first != second
    assert answer(seed=tree.outputs[0].seed) == first
    assert model.generate(IDS, custom_generate=decoder(tiny_drafter, seed=1), **sampled)[0].tolist() == answer(seed=1)


@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree", "domino", "marginal", "static", "dominotree"])
def test_every_method_runs(model: Any, method: str) -> None:
    expected = model.generate(IDS, **GREEDY)
    tree = decoder(spoiled(expected[0].tolist()), method, 12 if METHODS[method].shape == "tree" else None)
    assert torch.equal(model.generate(IDS, custom_generate=tree, **GREEDY), expected)
    assert tree.outputs[0].method == method


# What generate is asked for besides


PROCESSED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[7], [3, 4]], "min_new_tokens": 30, "eos_token_id": [1, 12]},
    {"suppress_tokens": list(range(40)), "forced_eos_token_id": 50},
    {"sequence_bias": [[[8], 3.0]], "renormalize_logits": True},
    {"prefix_allowed_tokens_fn": lambda _i, ids: [10 + len(ids) % 5, 20, 21]},
]


@pytest.mark.parametrize("asked", PROCESSED, ids=lambda asked: next(iter(asked)))
def test_logits_processors_are_honoured(model: Any, asked: dict[str, Any]) -> None:
    options = {**GREEDY, **asked}
    expected = model.generate(IDS, **options)
    tree = decoder(spoiled(expected[0].tolist()))
    assert torch.equal(model.generate(IDS, custom_generate=tree, **options), expected)


def test_a_processor_of_the_callers_sees_every_token_once_and_in_order(model: Any) -> None:
    class Watch(LogitsProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.seen.append(input_ids[0].tolist())
            return scores.index_fill(1, input_ids[0, -1:], -10.0)

    plain, drafted = Watch(), Watch()
    expected = model.generate(IDS, logits_processor=[plain], **GREEDY)
    tree = decoder(spoiled(expected[0].tolist()))
    got = model.generate(IDS, custom_generate=tree, logits_processor=[drafted], **GREEDY)
    assert torch.equal(got, expected)
    assert drafted.seen == plain.seen


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 1}, {"typical_p": 0.5}])
def test_sampled_tokens_are_among_those_the_warpers_leave(model: Any, settings: dict[str, Any]) -> None:
    options = {
        "do_sample": True,
        "temperature": 1.3,
        "max_new_tokens": 30,
        "eos_token_id": None,
        "top_k": 0,
        **settings,
    }
    plain = model.generate(IDS, custom_generate=decoder(seed=2), **options)
    returned = model.generate(
        IDS,
        custom_generate=decoder(spoiled(plain[0].tolist()), seed=2),
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    assert torch.equal(returned.sequences, plain)
    for token, scores in zip(plain[0, len(PROMPT) :].tolist(), returned.scores, strict=True):
        assert scores[0, token] > -torch.inf
    assert any((scores == -torch.inf).any() for scores in returned.scores)


def test_stop_tokens_and_lengths_end_the_answer_where_generate_ends_it(model: Any) -> None:
    answer = model.generate(IDS, **GREEDY)[0].tolist()
    for options in (
        {**GREEDY, "eos_token_id": answer[len(PROMPT) + 11]},
        {**GREEDY, "max_new_tokens": 1},
        {**GREEDY, "max_new_tokens": None, "max_length": 19},
        {**GREEDY, "eos_token_id": [95, answer[len(PROMPT) + 7]], "min_new_tokens": 9},
    ):
        expected = model.generate(IDS, **options)
        tree = decoder(spoiled(answer, right=1.0, sibling=0.0, wrong=0.0))
        assert torch.equal(model.generate(IDS, custom_generate=tree, **options), expected)
        assert tree.outputs[0].stats.new_tokens == expected.shape[1] - len(PROMPT)


class StopAt(StoppingCriteria):  # type: ignore[misc]
    """Stops when the answer has a token for the second time; counts how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.asked.append(input_ids.shape[1])
        answer = input_ids[0, len(PROMPT) :].tolist()
        return torch.tensor([answer.count(answer[-1]) > 1 and len(answer) > 12])


def test_stopping_criteria_are_asked_after_every_token_and_nothing_follows(model: Any) -> None:
    plain, drafted = StopAt(), StopAt()
    whole = model.generate(IDS, **GREEDY)
    expected = model.generate(IDS, stopping_criteria=[plain], **GREEDY)
    assert expected.shape[1] < whole.shape[1]
    tree = decoder(spoiled(whole[0].tolist(), right=1.0, sibling=0.0, wrong=0.0))
    got = model.generate(IDS, custom_generate=tree, stopping_criteria=[drafted], **GREEDY)
    assert torch.equal(got, expected)
    assert drafted.asked == plain.asked
    assert tree.outputs[0].finish_reason == "stop"


def tokenizer() -> Any:
    """Token i is the i-th printable character."""
    inner = Tokenizer(BPE({chr(32 + i): i for i in range(VOCAB)}, []))
    inner.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_stop_strings_work_as_a_criterion(model: Any) -> None:
    whole = model.generate(IDS, **GREEDY)
    text = tokenizer().decode(whole[0, len(PROMPT) :])
    stops = [StopStringCriteria(tokenizer(), [text[8:11]])]
    expected = model.generate(IDS, stopping_criteria=stops, **GREEDY)
    tree = decoder(spoiled(whole[0].tolist()))
    assert torch.equal(model.generate(IDS, custom_generate=tree, stopping_criteria=stops, **GREEDY), expected)
    assert expected.shape[1] <= len(PROMPT) + 11


@pytest.mark.parametrize("given_to", ["decoder", "generate"])
def test_a_streamer_gets_prompt_and_tokens_one_by_one_and_the_end(model: Any, given_to: str) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.put_: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.put_.append(value.tolist())

        def end(self) -> None:
            self.put_.append("end")

    plain, drafted = Streamer(), Streamer()
    expected = model.generate(IDS, streamer=plain, **GREEDY)
    script = spoiled(expected[0].tolist())
    if given_to == "decoder":
        model.generate(IDS, custom_generate=decoder(script, streamer=drafted), **GREEDY)
    else:
        model.generate(IDS, custom_generate=decoder(script), text_streamer=drafted, **GREEDY)
    assert drafted.put_ == plain.put_


def test_a_text_streamer_of_transformers_works(model: Any) -> None:
    streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True)
    expected = model.generate(IDS, custom_generate=decoder(tiny_drafter), text_streamer=streamer, **GREEDY)
    assert "".join(streamer) == tokenizer().decode(expected[0, len(PROMPT) :])


def test_scores_and_logits_are_those_of_generate(model: Any) -> None:
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options["repetition_penalty"] = 1.5
    expected = model.generate(IDS, **options)
    tree = decoder(spoiled(expected.sequences[0].tolist()))
    got = model.generate(IDS, custom_generate=tree, **options)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.cat(got.scores), torch.cat(expected.scores), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(got.logits), torch.cat(expected.logits), atol=1e-4, rtol=1e-4)


# Caches


@pytest.mark.parametrize("kind", ["dynamic", "static", "window"])
def test_a_cache_given_is_left_as_generate_leaves_it_and_can_be_used_on(kind: str) -> None:
    model = tiny("mistral", head_dim=8, sliding_window=256) if kind == "window" else tiny("olmo2")

    def fresh() -> Any:
        return StaticCache(model.config, max_cache_len=128) if kind == "static" else DynamicCache(config=model.config)

    plain, drafted = fresh(), fresh()
    key = name_of(plain)
    expected = model.generate(IDS, **{key: plain}, **GREEDY)
    tree = decoder(spoiled(expected[0].tolist()))
    got = model.generate(IDS, custom_generate=tree, **{key: drafted}, **GREEDY)
    assert torch.equal(got, expected)
    held = int(plain.get_seq_length())
    assert int(drafted.get_seq_length()) == held == expected.shape[1] - 1
    for ours, theirs in zip(drafted.layers, plain.layers, strict=True):
        torch.testing.assert_close(ours.keys[:, :, :held], theirs.keys[:, :, :held], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values[:, :, :held], theirs.values[:, :, :held], atol=1e-4, rtol=1e-4)
    # A second turn: on the plain cache with generate, on ours with either.
    turn = torch.cat([expected, torch.tensor([[44, 45, 46]])], dim=1)
    further = model.generate(turn, **{key: plain}, **GREEDY)
    tree = decoder(spoiled(further[0].tolist()))
    assert torch.equal(model.generate(turn, custom_generate=tree, **{key: drafted}, **GREEDY), further)
    again = torch.cat([further, torch.tensor([[50]])], dim=1)
    options = {**GREEDY, "max_new_tokens": 20}
    assert torch.equal(model.generate(again, **{key: drafted}, **options), model.generate(again, **options))


def test_static_caches_that_generate_makes_itself_work(model: Any) -> None:
    expected = model.generate(IDS, **GREEDY)
    tree = decoder(spoiled(expected[0].tolist()), budget=32)
    for _ in range(2):
        got = model.generate(IDS, custom_generate=tree, cache_implementation="static", **GREEDY)
        assert torch.equal(got, expected)


def test_a_static_cache_too_small_for_the_answer_is_refused_beforehand(model: Any) -> None:
    cache = StaticCache(model.config, max_cache_len=43)
    with pytest.raises(InvalidRequest, match="max_length 45 does not fit a static cache of 43"):
        model.generate(IDS, custom_generate=decoder(), **{name_of(cache): cache}, **GREEDY)


def test_a_returned_dict_holds_the_cache(model: Any) -> None:
    got = model.generate(IDS, custom_generate=decoder(tiny_drafter), return_dict_in_generate=True, **GREEDY)
    cache = got[name_of(None)]
    assert cache.get_seq_length() == got.sequences.shape[1] - 1


def test_a_cache_of_other_tokens_or_of_a_part_is_refused(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    key = name_of(cache)
    model.generate(torch.tensor([[7, 8, 9]]), **{key: cache}, **GREEDY)
    held = cache.get_seq_length()
    longer = torch.tensor([random.Random(0).choices(range(2, VOCAB), k=held + 3)])
    with pytest.raises(InvalidRequest, match="does not hold the beginning"):
        model.generate(longer, custom_generate=decoder(tiny_drafter), **{key: cache}, **GREEDY)
    assert cache.get_seq_length() == held
    with pytest.raises(InvalidRequest, match="whole conversation"):
        mask = torch.ones(1, held + 3, dtype=torch.int64)
        options = {key: cache, "attention_mask": mask, **GREEDY}
        model.generate(longer[:, -3:], custom_generate=decoder(tiny_drafter), **options)


# Batches


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}])
def test_each_row_of_a_left_padded_batch_equals_its_single_run(model: Any, sampling: dict[str, Any]) -> None:
    rows = [[5, 9, 33], [7, 11, 2, 61, 40, 41], [8]]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    options = {**GREEDY, "max_new_tokens": 20, "eos_token_id": [1, 30, 31], "pad_token_id": 0, **sampling}
    tree = decoder(tiny_drafter, seed=3)
    got = model.generate(ids, attention_mask=mask, custom_generate=tree, **options)
    if not sampling:
        assert torch.equal(got, model.generate(ids, attention_mask=mask, **options))
    for i, row in enumerate(rows):
        alone = model.generate(torch.tensor([row]), custom_generate=decoder(tiny_drafter), seed=3 + i, **options)
        answer = alone[0, len(row) :].tolist()
        assert got[i].tolist() == ids[i].tolist() + answer + [0] * (got.shape[1] - width - len(answer))


def test_several_answers_to_one_prompt_differ(model: Any) -> None:
    options = dict(do_sample=True, num_return_sequences=3, max_new_tokens=16, eos_token_id=None)
    got = model.generate(IDS, custom_generate=decoder(tiny_drafter), **options)
    assert len({tuple(row) for row in got.tolist()}) == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"cache_implementation": "offloaded"}, "offloaded"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}, "gaps"),
        ({"position_ids": torch.tensor([[3, 4, 5, 6, 7]])}, "position_ids"),
        ({"seed": "x", "do_sample": True}, "seed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_has_no_meaning_here_is_refused_in_one_line(model: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        model.generate(IDS, custom_generate=decoder(tiny_drafter), **{**GREEDY, **options})
    assert "\n" not in str(caught.value)


# Models and drafters


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_run_exactly_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=REFUSED[kind][1] if "of 8" not in REFUSED[kind][1] else "sliding"):
        tiny(kind, **REFUSED[kind][0]).generate(IDS, custom_generate=decoder(), **GREEDY)


def test_a_window_is_refused_when_the_answer_could_reach_it() -> None:
    model, tree = tiny("mistral", sliding_window=40, head_dim=8), decoder(tiny_drafter)
    short = {**GREEDY, "max_new_tokens": 35}
    assert torch.equal(model.generate(IDS, custom_generate=tree, **short), model.generate(IDS, **short))
    with pytest.raises(UnsupportedModel, match="sliding_window of 40"):
        model.generate(IDS, custom_generate=tree, **{**GREEDY, "max_new_tokens": 36})


def test_an_attention_backend_without_masks_is_replaced_for_the_call(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama", attn_implementation="flex_attention")
    expected = tiny("llama").generate(IDS, **GREEDY)
    tree = decoder(spoiled(expected[0].tolist()))
    assert torch.equal(model.generate(IDS, custom_generate=tree, **GREEDY), expected)
    assert model.config._attn_implementation == "flex_attention"
    assert "flex_attention attention takes no tree mask; sdpa is used in its place" in caplog.messages


def test_a_drafter_is_read_from_its_folder_once_for_a_model(model: Any, tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "d", hidden=HIDDEN, vocab=VOCAB, target_layers=LAYERS)
    tree = decoder(folder, budget=8)
    expected = model.generate(IDS, **GREEDY)
    for _ in range(2):
        assert torch.equal(model.generate(IDS, custom_generate=tree, **GREEDY), expected)
        made = tree._made
    assert tree._made is made
    assert tree.outputs[0].method == "lookuptree"
    assert tree.outputs[0].budget == 8
    other = tiny("olmo")
    assert torch.equal(other.generate(IDS, custom_generate=tree, **GREEDY), other.generate(IDS, **GREEDY))
    wide = other.to(torch.float64)
    assert torch.equal(wide.generate(IDS, custom_generate=tree, **GREEDY), wide.generate(IDS, **GREEDY))


def test_drafters_that_do_not_fit_are_refused(model: Any, tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "d", hidden=HIDDEN, vocab=VOCAB, target_layers=LAYERS + 1)
    with pytest.raises(InvalidCheckpoint, match="num_target_layers"):
        model.generate(IDS, custom_generate=decoder(folder), **GREEDY)
    narrow = tiny_drafter(TransformersTarget(tiny("llama", dtype=None).to(torch.bfloat16)))
    with pytest.raises(InvalidRequest, match="bfloat16"):
        model.generate(IDS, custom_generate=decoder(narrow), **GREEDY)
    with pytest.raises(DominoTreeError, match="needs a drafter"):
        model.generate(IDS, custom_generate=decoder(method="dominotree"), **GREEDY)
    with pytest.raises(InvalidRequest, match="budget"):
        decoder(budget=-1)
    with pytest.raises(InvalidRequest, match="budget has no effect with method domino"):
        decoder(tiny_drafter, "domino", 5)
    with pytest.raises(InvalidRequest, match="candidates has no effect with method ar"):
        model.generate(IDS, custom_generate=decoder(candidates=8), **GREEDY)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="eval"):
        tiny("llama").train().generate(IDS, custom_generate=decoder(tiny_drafter), **GREEDY)


def test_an_error_in_the_callers_own_code_comes_through_and_the_next_call_works(model: Any) -> None:
    def explode(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("a fault of its own")

    tree = decoder(tiny_drafter)
    for options in ({"logits_processor": [explode]}, {"stopping_criteria": [explode]}):
        with pytest.raises(RuntimeError, match="of its own"):
            model.generate(IDS, custom_generate=tree, **options, **GREEDY)
    assert torch.equal(model.generate(IDS, custom_generate=tree, **GREEDY), model.generate(IDS, **GREEDY))
