"""Faults that users of other engines met between prompt and text, and at loading: the right value of each here."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig

import dominotree as dt
from dominotree import native
from dominotree.decode import Decoder
from dominotree.drafters.checkpoint import check_fits_target
from dominotree.drafters.config import DrafterConfig
from dominotree.errors import InvalidCheckpoint, InvalidRequest, UnsupportedModel
from dominotree.machine import parse_device, set_threads
from dominotree.pair import AVX2_BUDGET, FP32_CPU_BUDGET, Pair
from dominotree.targets.config import TargetConfig
from dominotree.targets.decoder import DecoderTarget
from dominotree.text import TextCodec, TextStream
from drafters.synthetic import write_tiny_drafter
from oracle import OracleDrafter, tiny_drafter
from targets.tiny import tiny_model, tiny_target
from test_text import CODEC, byte_tokenizer

VOCAB = CODEC.vocab_size
PROMPT = [70, 71, 72]


@pytest.fixture(scope="module")
def target() -> DecoderTarget:
    return tiny_target("llama", vocab_size=VOCAB)


def writes(target: DecoderTarget, text: str, **oracle: Any) -> Pair:
    """A pair whose answer to `PROMPT` is `text`, drafted by one who knows it, and options that make it so."""
    ids = CODEC.encode(text)
    return Pair(target, CODEC, OracleDrafter(target, [[*PROMPT, *ids]], block=16, **oracle))


def forced(text: str) -> Any:
    """A logits processor that spells `text`."""
    ids = CODEC.encode(text)

    def spell(history: Any, logits: torch.Tensor) -> torch.Tensor:
        at = len(history) - len(PROMPT)
        return logits if at >= len(ids) else torch.full_like(logits, -9.0).index_fill(0, torch.tensor([ids[at]]), 9.0)

    return spell


# Stopping


@pytest.mark.parametrize(
    ("stop", "left"),
    [
        (["ab"], ""),  # ends at the second token of an accepted run
        (["p q"], "abcdefghijklmno"),  # straddles two rounds
        (["h"], "abcdefg"),  # part of a token ("the" is one)
        (["cdX", "cde"], "ab"),  # share a beginning
        (["ef", "def"], "abc"),  # complete at once: the longer one
        (["def", "e"], "abcd"),  # complete first
        (["zzz"], None),
    ],
)
def test_stop_strings_end_text_ids_and_logprobs_alike(target: DecoderTarget, stop: list[str], left: str | None) -> None:
    text = "abcdefghijklmnop qrs the tuvw"
    pair = writes(target, text)
    options = dict(
        budget=16, stop=stop, logprobs=1, max_new_tokens=len(CODEC.encode(text)), logits_processors=[forced(text)]
    )
    out = pair.generate(PROMPT, **options)
    stream = pair.stream(PROMPT, **options)
    pieces = list(stream)
    assert out.text == "".join(pieces) == stream.output.text == (text if left is None else left)
    assert out.finish_reason == ("length" if left is None else "stop")
    assert out.logprobs is not None
    assert [found.token for found in out.logprobs] == out.token_ids == stream.output.token_ids
    assert len(out.token_ids) == out.stats.new_tokens == 1 + sum(out.stats.accepted)
    whole = CODEC.decode(out.token_ids)
    assert left is None or any(s in whole and s not in CODEC.decode(out.token_ids[:-1]) for s in stop)
    assert max(out.stats.accepted, default=0) >= min(10, len(out.token_ids) - 1)  # cut inside an accepted run


@pytest.mark.parametrize("own", [True, False])
def test_one_of_several_end_tokens_inside_an_accepted_run_ends_everything(own: bool) -> None:
    text = "abcdefghijklmnop"
    end = CODEC.encode("e")[0]
    target = tiny_target("llama", vocab_size=VOCAB, eos_token_id=[1, end] if own else 1)
    pair = writes(target, text)
    options = dict(logits_processors=[forced(text)], max_new_tokens=16, **({} if own else {"stop_token_ids": [2, end]}))
    stream = pair.stream(PROMPT, **options)
    assert "".join(stream) == "abcd" == pair.generate(PROMPT, **options).text
    assert CODEC.decode(stream.output.token_ids) == "abcde"
    assert stream.output.stats.new_tokens == 5
    assert stream.output.finish_reason == "stop"


def test_a_special_tokens_name_works_as_a_stop_string(target: DecoderTarget) -> None:
    end = CODEC.tokenizer.token_to_id("<end>")

    def ends(history: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, torch.tensor([end if len(history) == 8 else 70]), 99.0)

    pair = Pair(target, CODEC, None)
    out = pair.generate(PROMPT, stop=["<end>"], ignore_eos=True, logits_processors=[ends], max_new_tokens=20)
    assert out.finish_reason == "stop"
    assert out.token_ids == [70] * 5 + [end]


# Text


@pytest.mark.parametrize("run", [1, 2, 3, 7])
def test_characters_are_whole_however_many_tokens_a_round_brings(run: int) -> None:
    ids = CODEC.encode("hi 🦊🇩🇪, 你好 the é end")
    for end in range(len(ids) + 1):
        made, pieces = TextStream(CODEC), []
        for i in range(0, end, run):
            for token in ids[i : min(i + run, end)]:
                made.push(token)
            pieces.append(made.take())
        made.finish()
        pieces.append(made.take(final=True))
        assert "".join(pieces) == made.text == CODEC.decode(ids[:end])
        assert not any("\ufffd" in piece for piece in pieces[:-1])


def sentencepiece() -> TextCodec:
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁the", "▁a", "cat", "▁▁", ".", "▁B", "é", "\n"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return TextCodec(tokenizer)


def test_spaces_survive_behind_special_tokens_where_tokens_carry_them() -> None:
    """A decoder that strips the first space must not strip one in mid-text, whatever stands before it."""
    codec = sentencepiece()
    generator = torch.Generator().manual_seed(0)
    for length in [2, 3, 4, 9] * 60:
        ids = torch.randint(0, 12, (length,), generator=generator).tolist()
        made, shown = TextStream(codec), ""
        for token in ids:
            made.push(token)
            shown += made.take()
        made.finish()
        assert shown + made.take(final=True) == codec.decode(ids), ids
    fox = [codec.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é🦊".encode()]
    made = TextStream(codec)
    shown = []
    for token in [4, *fox, 5]:
        made.push(token)
        shown.append(made.take())
    assert shown == ["the", "", "é", "", "", "", "🦊", " a"]


# Prompts and options


def test_prompts_that_are_none_are_refused_and_the_next_one_is_served(target: DecoderTarget) -> None:
    codec = TextCodec(byte_tokenizer(), CODEC.template, {"bos_token": "<s>"})
    pair = Pair(target, codec, tiny_drafter(target))
    begin = codec.tokenizer.token_to_id("<s>")
    expected = pair.generate("hi", max_new_tokens=6).token_ids
    for wrong in ([], None, 5, b"x", {"role": "user", "content": "x"}, [1, "a"], [True], [1.5], [VOCAB], [-1],
                  [{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "user", "content": None}],
                  [{"role": "user", "content": [{"type": "image"}]}], torch.tensor([1, 2])):  # fmt: skip
        for call in (pair.generate, lambda p, **o: list(pair.stream(p, **o))):
            with pytest.raises(InvalidRequest) as caught:
                call(wrong, max_new_tokens=2)
            assert "\n" not in str(caught.value)
    assert pair.generate("", raw=True, max_new_tokens=3).stats.prompt_tokens == 1
    assert (
        pair.generate([[], [begin]], max_new_tokens=3)[0].token_ids
        == pair.generate([begin], max_new_tokens=3).token_ids
    )
    assert pair.generate("", max_new_tokens=3).stats.new_tokens == 3
    assert pair.generate("hi", max_new_tokens=6).token_ids == expected


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert CODEC.prompt_ids([{"role": "user", "content": parts}]) == CODEC.prompt_ids("hello")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5), ("stop", None), ("stop", [""]), ("stop", ["a", 3]), ("stop_token_ids", 5),
        ("stop_token_ids", ["x"]),
        ("stop_token_ids", [VOCAB]), ("logit_bias", [(1, 2.0)]), ("logit_bias", None), ("logit_bias", {"a": 1.0}),
        ("logit_bias", {VOCAB: 1.0}), ("logits_processors", 5), ("logits_processors", [5]), ("ignore_eos", "no"),
        ("seed", 2**64), ("seed", 10**400), ("sampling", {"temperature": 1}), ("system", 5), ("budget", 1.0),
        ("candidates", -1), ("method", "tree"), ("tempratur", 1.0),
    ],
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_refused_by_name(target: DecoderTarget, name: str, value: object) -> None:
    pair = Pair(target, CODEC, tiny_drafter(target))
    with pytest.raises(InvalidRequest, match="content|message" if name == "system" else name) as caught:
        pair.generate("hi", **{"max_new_tokens": 2, name: value})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [lambda _, row: None, lambda _, row: row[:3], lambda _, row: row.tolist()])
def test_a_processor_that_returns_no_logits_is_named(target: DecoderTarget, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="logits processor"):
        Pair(target, CODEC).generate("hi", logits_processors=[wrong])


def test_options_that_could_have_no_effect_are_refused(target: DecoderTarget) -> None:
    pair = Pair(target, CODEC, tiny_drafter(target))
    for prompt, options in (
        ("hi", {"raw": True, "system": "x"}), ([1, 2], {"system": "x"}),
        ([{"role": "user", "content": "x"}], {"raw": True}),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match="no effect"):
            pair.generate(prompt, max_new_tokens=1, **options)
    with pytest.raises(InvalidRequest, match="no effect"):
        pair.chat(raw=True)
    with pytest.raises(InvalidRequest, match="one prompt"):
        pair.stream(["a", "b"])  # type: ignore[arg-type]
    for options in (
        {"context": "x"},
        {"context": 2.5},
        {"context": 1},
        {"context": 10**9},
        {"max_batch": 0},
        {"max_batch": 1.5},
    ):
        with pytest.raises(InvalidRequest, match=next(iter(options))):
            Pair(target, CODEC, None, **options)  # type: ignore[arg-type]


def test_every_drafting_option_changes_what_is_reported(target: DecoderTarget) -> None:
    pair = Pair(target, CODEC, tiny_drafter(target))
    options: dict[str, Any] = dict(max_new_tokens=12, ignore_eos=True)
    default = pair.generate(PROMPT, **options)
    assert (default.method, default.budget) == ("lookuptree", pair.default_budget)
    options |= {"method": "dominotree", "budget": 5}
    usual = pair.generate(PROMPT, **options)
    one = pair.generate(PROMPT, max_new_tokens=1)
    assert (one.stats.rounds, one.stats.mean_accepted, one.stats.nodes, one.stats.tokens_per_s) == (0, 0.0, [], 0.0)
    nodes = {}
    for name, value in (("budget", 2), ("method", "ar"), ("candidates", 1), ("node_topk", 1)):
        out = pair.generate(PROMPT, **{**options, name: value})
        assert out.token_ids == usual.token_ids == default.token_ids
        nodes[name] = sum(out.stats.nodes)
    assert pair.generate(PROMPT, **{**options, "budget": 2}).budget == 2
    assert len({sum(usual.stats.nodes), *nodes.values()}) >= 4
    assert nodes["method"] == 0
    assert Pair(target, CODEC).generate(PROMPT, max_new_tokens=12).method == "ar"


@pytest.mark.parametrize(("registers", "budget"), [(32, FP32_CPU_BUDGET), (16, AVX2_BUDGET)])
def test_fewer_registers_take_a_smaller_tree(
    target: DecoderTarget, monkeypatch: pytest.MonkeyPatch, registers: int, budget: int
) -> None:
    monkeypatch.setattr("dominotree.pair.vector_registers", lambda: registers)
    assert Pair(target, CODEC, tiny_drafter(target)).default_budget == budget


def test_a_drafter_that_is_never_right_is_said_to_be_once(
    target: DecoderTarget, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(target, CODEC, tiny_drafter(target))
    plain = Pair(target, CODEC).generate("hi", method="ar", max_new_tokens=100, ignore_eos=True)
    with caplog.at_level(logging.WARNING, "dominotree"):
        assert pair.generate("hi", max_new_tokens=100, ignore_eos=True, budget=0).token_ids == plain.token_ids
        assert not caplog.messages  # nothing was drafted, so nothing was wrong
        assert pair.generate("hi", max_new_tokens=100, ignore_eos=True, budget=1).token_ids == plain.token_ids
        for method in ("domino", "dominotree"):
            list(pair.stream("hello", max_new_tokens=60, ignore_eos=True, budget=1, method=method))
    assert len([text for text in caplog.messages if "hardly ever right" in text]) == 1


# Several requests on one pair


def test_an_answer_may_be_left_half_read_or_read_beside_others(target: DecoderTarget) -> None:
    pair = Pair(target, CODEC, tiny_drafter(target))
    options: dict[str, Any] = dict(max_new_tokens=20, ignore_eos=True, temperature=1.0, seed=3)
    expected = {text: pair.generate(text, **options).text for text in ("hello", "the", "a")}
    first, second = pair.stream("hello", **options), pair.stream("the", **options)
    shown = next(first)
    assert pair.generate("a", **options).text == expected["a"]
    assert "".join(second) == expected["the"]
    assert shown + "".join(first) == expected["hello"]
    assert first.output.text == expected["hello"]
    left = pair.stream("hello", **options)
    next(left)
    with pytest.raises(InvalidRequest, match="not finished"):
        _ = left.output
    assert pair.generate("the", **options).text == expected["the"]
    left.close()
    assert [out.text for out in pair.generate(["a"] * 11, **options)] == [expected["a"]] * 11  # more than slots


def test_a_conversation_whose_history_was_edited_answers_as_a_fresh_one(target: DecoderTarget) -> None:
    pair = Pair(target, CODEC, tiny_drafter(target), context=256)
    options: dict[str, Any] = dict(max_new_tokens=10, ignore_eos=True)
    chat = pair.chat(system="be kind", **options)
    for text in ("hello", "and then"):
        list(chat.send(text))
    chat.messages[2] = {"role": "assistant", "content": "something else"}
    del chat.messages[3:]
    answer = chat.send("why")
    list(answer)
    fresh = pair.generate([*chat.messages[:-2], {"role": "user", "content": "why"}], **options)
    assert answer.output.token_ids == fresh.token_ids
    assert 0 < answer.output.stats.reused_tokens < fresh.stats.prompt_tokens
    broken = pair.chat(**{**options, "logits_processors": [lambda _, row: None]})
    with pytest.raises(InvalidRequest):
        list(broken.send("hello"))
    assert broken.messages == []


# Loading


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("mistral", {"sliding_window": 8}, "mistral"),
        ("gemma2", {"sliding_window": 8}, "gemma2"),
        ("mamba", {}, "mamba"),
        ("qwen3_next", {}, "qwen3_next"),
        ("qwen3_moe", {}, "qwen3_moe"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "sliding_window"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding_window"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "contradict"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_targets_that_would_run_wrongly_are_refused_by_name(kind: str, changes: dict[str, Any], named: str) -> None:
    config = AutoConfig.for_model(kind).to_dict() | changes
    if kind in ("qwen2", "qwen3"):
        config = AutoConfig.for_model(kind, **changes).to_dict()
    with pytest.raises(UnsupportedModel, match=named) as caught:
        TargetConfig.from_dict(config)
    assert "\n" not in str(caught.value)


def test_a_window_that_is_declared_but_not_used_is_no_reason_to_refuse() -> None:
    config = AutoConfig.for_model("qwen2", use_sliding_window=False, sliding_window=8, max_window_layers=2)
    assert TargetConfig.from_dict(config.to_dict()).family == "qwen2"


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "mps", None, 5])
def test_an_unknown_device_is_one_line(name: Any) -> None:
    with pytest.raises(InvalidRequest, match="device"):
        parse_device(name)


def test_a_device_that_is_not_there_and_threads_that_are_none_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match="no CUDA device"):
        parse_device("cuda")
    for threads in (0, -1, "2", 1.5, True):
        with pytest.raises(InvalidRequest, match="threads"):
            set_threads(threads)  # type: ignore[arg-type]


def test_a_drafter_of_another_dtype_is_cast_and_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_model("llama", vocab_size=VOCAB).save_pretrained(tmp_path / "target")
    byte_tokenizer().save(str(tmp_path / "target" / "tokenizer.json"))
    drafter = write_tiny_drafter(tmp_path / "drafter", vocab=VOCAB, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO, "dominotree"):
        pair = dt.load(target=str(tmp_path / "target"), drafter=str(drafter), dtype="float32", device="cpu")
    assert any("bfloat16" in text and "float32" in text for text in caplog.messages)
    options: dict[str, Any] = dict(max_new_tokens=12, ignore_eos=True, raw=True)
    batch = pair.generate(["the", "hello the long way"], **options)
    assert [out.token_ids for out in batch] == [
        pair.generate(text, method="ar", **options).token_ids for text in ("the", "hello the long way")
    ]


def test_a_draft_vocabulary_beyond_the_target_is_refused() -> None:
    config = DrafterConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=128, block_size=4, mask_token_id=3, target_layer_ids=(0,), draft_vocab_size=3,
    )  # fmt: skip
    sizes = dict(hidden_size=32, vocab_size=112, num_layers=4, tokenizer_size=100)
    check_fits_target(config, **sizes, draft_tokens=torch.tensor([0, 1, 111]))  # type: ignore[arg-type]
    with pytest.raises(InvalidCheckpoint, match="d2t"):
        check_fits_target(config, **sizes, draft_tokens=torch.tensor([0, 1, 120]))  # type: ignore[arg-type]


@pytest.mark.skipif(not native.available(), reason=f"no C kernels here: {native.reason()}")
def test_damaged_or_uncachable_kernels_are_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = native._compiler()
    assert compiler is not None
    monkeypatch.setattr(native, "_FLAGS", ("-O0", "-std=gnu11", "-shared", "-fPIC"))
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path))
    library = native._build(compiler, tmp_path / "native")
    library.write_bytes(b"no library")
    assert isinstance(native._open(compiler), ctypes.CDLL)
    assert library.stat().st_size > 1000
    (tmp_path / "file").touch()
    monkeypatch.setenv("DOMINOTREE_CACHE", str(tmp_path / "file" / "cache"))  # nothing can be written there
    assert isinstance(native._open(compiler), ctypes.CDLL)


def test_without_the_kernels_decoding_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(exact: bool | None) -> tuple[bool, list[list[int]]]:
        target = tiny_target("qwen3", exact=exact)
        drafter, sampling = tiny_drafter(target), dt.SamplingParams(max_new_tokens=20, ignore_eos=True)
        decoder = Decoder(target, drafter, context=64)
        tokens = [
            decoder.run([dt.Request([5, 9, 33], sampling, dt.Drafting(m))])[0].tokens for m in ("ar", "dominotree")
        ]
        return target.row_invariant, tokens

    _, expected = decode(None)
    monkeypatch.setattr(native, "available", lambda: False)
    for exact in (None, True, False):
        row_invariant, tokens = decode(exact)
        assert tokens == expected
        assert not row_invariant or exact
