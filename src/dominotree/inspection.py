"""What a checkpoint is, read from its config and the headers of its weights, and what here can run it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from dominotree import hub
from dominotree.drafters.checkpoint import read_checkpoint
from dominotree.drafters.config import DrafterConfig
from dominotree.errors import DominoTreeError, ModelNotFound, UnsupportedModel
from dominotree.files import weight_files
from dominotree.methods import METHODS
from dominotree.targets.config import TargetConfig
from dominotree.targets.fingerprint import fingerprint, levels_per_block
from dominotree.text import TextCodec

_DRAFTER_FIELDS = ("dflash_config", "mask_token_id", "projector_type")
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def inspect(name: str) -> dict[str, Any]:
    """Describes a folder, hub id, named pair or named drafter, as a JSON object.

    Its `kind` is "target", "drafter" or "pair"; a pair holds the other two. `refusal` says why something cannot be
    run here, None where it can. A hub's weights are not fetched for this: without them `weights` is None. Raises
    `ModelNotFound` where the name leads nowhere.
    """
    if name in hub.PAIRS and not (Path(name) / "config.json").is_file():
        return _pair(name)
    try:
        folder = hub.resolve_drafter(name, weights=False)
    except UnsupportedModel as error:
        return {"kind": "checkpoint", "name": name, "refusal": str(error)}
    return _described(name, folder)


def _pair(name: str) -> dict[str, Any]:
    pair = hub.PAIRS[name]
    target = _part(name, pair.target, is_target=True)
    drafters = [_part(f"{name}-domino", pair.drafter), _part(f"{name}-dflash", pair.dflash_drafter)]
    for drafter in drafters:
        if drafter is not None and target is not None and "mask_token_id" in drafter and "folder" in target:
            codec = TextCodec.from_folder(Path(target["folder"]))
            drafter["mask_token"] = codec.tokenizer.id_to_token(drafter["mask_token_id"])
    return {
        "kind": "pair",
        "name": name,
        "note": pair.note,
        "target": target,
        "drafter": drafters[0],
        "dflash_drafter": drafters[1],
    }


def _part(name: str, source: str | None, *, is_target: bool = False) -> dict[str, Any] | None:
    """A part of a named pair; None where none was published, `missing` in it where it is not here."""
    if source is None:
        return None
    try:
        find = hub.resolve_target if is_target else hub.resolve_drafter
        return {"source": source, **_described(name, find(name, weights=False))}
    except ModelNotFound as error:
        return {"kind": "target" if is_target else "drafter", "name": name, "source": source, "missing": str(error)}


def _described(name: str, folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"a JSON {type(config).__name__}")
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"{folder / 'config.json'} cannot be read ({error}); a checkpoint's JSON object is expected"
        ) from error
    describe = _drafter if any(field in config for field in _DRAFTER_FIELDS) else _target
    return {
        "kind": describe.__name__.removeprefix("_"),
        "name": name,
        "folder": str(folder),
        **describe(folder, config),
        "weights": _weights(folder),
    }


# Targets


def _target(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    ours = _own_refusal(folder)
    theirs = None if ours is None else _refusal_by_transformers(folder)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads = config.get("num_attention_heads")
    return {
        "family": config.get("model_type"),
        "architecture": next(iter(config.get("architectures") or ()), None),
        "made_from": _provenance(folder),
        "layers": config.get("num_hidden_layers"),
        "hidden_size": config.get("hidden_size"),
        "intermediate_size": config.get("intermediate_size"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or (config.get("hidden_size", 0) // heads if heads else None),
        "vocab_size": config.get("vocab_size"),
        "max_positions": config.get("max_position_embeddings"),
        "rope_type": rope.get("rope_type", rope.get("type", "default")),
        "rope_theta": rope.get("rope_theta", config.get("rope_theta")),
        "tied_embeddings": config.get("tie_word_embeddings"),
        **_text(folder),
        "fingerprint": fingerprint(folder) if _has_weights(folder) else None,
        "levels_per_block": levels_per_block(folder) if _has_weights(folder) else None,
        "runs_in": None if theirs is not None else "transformers" if ours is not None else "our own decoder",
        "our_own_decoder": ours,
        "refusal": None if theirs is None else f"{ours}; {theirs}",
    }


def _own_refusal(folder: Path) -> str | None:
    """Why our own decoder does not run the model; None where it does."""
    try:
        TargetConfig.read(folder)
    except UnsupportedModel as error:
        return str(error)
    return None


def _refusal_by_transformers(folder: Path) -> str | None:
    """Why transformers cannot run the model exactly either; the model is built without weights to find out."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from dominotree.targets.transformers import limits, positions, refusal

    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
        reason = refusal(model)
        if reason is not None:
            return reason
        config = model.config.get_text_config(decoder=True)
        bounds = [(tokens, why) for tokens, why in limits(config) if tokens < positions(config)]
        return f"{bounds[0][1]}; use a context of at most {bounds[0][0]}" if bounds else None
    except Exception as error:  # whatever a model's own code raises
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"transformers does not know it either ({lines[0]})"


def _provenance(folder: Path) -> str | None:
    """What a folder that this package made was made from."""
    try:
        told = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
        return f"{told['source']}, {told['weights']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _text(folder: Path) -> dict[str, Any]:
    """What the tokenizer says; None where there is none."""
    try:
        codec = TextCodec.from_folder(folder)
    except ModelNotFound:
        return {"tokenizer_size": None, "chat_template": None}
    return {"tokenizer_size": codec.vocab_size, "chat_template": codec.template is not None}


# Drafters


def _drafter(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter, all of its tensors accounted for; where it is refused, only why."""
    try:
        config = read_checkpoint(folder)[0] if _has_weights(folder) else DrafterConfig.from_dict(raw)
    except DominoTreeError as error:
        return {"family": None, "methods": [], "refusal": str(error)}
    return {
        "family": "Domino" if config.is_domino else "DFlash",
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
        "draft_length": config.draft_length,
        "shift_label": config.shift_label,
        "mask_token_id": config.mask_token_id,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "context_vocab_size": config.context_vocab_size or None,
        "rope_theta": config.rope_theta,
        "gru_hidden_dim": config.gru_hidden_dim or None,
        "emb_dim": config.emb_dim or None,
        "pure_draft_prefix_len": config.pure_draft_prefix_len if config.is_domino else None,
        "target_fingerprint": config.target_fingerprint,
        "methods": [
            name for name, method in METHODS.items() if method.drafts and (config.is_domino or not method.needs_head)
        ],
        "refusal": None,
    }


# Weights


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _weights(folder: Path) -> dict[str, Any] | None:
    """Parameters, bytes and dtypes as stored, from the files' headers; None where they were not fetched."""
    if not _has_weights(folder):
        return None
    files = weight_files(folder)
    by_dtype: Counter[str] = Counter()
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                stored = file.get_slice(name)
                kind = stored.get_dtype()
                by_dtype[_DTYPES.get(kind, kind.lower())] += math.prod(stored.get_shape())
    return {
        "parameters": sum(count for dtype, count in by_dtype.items() if dtype in _DTYPES.values()),
        "bytes": sum(path.stat().st_size for path in files),
        "files": len(files),
        "dtypes": dict(by_dtype),
    }
