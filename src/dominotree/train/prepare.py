"""From folders to a `Trainer`: the drafter's shape and vocabulary, the frozen target, the feature cache."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dominotree.drafters.checkpoint import check_fits_target, draft_token_ids, read_checkpoint
from dominotree.drafters.config import DrafterConfig, evenly_spaced_layers
from dominotree.errors import InvalidRequest
from dominotree.targets.fingerprint import fingerprint
from dominotree.train.data import Corpus, CorpusError, choose_draft_tokens, difference, read_corpus
from dominotree.train.evaluate import FrozenTarget
from dominotree.train.features import TOP_K, FeatureCache, cached_draft_tokens, fill_cache
from dominotree.train.fit import FitSettings, Trainer, read_state
from dominotree.train.model import DrafterModel
from dominotree.train.settings import Check, Settings, one_of, whole
from dominotree.train.target import TargetReader, load_target_reader

__all__ = ["DrafterShape", "prepare", "tensorboard_writer"]


def _is_layers(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(type(i) is int and i >= 0 for i in value)


def _is_vocabulary(value: object) -> bool:
    return type(value) is int and (value == 0 or value >= TOP_K)


@dataclass(frozen=True)
class DrafterShape(Settings):
    """What may be chosen of a new drafter; the rest follows from the target. None: worked out from target and
    corpus; for the projector, "domino" or what a given drafter has.

    `draft_vocab_size` 0 scores the whole vocabulary, which other implementations of the format understand. Otherwise up
    to `context_vocab_size` tokens are scored besides that the text so far holds and the draft vocabulary lacks.
    """

    layers: int = 3
    block_size: int = 8
    projector: str | None = None
    gru_hidden_dim: int = 256
    emb_dim: int = 128
    pure_draft_prefix_len: int = 1
    shift_label: bool = True
    draft_vocab_size: int = 8192
    context_vocab_size: int = 256
    target_layer_ids: Sequence[int] | None = None
    intermediate_size: int | None = None
    mask_token_id: int | None = None

    noun = "Drafter"
    checks: ClassVar[Mapping[str, Check]] = {
        **dict.fromkeys(("layers", "block_size", "gru_hidden_dim", "emb_dim", "intermediate_size"), whole(1)),
        **dict.fromkeys(("pure_draft_prefix_len", "context_vocab_size", "mask_token_id"), whole(0)),
        "projector": one_of("domino", "none"),
        "shift_label": one_of(True, False),
        "draft_vocab_size": (_is_vocabulary, f"a whole number of at least {TOP_K}, or 0 for all tokens"),
        "target_layer_ids": (_is_layers, "a list of layer numbers counted from 0"),
    }

    @classmethod
    def beside_init_from(cls, values: Mapping[str, Any]) -> Self:
        """What may be chosen beside a drafter to start from; `InvalidRequest` names what has no effect there."""
        for name in values:
            if name in cls.checks and name not in ("projector", "context_vocab_size"):
                raise InvalidRequest(
                    f"Drafter setting {name!r} has no effect with --init-from, which brings its shape: leave it out."
                )
        return cls.from_dict(values)


def prepare(
    target_folder: str | Path,
    data: str | Path,
    out: str | Path,
    settings: FitSettings,
    shape: DrafterShape,
    *,
    init_from: str | Path | None = None,
    device: str = "cpu",
    bf16: bool = True,
    held_out: int = 60,
    cache: str | Path | None = None,
    fill: bool = True,
    on_cache: Callable[[int, int, float], None] = lambda done, total, rate: None,
    on_log: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Trainer:
    """Everything a run needs, features cached in `cache` (by default `out/features`).

    A run found in `out` is gone on with: its draft vocabulary, mask token and held-out sequences stay, however the
    corpus has grown. A new run takes the draft vocabulary of a cache that is there already. `init_from` is a drafter
    folder whose weights, shape and vocabulary are the start; with the projector "none", those of its backbone. Without
    `fill` only what is cached already is trained on. Raises `CorpusError`, `InvalidRequest`, `InvalidCheckpoint` and
    `UnsupportedModel`.
    """
    state, mark = read_state(out), fingerprint(Path(target_folder))
    begun = DrafterConfig.from_dict(state["config"]) if state else None
    if begun is not None and shape.mask_token_id is None:
        shape = replace(shape, mask_token_id=begun.mask_token_id)
    folder = Path(out) / "features" if cache is None else Path(cache)
    target = load_target_reader(target_folder, device=device)
    vocab, hidden = target.embedding.shape
    corpus = read_corpus(data, vocab_size=vocab)
    model, draft_tokens = _start(target, corpus, shape, init_from, settings.seed, cached_draft_tokens(folder))
    config = model.config = replace(model.config, target_fingerprint=mark)
    if begun is not None:
        different = difference(asdict(begun), asdict(config))
        if different:
            raise InvalidRequest(
                f"The run in {out} was begun with {different}: name another folder, or give its own settings."
            )
        draft_tokens = state["draft_tokens"].clone()  # the file will be replaced
    check_fits_target(
        config,
        hidden_size=hidden,
        vocab_size=vocab,
        num_layers=target.num_layers,
        stop_token_ids=target.stop_token_ids,
        draft_tokens=None if config.draft_vocab_size is None else draft_tokens,
    )
    features = FeatureCache(
        folder,
        corpus,
        target=mark,
        layer_ids=config.target_layer_ids,
        hidden_size=hidden,
        draft_tokens=draft_tokens,
        held_out=held_out,
    )
    if begun is not None and state["held_out"] != features.held_out_starts:
        raise CorpusError(
            f"The run in {out} holds out other sequences than its feature cache {folder}: bring back the cache that it "
            "was begun with, or name another folder for the run."
        )
    if fill:
        fill_cache(features, target, report=on_cache)
    frozen = _freeze(target, draft_tokens, config.context_vocab_size, bf16)
    started_from = None if init_from is None else str(init_from)
    return Trainer(out, model, frozen, features, settings, started_from=started_from, on_log=on_log)


def _start(
    target: TargetReader,
    corpus: Corpus,
    shape: DrafterShape,
    init_from: str | Path | None,
    seed: int,
    cached: Tensor | None,
) -> tuple[DrafterModel, Tensor]:
    """The untrained, or the given, drafter and the token ids it scores: `cached` ones for as many new ones."""
    vocab = target.embedding.shape[0]
    if init_from is not None:
        config, tensors = read_checkpoint(init_from)
        ids = draft_token_ids(tensors)
        if shape.projector == "domino" and not config.is_domino:
            raise InvalidRequest(
                f"The drafter {init_from} is plain DFlash, expected a Domino one for projector domino: leave projector "
                "out, or start from a Domino drafter."
            )
        left_out: tuple[str, ...] = ("d2t", "t2d")
        if shape.projector == "none" and config.is_domino:
            left_out += ("prefix_gru.", "embed_proj.")
            config = replace(config, projector_type=None, gru_hidden_dim=0, emb_dim=0, pure_draft_prefix_len=0)
        config = replace(config, context_vocab_size=0 if ids is None else shape.context_vocab_size)
        model = DrafterModel(config)
        model.load_state_dict({name: w.float() for name, w in tensors.items() if not name.startswith(left_out)})
        return model, torch.arange(vocab) if ids is None else ids
    config = new_config(target, corpus, shape)
    model = DrafterModel(config)
    model.initialize(seed)
    if cached is not None and len(cached) == config.scored_vocab_size:
        return model, cached
    if config.draft_vocab_size is None:
        return model, torch.arange(vocab)
    return model, choose_draft_tokens(corpus, config.draft_vocab_size, target.special_token_ids, vocab)


def new_config(target: TargetReader, corpus: Corpus, shape: DrafterShape) -> DrafterConfig:
    """The config of a new drafter: heads, widths and rotary base are the target's."""
    vocab, hidden = target.embedding.shape
    domino = shape.projector != "none"
    given = target.sizes
    released = {
        "hidden_size": hidden,
        "intermediate_size": shape.intermediate_size or given["intermediate_size"],
        "num_hidden_layers": shape.layers,
        "num_attention_heads": given["num_attention_heads"],
        "num_key_value_heads": given["num_key_value_heads"],
        "head_dim": given["head_dim"],
        "vocab_size": vocab,
        "block_size": shape.block_size,
        "num_target_layers": target.num_layers,
        "target_layer_ids": list(shape.target_layer_ids or evenly_spaced_layers(target.num_layers, shape.layers)),
        "mask_token_id": _unused_token(target, corpus) if shape.mask_token_id is None else shape.mask_token_id,
        "rms_norm_eps": given["rms_norm_eps"],
        "rope_theta": given["rope_theta"],
        "max_position_embeddings": given["max_position_embeddings"],
        "shift_label": shape.shift_label,
        "draft_vocab_size": shape.draft_vocab_size if 0 < shape.draft_vocab_size < vocab else None,
        "context_vocab_size": shape.context_vocab_size if 0 < shape.draft_vocab_size < vocab else 0,
        "projector_type": "domino" if domino else None,
        "gru_hidden_dim": shape.gru_hidden_dim,
        "emb_dim": shape.emb_dim,
        "pure_draft_prefix_len": shape.pure_draft_prefix_len,
    }
    return DrafterConfig.from_dict(released)


