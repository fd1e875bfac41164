"""Any causal LM of transformers with full attention as a target, one sequence a pass.

The model runs as it is. Its trees come to it as a 4-D attention mask with positions of their own, hidden states leave
it through hooks on its decoder layers, and its keys and values go to storage of ours behind the interface of
transformers' caches, so that a rejected branch costs nothing and an accepted one is moved into place.
"""

from __future__ import annotations

import inspect
import logging
import statistics
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from dominotree.errors import InvalidRequest, UnsupportedModel
from dominotree.targets.base import Forward
from dominotree.targets.cache import SlotCache
from dominotree.targets.elementwise import argmax_rows
from dominotree.targets.rows import Rows, Segment

log = logging.getLogger("dominotree")

MASKED_ATTENTION = ("sdpa", "eager")
"""Attention backends that take an arbitrary mask for each row."""

_FIRST_COLUMNS = 256
_NO_LIMIT = 2**20


class SlotLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer of one sequence: `[1, heads, columns, head_dim]`, grown by doubling.

    A pass writes behind the first `seen` columns whatever was there before. Keys and values may differ in width.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores a pass's rows; returns all columns up to them."""
        start, self.seen = self.seen, self.seen + key_states.shape[-2]
        if self._held is None or self._held[0].shape[-2] < self.seen:
            self._grow(key_states, value_states, start)
        assert self._held is not None
        for held, new in zip(self._held, (key_states, value_states), strict=True):
            held[:, :, start : self.seen] = new
        self.keys, self.values = self.columns(self.seen)
        self.is_initialized, self.device = True, key_states.device
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.seen

    def columns(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first `count` columns; rows were stored before."""
        assert self._held is not None, "a pass comes first"
        keys, values = self._held
        return keys[:, :, :count], values[:, :, :count]

    def move(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies columns `source` to columns `to`, all read before any is written."""
        for held in self._held or ():
            held[:, :, to] = held[:, :, source]

    def _grow(self, keys: torch.Tensor, values: torch.Tensor, used: int) -> None:
        columns = max(_FIRST_COLUMNS, 1 << (self.seen - 1).bit_length())
        grown = tuple(new.new_zeros(*new.shape[:2], columns, new.shape[-1]) for new in (keys, values))
        for old, new in zip(self._held or (), grown, strict=False):
            new[:, :, : old.shape[-2]] = old
        self._held = cast("tuple[torch.Tensor, torch.Tensor]", grown)


class ModelCache(SlotCache):
    """Slots as in `SlotCache`, each a cache of transformers' own kind in `sequences`, grown as its sequence grows."""

    def __init__(self, layers: int, slots: int, length: int) -> None:
        self.length = length
        self.lengths = [0] * slots
        self.free = list(range(slots))
        self.sequences = [self._new_sequence(layers) for _ in range(slots)]

    def clear(self, slot: int) -> None:
        """See `SlotCache.clear`."""
        self.sequences[slot] = self._new_sequence(len(self.sequences[slot].layers))
        self.lengths[slot] = 0

    @staticmethod
    def _new_sequence(layers: int) -> Cache:
        return Cache(layers=[SlotLayer() for _ in range(layers)])

    def at(self, slot: int, start: int) -> Any:
        """The slot's cache, set to write behind its first `start` columns."""
        for layer in self.sequences[slot].layers:
            layer.seen = start
        return self.sequences[slot]

    @torch.inference_mode()
    def commit(self, slot: int, tail: Sequence[int]) -> None:
        """See `SlotCache.commit`."""
        start = self.lengths[slot]
        moved = [(start + i, start + offset) for i, offset in enumerate(tail) if i != offset]
        self.lengths[slot] = start + len(tail)
        for layer in self.at(slot, self.lengths[slot]).layers:
            if moved:
                to, source = (torch.tensor(list(columns), device=layer.device) for columns in zip(*moved, strict=True))
                layer.move(to, source)


class TransformersTarget:
    """A `PreTrainedModel` in eval mode as a target; it is used as it stands and not copied.

    `context` is the most tokens of prompt and answer that are asked of it, None for all it was made for. Embedding and
    head are what drafters borrow: `embed` is the model's own embedding module, whatever that scales included, and
    `head_weight` the matrix of its output embedding alone. What a model does outside of the two (Granite's
    multipliers, Cohere's logit scale, soft-capping, a bias of the head) stays out of the draft and is in every logit
    that is verified.

    Raises `UnsupportedModel` for what cannot be run exactly; see `refusal`. What shows in no config (a model that reads
    the mask in a way of its own) shows in a small tree that is run at the start and compared with its paths.
    """

    row_invariant = False

    def __init__(self, model: Any, *, context: int | None = None) -> None:
        reason = refusal(model)
        if reason is not None:
            raise UnsupportedModel(f"{_name(model)} {reason}")
        config = model.config.get_text_config(decoder=True)
        self.model, self._decoder_config = model, config
        self._passes = threading.Lock()  # its hooks hear whoever runs the model
        head = model.get_output_embeddings()
        self._embedding, self._head_weight = model.get_input_embeddings(), head.weight
        self.vocab_size, self.hidden_size = head.weight.shape
        self._layers = decoder_layers(model, config.num_hidden_layers)
        self.num_layers = len(self._layers)
        made_for = positions(config)
        self.max_positions = made_for if context is None else min(context, made_for)
        self._limits = limits(config)
        self.check_context(self.max_positions)
        eos = getattr(model.generation_config, "eos_token_id", None)
        eos = config.eos_token_id if eos is None else eos
        self.eos_token_ids: tuple[int, ...] = (
            tuple(eos) if isinstance(eos, (list, tuple)) else (eos,) * (eos is not None)
        )
        self.dtype, self.device = model.dtype, model.device
        self.precision = str(model.dtype).removeprefix("torch.")
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        use_masked_attention(model)
        self._check_a_tree()

    def is_still(self, model: Any) -> bool:
        """Whether this is the target of `model` as it stands: neither moved nor given another head."""
        same = model is self.model and model.device == self.device and model.dtype == self.dtype
        return bool(same and model.get_output_embeddings().weight is self._head_weight)

    def check_context(self, context: int) -> None:
        """Raises `UnsupportedModel` where the model would not be run exactly for all of `context` tokens."""
        for tokens, reason in self._limits:
            if context > tokens:
                raise UnsupportedModel(
                    f"{_name(self.model)} {reason} and {context} tokens are asked for; "
                    f"use a context of at most {tokens}"
                )

    def new_cache(self, slots: int, length: int) -> ModelCache:
        """See `Target.new_cache`."""
        return ModelCache(self.num_layers, slots, length)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Target.embed`: what the model's embedding module gives."""
        return cast("torch.Tensor", self._embedding(token_ids))

    def head_weight(self) -> torch.Tensor:
        """See `Target.head_weight`."""
        return cast("torch.Tensor", self._head_weight.detach())

    @torch.inference_mode()
    def forward(
        self,
        cache: SlotCache,
        segments: Sequence[Segment],
        *,
        feature_layers: Sequence[int] = (),
        last_only: bool = False,
        best: bool = False,
    ) -> Forward:
        """See `Target.forward`; every segment is a pass of its own."""
        assert isinstance(cache, ModelCache), "a cache comes from new_cache"
        passes = [self._run(cache, segment, feature_layers, last_only) for segment in segments]
        features = [out.features for out in passes if out.features is not None]
        logits = torch.cat([out.logits for out in passes])
        return Forward(logits, torch.cat(features) if features else None, argmax_rows(logits) if best else ())

    def _run(self, cache: ModelCache, segment: Segment, feature_layers: Sequence[int], last_only: bool) -> Forward:
        count, start = len(segment.tokens), segment.start
        if start + count > cache.length:
            raise InvalidRequest(f"{start + count} columns do not fit a cache of {cache.length}; raise --context")
        rows = Rows.of([segment])
        seen = rows.mask(segment.slot, segment.slot, count, start + count)  # [1, count, columns]
        positions = torch.from_numpy(rows.positions[:count])
        self.check_context(int(positions.max()) + 1)
        given: dict[str, Any] = {
            "input_ids": torch.tensor([list(segment.tokens)], device=self.device),
            "attention_mask": self._mask(torch.from_numpy(seen)),
            "position_ids": positions[None].to(self.device),
            self.cache_name: cache.at(segment.slot, start),
            "use_cache": True,
            "return_dict": True,
        }
        if self._keeps_logits:
            given["logits_to_keep"] = 1 if last_only else 0
        with self._passes, self._listening(feature_layers) as heard:
            logits = self.model(**given).logits[0]
        if len(heard) < len(set(feature_layers)):
            raise UnsupportedModel(f"{_name(self.model)} does not let its layers be heard; is it compiled?")
        features = torch.cat([heard[i] for i in feature_layers], dim=-1) if feature_layers else None
        return Forward(logits[-1:] if last_only else logits, features)

    def _mask(self, seen: torch.Tensor) -> torch.Tensor:
        """`[1, rows, columns]` bool as the backend takes it, `[1, 1, rows, columns]`."""
        seen = seen[None].to(self.device)
        if self._decoder_config._attn_implementation == "sdpa":
            return seen
        blocked = torch.finfo(self.dtype).min
        return torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill(~seen, blocked)

    @contextmanager
    def _listening(self, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Gathers the outputs `[rows, hidden]` of `layers` while the model runs."""
        heard: dict[int, torch.Tensor] = {}

        def hook(i: int) -> Any:
            def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
                heard[i] = (output[0] if isinstance(output, tuple) else output)[0]

            return keep

        handles = [self._layers[i].register_forward_hook(hook(i)) for i in set(layers)]
        try:
            yield heard
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def _check_a_tree(self) -> None:
        """Compares a tree of five nodes, and the row after one of its paths was kept, with plain passes."""
        tokens = [(17 * i + 5) % self.vocab_size for i in range(1, 11)]
        prefix, tree, after = tokens[:3], tokens[3:9], tokens[9]
        cache = self.new_cache(1, 64)
        self.forward(cache, [Segment(0, 0, prefix)], last_only=True)
        cache.commit(0, range(3))
        rows = self.forward(cache, [Segment(0, 3, tree, [0, 0, 1, 1, 2])]).logits
        cache.commit(0, [0, 1, 4])
        last = self.forward(cache, [Segment(0, 6, [after])]).logits[0]
        got = [rows[2], rows[3], rows[4], rows[5], last]
        paths = [[0, 1, 4], [0, 1, 3], [0, 2, 5]]
        first, second, third = (self._plain(prefix + [tree[i] for i in path] + [after]) for path in paths)
        expected = [third[4], second[5], first[5], third[5], first[6]]
        positions = [0, 1, 2, 3, 4, 4, 5, 5, 5]
        unmasked = self._plain([*prefix, *tree], position_ids=positions, attention_mask=[1] * 9)[5:]
        if any(logits.isnan().any() for logits in expected):
            return  # nothing can be said; decoding names what is broken
        strayed = _median(_distance(a, b) for a, b in zip(got, expected, strict=True))
        if strayed > self._tolerance(_median(_distance(a, b) for a, b in zip(unmasked, expected[:4], strict=True))):
            raise UnsupportedModel(
                f"{_name(self.model)} does not give a tree's rows the logits of their paths: it takes no tree mask or "
                "keeps a state beside its keys and values"
            )

    def _plain(self, ids: list[int], **given: list[int]) -> torch.Tensor:
        rows = {name: torch.tensor([row], device=self.device) for name, row in {"input_ids": ids, **given}.items()}
        logits: torch.Tensor = self.model(**rows, use_cache=False).logits[0]
        return logits

    def _tolerance(self, effect: float) -> float:
        """How far rounding may carry a row's logits, where seeing all rows before carries them `effect`."""
        exact = self.dtype in (torch.float32, torch.float64)
        if exact and not (self.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32):
            return 1e-4
        return max(torch.finfo(torch.float16 if exact else self.dtype).eps, 0.3 * effect)


def refusal(model: Any) -> str | None:
    """Why a model cannot be run exactly, worded to follow its name; None when nothing speaks against it."""
    config = model.config.get_text_config(decoder=True)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if model.config.is_encoder_decoder:
        return "is an encoder-decoder; a decoder-only model is expected"
    if getattr(model, "_is_stateful", False):
        named = f" ({', '.join(kinds)} layers)" if kinds else ""
        return f"keeps recurrent state{named}, which cannot be rolled back when a draft is rejected"
    layers = _plain_cache(config).layers
    odd = sorted(
        {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    )
    if odd:
        return f"has layers {', '.join(kinds) or odd[0]}, whose cache ({', '.join(odd)}) cannot be rolled back"
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        return "takes no position_ids, so the nodes of a tree cannot be placed"
    if getattr(config, "alibi", False):
        return "uses ALiBi, whose distances follow the order of rows and not the positions of a tree"
    if not {"cache", "past_key_values"} & set(parameters):
        return "takes no cache"
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        return f"is spread over {', '.join(devices)}; one device is expected"
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in (("input", embedding), ("output", head)):
        weight = getattr(module, "weight", None)
        if weight is None or weight.dim() != 2 or not weight.is_floating_point():
            return f"has no plain {name} embedding, which drafters borrow"
        if weight.shape[1] != config.hidden_size:
            return f"has {name} embeddings of width {weight.shape[1]} beside hidden states of {config.hidden_size}"
    if model.training:
        return "is in training mode; call model.eval() first"
    return None


def positions(config: Any) -> int:
    """The most tokens a model was made for; 2**20 where its config does not say."""
    for field in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        value = getattr(config, field, None)
        if isinstance(value, int) and value > 0:
            return value
    return _NO_LIMIT


def limits(config: Any) -> list[tuple[int, str]]:
    """Up to how many tokens a config's model is a full-attention model of fixed rotary angles, and what then begins."""
    found = []
    for window in sorted({layer.sliding_window for layer in _plain_cache(config).layers if layer.is_sliding}):
        found.append(
            (window, f"has layers with a sliding_window of {window} tokens (only full attention runs exactly)")
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = part.get("rope_type")
        if kind in ("dynamic", "longrope"):
            original = part.get("original_max_position_embeddings") if kind == "longrope" else None
            original = original or getattr(config, "original_max_position_embeddings", None) or positions(config)
            found.append((original, f"has {kind} rotary embeddings, whose angles change beyond {original} tokens"))
    return found


def decoder_layers(model: Any, count: int) -> nn.ModuleList:
    """The model's `count` decoder layers, in order; raises `UnsupportedModel` where there is no such list."""
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModel(f"{_name(model)} has no list of {count} decoder layers to take hidden states from")


def use_masked_attention(model: Any) -> str:
    """Puts sdpa (eager where there is none) in place of a backend that takes no tree mask, with a notice.

    Returns the backend that was there.
    """
    before = str(model.config.get_text_config(decoder=True)._attn_implementation)
    if before not in MASKED_ATTENTION:
        instead = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        log.warning(f"{before} attention takes no tree mask; {instead} is used in its place")
        model.set_attn_implementation(instead)
        if model.config.get_text_config(decoder=True)._attn_implementation not in MASKED_ATTENTION:
            raise UnsupportedModel(f"{_name(model)} runs with {before} attention, which takes no tree mask")
    return before


def load_transformers_target(
    folder: Path, *, dtype: torch.dtype, device: torch.device, context: int | None = None
) -> TransformersTarget:
    """The model in `folder` as transformers runs it; raises `UnsupportedModel` in one line where it does not."""
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, trust_remote_code=False)
        model = model.to(device).eval()
    except Exception as error:  # whatever a model's own code raises
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedModel(f"transformers cannot load {folder} ({reason})") from error
    model.requires_grad_(False)
    return TransformersTarget(model, context=context)


def _plain_cache(config: Any) -> Any:
    return DynamicCache(config=config)


def _name(model: Any) -> str:
    return f"{model.config.model_type} ({type(model).__name__})"


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Euclidean distance of two rows of logits, relative to the spread of the second."""
    a, b = a.double(), b.double()
    spread = (b - b.mean()).norm()
    return float((a - b).norm() / spread) if spread > 0 else float((a - b).norm())
