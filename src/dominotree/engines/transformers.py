"""Tree drafting inside `generate` of transformers: `model.generate(ids, custom_generate=decoder(drafter=...))`.

`generate` prepares prompt, cache, logits processors and stopping criteria as ever and hands them over; the tokens are
those it would have produced itself when greedy, and draws of our own same-seed sampler otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from dominotree.decode import Decoder
from dominotree.drafters.checkpoint import check_fits_target
from dominotree.drafters.dflash import Drafter
from dominotree.errors import InvalidRequest, UnsupportedModel
from dominotree.generation import Request
from dominotree.methods import Drafting
from dominotree.pair import Output, Pair, load_drafter
from dominotree.sampling import SamplingParams
from dominotree.targets.base import Target
from dominotree.targets.transformers import ModelCache, TransformersTarget, use_masked_attention

DrafterSource = str | Path | Drafter | Callable[[Target], Drafter]

_PREPARED = {
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}
_SAME_KEYS = 0.05


def decoder(
    drafter: DrafterSource | None = None,
    method: str | None = None,
    budget: int | None = None,
    *,
    candidates: int | None = None,
    node_topk: int | None = None,
    noise_aware: bool = False,
    seed: int | None = None,
    streamer: Any = None,
) -> TreeDecoding:
    """What `model.generate` takes as `custom_generate`, for any causal LM of transformers with full attention.

    `drafter` is a folder, a hub id or the name of a drafter of ours, a `Drafter`, or a function that makes one for a
    target; without it plain decoding goes through the same loop. `method`, `budget`, `candidates`, `node_topk` and
    `noise_aware` are those of `Drafting`; the method is by default that of `Pair.default_method`. `seed` fixes sampled
    answers (sequence i of a batch draws with seed + i); without one it comes from torch's generator, so that
    `torch.manual_seed` fixes them too. `streamer` gets the tokens as they are accepted. `seed` and `streamer` can also
    be given to `generate`, as `seed=` and `text_streamer=`.

    Raises `InvalidRequest` for options it cannot honour and `UnsupportedModel` for models it cannot run exactly, when
    `generate` is called.
    """
    return TreeDecoding(drafter, method, budget, candidates, node_topk, noise_aware, seed, streamer)


class TreeDecoding:
    """A decoding method for `generate`; made by `decoder`.

    `outputs` are the answers of the last call, each an `Output` with its stats and without text. What was made for a
    model (the drafter's weights, caches) is kept until another model is used or this one was moved.
    """

    def __init__(
        self,
        drafter: DrafterSource | None,
        method: str | None,
        budget: int | None,
        candidates: int | None,
        node_topk: int | None,
        noise_aware: bool,
        seed: int | None,
        streamer: Any,
    ) -> None:
        self._source, self._method = drafter, method
        options: dict[str, Any] = dict(
            budget=budget, candidates=candidates, node_topk=node_topk, noise_aware=noise_aware
        )
        self._given = {name: value for name, value in options.items() if value is not None and value is not False}
        drafting = Drafting(method or "ar", **self._given)  # what is wrong with these is said now
        if method is not None:
            drafting.kind.refuse_idle(self._given)
        self._seed, self._streamer = seed, streamer
        self._made: Pair | None = None
        self.outputs: list[Output] = []

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        text_streamer: Any = None,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Called by `generate`; returns what `generate` returns."""
        config, batch = generation_config, len(input_ids)
        streamer = self._streamer if text_streamer is None else text_streamer
        seed = self._first_seed(config, seed)
        self.outputs = []
        with _masked_attention(model):
            pair = self._pair(model, config.max_length)
            _refuse(config, logits_processor, model_kwargs, batch, streamer)
            cache = None if batch > 1 else _Handed.of(model_kwargs, input_ids.shape[1], config)
            prompts = _prompts(input_ids, model_kwargs)
            steps = _Steps(logits_processor, stopping_criteria, config, pair.target)
            drafting = pair.drafting(self._method, **self._given)
            drafting.kind.refuse_idle(self._given)
            for i, prompt in enumerate(prompts):
                steps.padding = input_ids[i, : input_ids.shape[1] - len(prompt)].tolist()
                request = Request(
                    prompt,
                    steps.sampling(None if seed is None else seed + i, input_ids.shape[1]),
                    drafting,
                    stopping=steps.stopping,
                )
                self.outputs.append(self._decode(pair, request, config.max_length, input_ids[i], cache, streamer))
        return self._returned(input_ids, steps, config, cache)

    def _decode(
        self, pair: Pair, request: Request, context: int, ids: torch.Tensor, cache: _Handed | None, streamer: Any
    ) -> Output:
        tree_decoder = pair.decoder([request], context=(context + 255) // 256 * 256)
        if streamer is not None:
            streamer.put(ids[None].cpu())
        shown = 0
        with closing(tree_decoder.stream(request)) as rounds:
            for generation in rounds:
                if generation.new_tokens and not shown and cache is not None:
                    cache.compare(_columns(tree_decoder))
                new = generation.new_tokens[shown:]
                shown += len(new)
                for token in new if streamer is not None else ():
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        if cache is not None:
            cache.fill(_columns(tree_decoder), len(generation.tokens) - 1)
        output = Output.of(generation)
        pair._judge(output)
        return output

    def _pair(self, model: Any, context: int) -> Pair:
        """The model as a target with the drafter bound to it."""
        if self._made is None or not _target(self._made).is_still(model):
            target = TransformersTarget(model, context=context)
            name = str(getattr(model.config, "_name_or_path", ""))
            self._made = Pair(target, None, self._bind(target), name=name)
        _target(self._made).check_context(context)
        return self._made

    def _bind(self, target: Target) -> Drafter | None:
        source = self._source
        if source is None or isinstance(source, (str, Path)):
            return load_drafter(None if source is None else str(source), target, None)
        drafter = source if isinstance(source, Drafter) else source(target)
        check_fits_target(
            drafter.config,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_layers=target.num_layers,
            tokenizer_size=min(drafter.config.vocab_size, target.vocab_size),
        )
        if drafter.target.device != target.device or drafter.target.dtype != target.dtype:
            raise InvalidRequest(
                f"the drafter is on {drafter.target.device} in {drafter.target.dtype}, the model on {target.device} in "
                f"{target.dtype}; give the drafter's name or folder instead"
            )
        return drafter

    def _first_seed(self, config: Any, seed: int | None) -> int | None:
        if not config.do_sample:
            return None
        seed = self._seed if seed is None else seed
        if seed is None:
            return int(torch.randint(2**62, ()))
        return SamplingParams(seed=seed).seed  # which says what is wrong with it

    def _returned(self, input_ids: torch.Tensor, steps: _Steps, config: Any, cache: _Handed | None) -> Any:
        longest = max(len(output.token_ids) for output in self.outputs)
        sequences = input_ids.new_full((len(input_ids), input_ids.shape[1] + longest), _padding(config))
        sequences[:, : input_ids.shape[1]] = input_ids
        for row, output in zip(sequences, self.outputs, strict=True):
            answer = input_ids.new_tensor(output.token_ids)
            row[input_ids.shape[1] : input_ids.shape[1] + len(answer)] = answer
        if not config.return_dict_in_generate:
            return sequences
        returned = GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=tuple(steps.scores) or None,
            logits=tuple(steps.logits) or None,
        )
        if cache is not None:
            returned[cache.name] = cache.cache
        return returned


@dataclass
class _Steps:
    """The logits processors and stopping criteria of a call, as the decode loop asks for them.

    Both see what they see in `generate`: `padding`, prompt and answer. `scores` and `logits` are those of every token,
    `[1, vocab]` fp32, where the call wants them.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: Any
    target: Target
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    padding: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._others = StoppingCriteriaList(
            c for c in self.criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)
        )
        self._keeps_scores = bool(self.config.return_dict_in_generate and self.config.output_scores)
        self._keeps_logits = bool(self.config.return_dict_in_generate and self.config.output_logits)
        temperatures = [p.temperature for p in self.processors if type(p) is TemperatureLogitsWarper]
        self._temperature = float(temperatures[0]) if len(temperatures) == 1 else 1.0

    @property
    def stopping(self) -> Callable[[Sequence[int]], bool] | None:
        """What `Request.stopping` asks, where there are criteria beyond lengths and stop tokens."""
        return self._stop if self._others else None

    def sampling(self, seed: int | None, width: int) -> SamplingParams:
        """The call's way of choosing tokens, for a prompt that is `width` tokens with its padding.

        Processors divide by the temperature themselves. It is multiplied back for the sampler, so that drafting may
        know it: what is drawn is the same.
        """
        ends = [c.eos_token_id for c in self.criteria if type(c) is EosTokenCriteria]
        lengths = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        called = self.processors or self._keeps_scores or self._keeps_logits
        return SamplingParams(
            temperature=self._temperature if self.config.do_sample else 0.0,
            seed=seed,
            max_new_tokens=max(1, min([self.config.max_length, *lengths]) - width),
            ignore_eos=True,
            stop_token_ids=sorted({t for end in ends for t in end.tolist() if 0 <= t < self.target.vocab_size}),
            logits_processors=(self._process,) if called else (),
        )

    def _process(self, ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        raw = logits[None]
        if self._keeps_logits:
            self.logits.append(raw.clone())
        scores: torch.Tensor = self.processors(self._row(ids), raw)
        if self._keeps_scores:
            self.scores.append(scores.clone())
        return scores[0] * self._temperature if self.config.do_sample else scores[0]

    def _stop(self, ids: Sequence[int]) -> bool:
        return bool(torch.as_tensor(self._others(self._row(ids), tuple(self.scores) or None)).all())

    def _row(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[*self.padding, *ids]], device=self.target.device)


@dataclass
class _Handed:
    """The cache that `generate` handed over. Decoding does not touch it; `fill` leaves in it what plain decoding would.

    `held` columns were in it before: they are computed again, since the drafter needs the hidden states, and compared.
    """

    name: str
    cache: Any
    held: int
    kept: bool

    @classmethod
    def of(cls, model_kwargs: dict[str, Any], width: int, config: Any) -> _Handed | None:
        """The cache among `model_kwargs`; raises `InvalidRequest` for one that cannot be filled."""
        name = next((name for name in ("cache", "past_key_values") if model_kwargs.get(name) is not None), None)
        if name is None:
            return None
        cache = model_kwargs[name]
        odd = [
            layer for layer in cache.layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer)
        ]
        if odd or getattr(cache, "offloading", False):
            kind = type(odd[0]).__name__ if odd else "offloaded"
            raise InvalidRequest(f"a {type(cache).__name__} ({kind}) is not supported; use a dynamic or a static cache")
        room = min((layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)), default=None)
        if room is not None and config.max_length - 1 > room:
            raise InvalidRequest(f"max_length {config.max_length} does not fit a static cache of {room} tokens")
        held = int(cache.get_seq_length())
        covered = getattr(config, "_mask_length", None) or width
        if model_kwargs.get("attention_mask") is not None:
            covered = model_kwargs["attention_mask"].shape[1]
        if held and (covered != width or held >= width):
            raise InvalidRequest(
                f"the cache holds {held} tokens and input_ids has {width}; give the ids of the whole conversation"
            )
        kept = bool(getattr(cache, "_is_user_defined", True) or config.return_dict_in_generate)
        return cls(name, cache, held, kept)

    def compare(self, ours: Sequence[Any]) -> None:
        """Raises `InvalidRequest` when the cache was not filled from the beginning of the prompt."""
        if not self.held:
            return
        keys, _ = ours[len(self.cache.layers) - 1].columns(self.held)
        theirs = self.cache.layers[-1].keys[:, :, : self.held]
        if theirs.shape != keys.shape or (theirs - keys).norm() > _SAME_KEYS * keys.norm():
            raise InvalidRequest(
                "the cache does not hold the beginning of input_ids; give the cache of the same tokens"
            )

    def fill(self, ours: Sequence[Any], count: int) -> None:
        """Writes the first `count` columns, all that was decoded but for the last token."""
        if not self.kept:
            return
        while len(self.cache.layers) < len(ours):
            self.cache.layers.append(DynamicLayer())
        for layer, our in zip(self.cache.layers, ours, strict=True):
            keys, values = (part.clone() for part in our.columns(count))
            if isinstance(layer, StaticLayer):
                if not layer.is_initialized:
                    layer.lazy_initialization(keys, values)
                layer.keys[:, :, :count], layer.values[:, :, :count] = keys, values
                layer.cumulative_length.fill_(count)
                continue
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = count


def _target(pair: Pair) -> TransformersTarget:
    assert isinstance(pair.target, TransformersTarget)
    return pair.target


def _columns(tree_decoder: Decoder) -> Sequence[Any]:
    """The layers of what a decoder of one slot holds."""
    cache = tree_decoder._cache
    assert isinstance(cache, ModelCache)
    layers: Sequence[Any] = cache.sequences[0].layers
    return layers


def _prompts(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """The token ids of each sequence, padding on the left taken off."""
    mask, width = model_kwargs.get("attention_mask"), input_ids.shape[1]
    mask = torch.ones_like(input_ids) if mask is None else mask[:, -width:]
    prompts = []
    for i, (row, seen) in enumerate(zip(input_ids.tolist(), mask.bool().tolist(), strict=True)):
        padding = seen.index(True) if True in seen else width
        if padding == width or not all(seen[padding:]):
            raise InvalidRequest(f"attention_mask of sequence {i} has gaps; only padding on the left can be taken off")
        positions = model_kwargs.get("position_ids")
        if positions is not None:
            own = positions.reshape(-1, positions.shape[-1])[min(i, positions.shape[0] - 1)][-(width - padding) :]
            if own.tolist() != list(range(width - padding)):
                raise InvalidRequest("position_ids other than 0, 1, 2, ... are not supported; leave them out")
        prompts.append(row[padding:])
    return prompts


def _refuse(config: Any, processors: Any, model_kwargs: dict[str, Any], batch: int, streamer: Any) -> None:
    """Raises `InvalidRequest` for what could have no effect, or another one than it has in `generate`."""
    mode = str(getattr(config.get_generation_mode(), "value", config.get_generation_mode()))
    if mode not in ("greedy_search", "sample"):
        raise InvalidRequest(f"generation mode {mode} is not supported; greedy search and sampling are")
    for name in sorted(set(model_kwargs) - _PREPARED):
        if model_kwargs[name] is not None:
            raise InvalidRequest(f"{name} is not supported with tree drafting; leave it out")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False) and config.return_dict_in_generate:
            raise InvalidRequest(f"{name} is not supported with tree drafting; leave it out")
    if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors):
        raise InvalidRequest("guidance_scale is not supported with tree drafting; leave it out")
    if batch == 1:
        return
    if streamer is not None:
        raise InvalidRequest(f"a streamer takes one sequence and there are {batch}")
    if config.return_dict_in_generate and (config.output_scores or config.output_logits):
        raise InvalidRequest(f"output_scores and output_logits are for one sequence and there are {batch}")
    if any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in processors):
        raise InvalidRequest(f"prefix_allowed_tokens_fn is for one sequence here and there are {batch}")
    for name in ("cache", "past_key_values"):
        cache = model_kwargs.get(name)
        if cache is not None and (cache.get_seq_length() > 0 or getattr(cache, "_is_user_defined", False)):
            raise InvalidRequest(f"{name} is for one sequence and there are {batch}; leave it out")


def _padding(config: Any) -> int:
    for token in (config.pad_token_id, config.eos_token_id):
        if token is not None:
            return int(token[0] if isinstance(token, (list, tuple)) else token)
    return 0


@contextmanager
def _masked_attention(model: Any) -> Iterator[None]:
    """Runs with attention that takes a tree mask, and puts back what was there."""
    if model.training:
        raise UnsupportedModel("the model is in training mode; call model.eval() first")
    before = use_masked_attention(model)
    try:
        yield
    finally:
        if model.config.get_text_config(decoder=True)._attn_implementation != before:
            model.set_attn_implementation(before)