def _unused_token(target: TargetReader, corpus: Corpus) -> int:
    """The first token that no sequence holds and that means nothing to the tokenizer: a mask must not look
    like text.
    """
    used = set(np.unique(corpus.tokens).tolist()) | set(target.special_token_ids)
    return next((i for i in range(target.embedding.shape[0]) if i not in used), target.embedding.shape[0] - 1)


def _freeze(target: TargetReader, draft_tokens: Tensor, words: int, bf16: bool) -> FrozenTarget:
    dtype = torch.bfloat16 if bf16 else torch.float32
    return FrozenTarget(target.embedding.to(dtype), target.head.to(dtype), draft_tokens, words)


def tensorboard_writer(folder: str | Path) -> Callable[[dict[str, Any]], None]:
    """A log function that writes every number of a row for TensorBoard; does nothing without the `train`
    extra.
    """
    if importlib.util.find_spec("tensorboard") is None:
        return lambda row: None
    from torch.utils.tensorboard import SummaryWriter

    writer: SummaryWriter | None = None

    def write(row: dict[str, Any]) -> None:
        nonlocal writer
        if writer is None:  # a resumed run makes some steps again: what is there of them is hidden
            writer = SummaryWriter(str(folder), purge_step=row["step"])
        for name, value in row.items():
            if isinstance(value, (int, float)) and name != "step":
                writer.add_scalar(name, value, row["step"])
        writer.flush()

    return write
