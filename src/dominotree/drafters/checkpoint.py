"""Drafter folders: reading with every tensor accounted for, writing in the released form."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dominotree.drafters.config import DrafterConfig
from dominotree.errors import InvalidCheckpoint, UnsupportedModel
from dominotree.files import weight_files

__all__ = ["check_fits_target", "draft_token_ids", "expected_shapes", "read_checkpoint", "write_checkpoint"]

_PREFIXES = ("model.", "logit_head.")
_ROTARY = (
    "rotary_emb.inv_freq",
    "rotary_emb.original_inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)
_MAPS = {"d2t": torch.int64, "t2d": torch.bool}


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Released tensor name -> shape for every tensor that a drafter of this config has."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    wide, narrow = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_hidden_layers):
        rows = {"q": wide, "k": narrow, "v": narrow, "o": hidden}
        for part, size in rows.items():
            shapes[f"layers.{i}.self_attn.{part}_proj.weight"] = (size, wide if part == "o" else hidden)
            if config.attention_bias:
                shapes[f"layers.{i}.self_attn.{part}_proj.bias"] = (size,)
        shapes |= {
            f"layers.{i}.self_attn.q_norm.weight": (head,),
            f"layers.{i}.self_attn.k_norm.weight": (head,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
        }
    if config.is_domino:
        state = config.gru_hidden_dim
        shapes |= {
            "prefix_gru.weight_ih_l0": (3 * state, hidden),
            "prefix_gru.weight_hh_l0": (3 * state, state),
            "embed_proj.0.weight": (config.emb_dim, hidden + state),
            "embed_proj.2.weight": (config.scored_vocab_size, config.emb_dim),
        }
    if config.draft_vocab_size is not None:
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return shapes


def read_checkpoint(folder: str | Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """The drafter in `folder`: its config, and its tensors under their released names, on the CPU, dtypes as
    stored.

    Prefixes `model.` and `logit_head.` are stripped, rotary buffers left out, shards joined. Raises
    `ModelNotFound` when there is no drafter, `UnsupportedModel` for one that is refused by name,
    `InvalidCheckpoint` naming the first tensor that is missing, unexpected, twice there, or of another shape
    or dtype than the config predicts.
    """
    folder = Path(folder)
    config = DrafterConfig.from_file(folder)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        for name, tensor in _read_file(file).items():
            bare = _bare(name)
            if bare.endswith(_ROTARY):
                continue
            if bare in tensors:
                raise InvalidCheckpoint(f"Drafter {folder}: tensor {bare} is there twice: export the drafter again.")
            tensors[bare] = tensor
    _check_tensors(config, tensors, folder)
    return config, tensors


def draft_token_ids(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Token ids of the draft vocabulary, int64 `[draft_vocab]`, increasing; None for a whole-vocabulary
    drafter.

    `d2t` stores, as in EAGLE-3 (arXiv 2503.01840), the offset from the draft id to the token id.
    """
    offsets = tensors.get("d2t")
    return None if offsets is None else offsets + torch.arange(len(offsets))


def check_fits_target(
    config: DrafterConfig,
    *,
    hidden_size: int,
    vocab_size: int,
    num_layers: int,
    stop_token_ids: Collection[int] = (),
    tokenizer_size: int | None = None,
    draft_tokens: Tensor | None = None,
) -> None:
    """Refuse a drafter that was made for another target; `InvalidCheckpoint` names the field and both values.

    The vocabularies may be padded differently if both hold the `tokenizer_size` tokens that the tokenizer
    knows. `draft_tokens` (from `draft_token_ids`) must hold every stop token, or an answer's end could never
    be drafted.
    """
    if config.hidden_size != hidden_size:
        raise _misfit("hidden_size", config.hidden_size, hidden_size)
    if config.num_target_layers not in (None, num_layers):
        raise _misfit("num_target_layers", config.num_target_layers, num_layers)
    if max(config.target_layer_ids) >= num_layers:
        raise _misfit("target_layer_ids", list(config.target_layer_ids), f"layers 0 to {num_layers - 1}")
    padded_only = tokenizer_size is not None and tokenizer_size <= min(config.vocab_size, vocab_size)
    if config.vocab_size != vocab_size and not padded_only:
        known = "" if tokenizer_size is None else f" with a tokenizer of {tokenizer_size} tokens"
        raise _misfit("vocab_size", config.vocab_size, f"{vocab_size}{known}")
    if config.mask_token_id >= vocab_size:
        raise _misfit("mask_token_id", config.mask_token_id, f"a vocabulary of {vocab_size} tokens")
    if draft_tokens is not None:
        if int(draft_tokens.max()) >= vocab_size:
            raise _misfit("d2t", f"up to token {int(draft_tokens.max())}", f"a vocabulary of {vocab_size} tokens")
        left_out = sorted(set(stop_token_ids) - set(draft_tokens.tolist()))
        if left_out:
            raise InvalidCheckpoint(
                f"The drafter's d2t leaves out the target's stop token {left_out[0]}: expected every stop "
                "token in the "
                "draft vocabulary; train the drafter again."
            )


