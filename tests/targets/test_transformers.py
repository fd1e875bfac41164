"""Models as transformers runs them, behind the interface of our own decoder."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dominotree.decode import Decoder
from dominotree.errors import InvalidRequest, NumericalError, UnsupportedModel
from dominotree.generation import Request
from dominotree.methods import Drafting
from dominotree.pair import load
from dominotree.sampling import SamplingParams
from dominotree.targets import transformers as adapter
from dominotree.targets.load import load_target
from dominotree.targets.rows import Segment
from dominotree.targets.transformers import TransformersTarget
from engines.zoo import FULL_ATTENTION, LAYERS, REFUSED, VOCAB, WIDE_WINDOW, tiny
from oracle import OracleDrafter, tiny_drafter
from targets.tiny import tiny_model, tiny_target

ALL = [*FULL_ATTENTION.items(), *WIDE_WINDOW.items()]
NAMES = [*FULL_ATTENTION, *(f"{kind}-window" for kind in WIDE_WINDOW)]
PROMPT = [5, 9, 33, 2, 61]


def ids_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2, VOCAB), k=length)


def paths(parents: list[int]) -> list[list[int]]:
    found = [[0]]
    for row, parent in enumerate(parents, start=1):
        found.append([*found[parent], row])
    return found


@pytest.mark.parametrize(("kind", "settings"), ALL, ids=NAMES)
def test_logits_features_and_trees_are_those_of_plain_passes(kind: str, settings: dict[str, Any]) -> None:
    model = tiny(kind, **settings)
    target = TransformersTarget(model)
    ids = ids_of(40)
    with torch.no_grad():
        plain = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    cache = target.new_cache(2, 64)
    got = target.forward(cache, [Segment(1, 0, ids[:25])], feature_layers=(2, 0), last_only=True)
    torch.testing.assert_close(got.logits, plain.logits[0, 24:25], atol=1e-4, rtol=1e-4)
    assert got.features is not None
    expected = torch.cat([plain.hidden_states[3][0, :25], plain.hidden_states[1][0, :25]], dim=-1)
    torch.testing.assert_close(got.features, expected, atol=1e-4, rtol=1e-4)
    cache.commit(1, range(25))
    decoy = ids_of(4, seed=1)
    nodes = [ids[25], decoy[0], ids[26], decoy[1], decoy[2], ids[27]]
    out = target.forward(cache, [Segment(1, 25, nodes, [0, 0, 1, 2, 2])])
    torch.testing.assert_close(out.logits[[0, 2, 5]], plain.logits[0, 25:28], atol=1e-4, rtol=1e-4)
    cache.commit(1, [0, 2, 5])
    out = target.forward(cache, [Segment(1, 28, ids[28:])])
    torch.testing.assert_close(out.logits, plain.logits[0, 28:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("nodes", [2, 3, 5, 7])
def test_every_node_sees_its_prefix_and_its_ancestors_alone(backend: str, nodes: int) -> None:
    model = tiny("llama", attn_implementation=backend)
    target, rng = TransformersTarget(model), random.Random(nodes)
    parents = [0, 0, *(rng.randrange(1, row) for row in range(3, nodes + 1))]
    ids, tree = ids_of(3), ids_of(nodes + 1, seed=nodes)
    cache = target.new_cache(1, 64)
    target.forward(cache, [Segment(0, 0, ids)])
    cache.commit(0, range(3))
    out = target.forward(cache, [Segment(0, 3, tree, parents)]).logits
    for row, path in enumerate(paths(parents)):
        with torch.no_grad():
            alone = model(torch.tensor([ids + [tree[i] for i in path]])).logits[0, -1]
        torch.testing.assert_close(out[row], alone, atol=1e-5, rtol=1e-5)


def test_the_last_layers_features_come_before_the_final_norm() -> None:
    variant = tiny_model("qwen3"), tiny_target("qwen3")
    target = TransformersTarget(variant[0])
    segment, layers = Segment(0, 0, ids_of(9)), (LAYERS - 1, 0)
    ours = variant[1].forward(variant[1].new_cache(1, 64), [segment], feature_layers=layers).features
    theirs = target.forward(target.new_cache(1, 64), [segment], feature_layers=layers).features
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


def test_a_cache_grows_and_may_be_verified_anywhere_in_what_it_holds() -> None:
    model = tiny("phi", max_position_embeddings=1024)
    target, ids = TransformersTarget(model), ids_of(700)
    cache = target.new_cache(1, 800)
    with torch.no_grad():
        plain = model(torch.tensor([ids])).logits[0]
    for start in range(0, 600, 200):
        target.forward(cache, [Segment(0, start, ids[start : start + 200])], last_only=True)
        cache.commit(0, range(200))
    for start in (600, 100, 430):
        out = target.forward(cache, [Segment(0, start, ids[start : start + 3], [0, 1])]).logits
        torch.testing.assert_close(out, plain[start : start + 3], atol=1e-4, rtol=1e-4)
        target.forward(cache, [Segment(0, start, ids[start : start + 3])])  # as it was
    with pytest.raises(InvalidRequest, match="do not fit"):
        target.forward(cache, [Segment(0, 799, [1, 2])])


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize(("kind", "settings"), ALL, ids=NAMES)
def test_every_method_answers_as_plain_decoding_does(kind: str, settings: dict[str, Any], temperature: float) -> None:
    target = TransformersTarget(tiny(kind, **settings))
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=40, ignore_eos=True)
    plain = Decoder(target, context=64).run([Request(PROMPT, params, Drafting("ar"))])[0]
    spoiled = OracleDrafter(target, [plain.tokens], right=0.6, sibling=0.25, wrong=0.15, block=6)
    accepted = 0.0
    for drafter in (spoiled, tiny_drafter(target)):
        decoder = Decoder(target, drafter, context=64, max_nodes=40)
        for method, budget in (("dominotree", 16), ("dominotree", 3), ("ddtree", 40), ("domino", 16)):
            got = decoder.run([Request(PROMPT, params, Drafting(method, budget))])[0]
            assert got.tokens == plain.tokens, (method, budget)
            accepted = max(accepted, got.stats.mean_accepted)
    assert accepted > 2


def test_sequences_in_several_slots_do_not_mix() -> None:
    target = TransformersTarget(tiny("gpt_neox"))
    params = SamplingParams(temperature=0.9, seed=1, max_new_tokens=20, ignore_eos=True)
    prompts = [ids_of(n, seed=n) for n in (4, 30, 11, 1)]
    requests = [Request(prompt, params, Drafting("dominotree")) for prompt in prompts]
    together = Decoder(target, tiny_drafter(target), slots=3, context=64).run(requests)
    for prompt, got in zip(prompts, together, strict=True):
        alone = Decoder(target, context=64).run([Request(prompt, params, Drafting("ar"))])[0]
        assert got.tokens == alone.tokens


def test_a_families_own_decoder_and_transformers_agree() -> None:
    params = SamplingParams(temperature=0.8, seed=9, max_new_tokens=30, ignore_eos=True)
    answers = [
        Decoder(target, tiny_drafter(target), context=64).run([Request(PROMPT, params)])[0].tokens
        for target in (tiny_target("qwen2"), TransformersTarget(tiny_model("qwen2")))
    ]
    assert answers[0] == answers[1]


# What is refused


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_run_exactly_is_refused_by_name(kind: str) -> None:
    settings, reason = REFUSED[kind]
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        TransformersTarget(tiny(kind, **settings))
    assert kind in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_window_is_refused_only_where_it_is_in_use() -> None:
    model = tiny("mistral", sliding_window=40, head_dim=8)
    with pytest.raises(UnsupportedModel, match="at most 40"):
        TransformersTarget(model)
    target = TransformersTarget(model, context=40)
    assert target.max_positions == 40
    with pytest.raises(UnsupportedModel, match="sliding_window of 40"):
        target.forward(target.new_cache(1, 64), [Segment(0, 0, ids_of(41))])


def test_rotary_angles_that_change_with_the_length_are_refused_where_they_do() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    model = tiny(
        "phi3",
        sliding_window=None,
        original_max_position_embeddings=64,
        rope_parameters={**scaling, "original_max_position_embeddings": 64},
    )
    with pytest.raises(UnsupportedModel, match="longrope"):
        TransformersTarget(model)
    assert TransformersTarget(model, context=64).max_positions == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "olmo2", "gemma", "granite", "qwen3_moe", "opt"])
def test_a_model_that_reads_the_mask_otherwise_is_found_out(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TransformersTarget._mask

    def causal(self: TransformersTarget, seen: torch.Tensor) -> torch.Tensor:
        return real(self, torch.ones_like(seen).tril(seen.shape[-1] - seen.shape[-2]))

    model = tiny(kind, **FULL_ATTENTION[kind]).to(dtype)
    TransformersTarget(model)
    monkeypatch.setattr(TransformersTarget, "_mask", causal)
    with pytest.raises(UnsupportedModel, match="tree"):
        TransformersTarget(model)


def test_a_mask_in_the_wrong_form_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformersTarget, "_mask", lambda _self, seen: seen[None])
    with pytest.raises(UnsupportedModel, match="tree"):  # eager attention adds the mask, and booleans block nothing
        TransformersTarget(tiny("llama", scale=1.0, attn_implementation="eager"))


def test_flat_and_broken_weights_are_no_reason_to_refuse() -> None:
    TransformersTarget(tiny("llama", scale=0.0))
    broken = tiny("llama")
    broken.lm_head.weight.data[3] = torch.nan
    with pytest.raises(NumericalError, match="NaN"):
        Decoder(TransformersTarget(broken), context=64).run([Request(PROMPT, drafting=Drafting("ar"))])


def test_a_backend_without_masks_is_replaced_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama")
    model.config._attn_implementation = "flash_attention_2"
    with caplog.at_level(logging.WARNING, "dominotree"):
        TransformersTarget(model)
    assert model.config._attn_implementation == "sdpa"
    assert caplog.messages == ["flash_attention_2 attention takes no tree mask; sdpa is used in its place"]


def test_training_mode_and_split_models_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="eval"):
        TransformersTarget(tiny("llama").train())
    split = tiny("llama")
    split.model.layers[1].to("meta")
    with pytest.raises(UnsupportedModel, match="cpu, meta"):
        TransformersTarget(split)


# Loading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("gemma", head_dim=8).save_pretrained(tmp_path)
    vocabulary = {f"w{i}": i for i in range(VOCAB)}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_model_our_decoder_does_not_know_is_loaded_with_one_notice(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dominotree"):
        pair = load(target=str(folder), dtype="float32", device="cpu", threads=1)
    assert len(caplog.messages) == 1
    assert "gemma" in caplog.messages[0]
    assert "transformers" in caplog.messages[0]
    assert isinstance(pair.target, TransformersTarget)
    with torch.no_grad():
        expected = pair.target.model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False)
    got = pair.generate(PROMPT, max_new_tokens=20)
    assert PROMPT + got.token_ids == expected[0].tolist()
    pair.drafter = tiny_drafter(pair.target)
    assert pair.generate([PROMPT, PROMPT[:2]], method="dominotree", max_new_tokens=20)[0].token_ids == got.token_ids


def test_a_window_in_use_is_refused_at_load_unless_the_context_stays_within(tmp_path: Path) -> None:
    tiny("mistral", sliding_window=32, head_dim=8).save_pretrained(tmp_path)
    kind = dict(dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match="sliding_window of 32") as caught:
        load_target(tmp_path, **kind)
    assert "mistral" in str(caught.value)
    assert load_target(tmp_path, context=32, **kind).max_positions == 32


def test_the_bit_exact_forward_is_our_own_decoders_only(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="exact needs our own decoder"):
        load_target(folder, dtype=torch.float32, device=torch.device("cpu"), exact=True)


def test_int8_weights_are_our_own_decoders_only(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="int8 weights need our own decoder"):
        load_target(folder, dtype=torch.int8, device=torch.device("cpu"))


def test_what_transformers_cannot_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UnsupportedModel, match="no_such_model") as caught:
        load_target(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_borrowed_embeddings_are_what_the_models_own_module_gives() -> None:
    """Gemma's module scales by the root of the width; Granite's multiplier and Cohere's scale lie outside of theirs."""
    for kind, factor in (("gemma", 32**0.5), ("granite", 1.0), ("cohere", 1.0)):
        target = TransformersTarget(tiny(kind, **FULL_ATTENTION[kind]))
        ids = torch.tensor(PROMPT)
        weight = target.model.get_input_embeddings().weight
        torch.testing.assert_close(target.embed(ids), weight[ids] * factor)
        assert torch.equal(target.head_weight(), target.model.get_output_embeddings().weight)


def test_positions_without_a_limit_in_the_config_have_none() -> None:
    assert adapter.positions(object()) == 2**20