def write_checkpoint(folder: str | Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write `folder` in the released form, whole or not at all; dtypes are kept, other files in it are kept
    too.

    Raises `InvalidCheckpoint` when tensors and config disagree.
    """
    folder = Path(folder)
    _check_tensors(config, tensors, folder)
    scratch = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        ordered = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
        save_file(ordered, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
        # safetensors makes its file readable by its owner only
        shutil.copymode(scratch / "config.json", scratch / "model.safetensors")
        if not folder.exists():
            scratch.rename(folder)
            return
        # the weights last: until then a reader finds the old pair, or a config that the weights are checked
        # against
        for name in ("config.json", "model.safetensors"):
            (scratch / name).replace(folder / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, "pt") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InvalidCheckpoint(
            f"{file} cannot be read as safetensors ({error}): download the drafter again."
        ) from error


def _bare(name: str) -> str:
    while True:
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        if prefix is None:
            return name
        name = name.removeprefix(prefix)


def _check_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor], folder: Path) -> None:
    shapes = expected_shapes(config)
    missing, unexpected = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing:
        raise InvalidCheckpoint(
            f"Drafter {folder}: tensor {', '.join(missing[:3])} is missing ({len(missing)} of "
            f"{len(shapes)}): expected "
            "every tensor that config.json implies; export the drafter again."
        )
    if unexpected:
        raise InvalidCheckpoint(
            f"Drafter {folder}: tensor {', '.join(unexpected[:3])} is unexpected ({len(unexpected)} in "
            "all): config.json "
            "implies no such tensor; correct it, or export the drafter again."
        )
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise InvalidCheckpoint(
                f"Drafter {folder}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)} "
                "by config.json: "
                "correct it, or export the drafter again."
            )
        dtype = _MAPS.get(name)
        if tensor.dtype != dtype if dtype else not tensor.is_floating_point():
            raise InvalidCheckpoint(
                f"Drafter {folder}: tensor {name} is {tensor.dtype}, expected "
                f"{dtype or 'a floating-point dtype'}: "
                "export the drafter again."
            )
        if tensor.dtype.itemsize < 2 and dtype is None:
            raise UnsupportedModel(
                f"Drafter {folder}: tensor {name} is quantised ({tensor.dtype}), expected bf16 or wider."
            )
    _check_maps(config, tensors, folder)


def _check_maps(config: DrafterConfig, tensors: Mapping[str, Tensor], folder: Path) -> None:
    ids = draft_token_ids(tensors)
    if ids is None:
        return
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or not bool((ids.diff() > 0).all()):
        raise InvalidCheckpoint(
            f"Drafter {folder}: tensor d2t does not give increasing token ids below {config.vocab_size}: "
            "expected offsets "
            "from draft id to token id; export the drafter again."
        )
    if not torch.equal(tensors["t2d"].nonzero()[:, 0], ids):
        raise InvalidCheckpoint(
            f"Drafter {folder}: tensor t2d marks other tokens than d2t lists: export the drafter again."
        )


def _misfit(field: str, drafter: object, target: object) -> InvalidCheckpoint:
    error = InvalidCheckpoint(
        f"The drafter does not fit the target: its {field} is {drafter}, the target has {target}; use a "
        "drafter that "
        "was trained for this target."
    )
    error.field = field
    return error
