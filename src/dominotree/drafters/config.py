"""What a drafter's config.json says, in the form the released checkpoints have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dominotree.errors import InvalidCheckpoint, ModelNotFound, UnsupportedModel

__all__ = ["DrafterConfig", "evenly_spaced_layers"]

_ARCHITECTURES = {"DFlashDraftModel", "DominoDraftModel"}
_PROJECTORS = {"domino": "domino", "causal_v5": "domino", "dflash": None, "none": None}
_MISSING = object()


def evenly_spaced_layers(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The target layers a drafter listens to when its config names none (DFlash, arXiv 2602.06036).

    As many as the drafter has layers, evenly spaced from 1 to `num_target_layers - 3`, rounded; for one layer
    the middle one.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and conventions of a DFlash or Domino drafter, under the names of the released config.json.

    `projector_type` is `"domino"`, or None for a plain DFlash drafter; `gru_hidden_dim` and `emb_dim` are
    then 0. `target_layer_ids` count the target's decoder layers from 0. `draft_vocab_size` is None where the
    drafter scores the whole vocabulary, else the number of its tokens (this package's extension; `d2t` and
    `t2d` say which). With `context_vocab_size` above 0 the drafter has learned to propose tokens beyond that
    vocabulary where the text before holds them, up to that many (see `drafters.words`). `target_fingerprint` says which
    weights the drafter was trained on (see `targets.fingerprint`); it is no part of a drafter's shape, so configs are
    compared without it. Both are extensions that others can leave out.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    projector_type: str | None = None
    gru_hidden_dim: int = 0
    emb_dim: int = 0
    pure_draft_prefix_len: int = 0
    shift_label: bool = False
    draft_vocab_size: int | None = None
    context_vocab_size: int = 0
    target_fingerprint: str | None = field(default=None, compare=False)

    @property
    def draft_length(self) -> int:
        """K, the number of draft depths: the whole block with `shift_label`, else all but the root's slot."""
        return self.block_size if self.shift_label else self.block_size - 1

    @property
    def is_domino(self) -> bool:
        """Whether the drafter has a correction head."""
        return self.projector_type == "domino"

    @property
    def scored_vocab_size(self) -> int:
        """Rows of the drafter's logits: of the draft vocabulary where there is one, else of the whole."""
        return self.draft_vocab_size or self.vocab_size

    @classmethod
    def from_file(cls, folder: str | Path) -> DrafterConfig:
        """The config in `folder`. Raises `ModelNotFound` without config.json, else as `from_dict`."""
        file = Path(folder) / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelNotFound(
                f"No config.json in {folder}: expected a drafter folder in the released form."
            ) from error
        except (OSError, ValueError) as error:
            raise InvalidCheckpoint(f"{file} cannot be read as JSON ({error}): download the drafter again.") from error
        if not isinstance(raw, dict):
            raise InvalidCheckpoint(
                f"{file} holds a {type(raw).__name__}, expected a JSON object: use a drafter folder."
            )
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Read the released form; keys may be nested in `dflash_config` or stand at the top level.

        Raises `InvalidCheckpoint` naming the field that is missing or makes no sense, and `UnsupportedModel`
        for what is not drafted exactly here: sliding-window layers, scaled rotary positions, unknown
        projectors.
        """
        fields = _Fields(raw)
        _refuse_unsupported(fields)
        projector = _projector(fields)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        layers = fields.integer("num_hidden_layers")
        target_layers = fields.integer("num_target_layers", None)
        config = cls(
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", hidden // heads),
            vocab_size=fields.integer("vocab_size"),
            block_size=fields.integer("block_size"),
            mask_token_id=fields.integer("mask_token_id", low=0),
            target_layer_ids=_layer_ids(fields, target_layers, layers),
            num_target_layers=target_layers,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(fields),
            attention_bias=fields.flag("attention_bias"),
            max_position_embeddings=fields.integer("max_position_embeddings", 32768),
            projector_type=projector,
            gru_hidden_dim=fields.integer("gru_hidden_dim") if projector else 0,
            emb_dim=fields.integer("emb_dim") if projector else 0,
            pure_draft_prefix_len=fields.integer("pure_draft_prefix_len", 0, low=0) if projector else 0,
            shift_label=fields.flag("shift_label"),
            draft_vocab_size=fields.integer("draft_vocab_size", None),
            context_vocab_size=fields.integer("context_vocab_size", 0, low=0),
            target_fingerprint=fields.get("target_fingerprint"),
        )
        config._check()
        return config

    def _check(self) -> None:
        if self.draft_length < 1:
            raise _bad("block_size", self.block_size, "at least 2 without shift_label")
        if self.num_attention_heads % self.num_key_value_heads:
            raise _bad(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"a divisor of {self.num_attention_heads} heads",
            )
        if self.head_dim % 2:
            raise _bad("head_dim", self.head_dim, "an even number, for rotary positions")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise _bad("draft_vocab_size", self.draft_vocab_size, f"at most vocab_size, {self.vocab_size}")
        if self.context_vocab_size and self.draft_vocab_size is None:
            raise _bad(
                "context_vocab_size", self.context_vocab_size, "0 without draft_vocab_size: all is scored already"
            )
        if self.pure_draft_prefix_len > self.draft_length:
            raise _bad(
                "pure_draft_prefix_len",
                self.pure_draft_prefix_len,
                f"at most {self.draft_length} draft depths",
            )

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json in the released form; `from_dict` gives back an equal config."""
        inner: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "shift_label": self.shift_label,
        }
        if self.is_domino:
            inner |= {
                "projector_type": "domino",
                "gru_hidden_dim": self.gru_hidden_dim,
                "emb_dim": self.emb_dim,
                "pure_draft_prefix_len": self.pure_draft_prefix_len,
            }
        outer: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "use_sliding_window": False,
            "dtype": "bfloat16",
            "block_size": self.block_size,
        }
        if self.num_target_layers is not None:
            outer["num_target_layers"] = self.num_target_layers
        if self.draft_vocab_size is not None:
            outer["draft_vocab_size"] = self.draft_vocab_size
        if self.context_vocab_size:
            outer["context_vocab_size"] = self.context_vocab_size
        if self.target_fingerprint is not None:
            outer["target_fingerprint"] = self.target_fingerprint
        return outer | {"dflash_config": inner}


class _Fields:
    """Values of a released config by name, wherever they stand; null counts as absent."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        nested = raw.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raise _bad("dflash_config", nested, "an object")
        self._places = (nested, raw)

    def get(self, name: str, default: Any = None) -> Any:
        return next((place[name] for place in self._places if place.get(name) is not None), default)

    def integer(self, name: str, default: Any = _MISSING, low: int = 1) -> Any:
        value = self.get(name, default)
        if value is _MISSING:
            raise InvalidCheckpoint(
                f"Drafter config: {name} is missing, at the top level and in dflash_config: expected a "
                "drafter's config.json, not a target's."
            )
        if value is default:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise _bad(name, value, f"a whole number of at least {low}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise _bad(name, value, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise _bad(name, value, "true or false")
        return value


def _bad(name: str, value: object, expected: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"Drafter config: {name} is {value!r}, expected {expected}: correct config.json.")


def _refuse_unsupported(fields: _Fields) -> None:
    architectures = fields.get("architectures", [])
    if architectures and not (isinstance(architectures, list) and _ARCHITECTURES & set(architectures)):
        raise UnsupportedModel(
            f"The drafter's architectures are {architectures!r}, expected "
            f"{' or '.join(sorted(_ARCHITECTURES))}: name a DFlash or Domino drafter."
        )
    kinds = fields.get("layer_types", [])
    if not isinstance(kinds, list):
        raise _bad("layer_types", kinds, "a list")
    others = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if others or fields.get("use_sliding_window", False):
        raise UnsupportedModel(
            f"The drafter has {others[0] if others else 'sliding_attention'} layers (layer_types), on which "
            "implementations disagree: expected full_attention alone; use another drafter."
        )
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"The drafter's hidden_act is {activation!r}, expected 'silu': use another drafter.")


def _projector(fields: _Fields) -> str | None:
    name = fields.get("projector_type", "none")
    if name not in _PROJECTORS:
        known = ", ".join(sorted(_PROJECTORS))
        raise UnsupportedModel(
            f"The drafter's projector_type is {name!r}, expected one of {known}: use another drafter."
        )
    return _PROJECTORS[name]


def _layer_ids(fields: _Fields, num_target_layers: int | None, num_draft_layers: int) -> tuple[int, ...]:
    ids = fields.get("target_layer_ids")
    if ids is None:
        if num_target_layers is None:
            raise InvalidCheckpoint(
                "Drafter config: target_layer_ids and num_target_layers are both missing, expected one "
                "of them: correct config.json."
            )
        return evenly_spaced_layers(num_target_layers, num_draft_layers)
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)
    if not whole or not ids:
        raise _bad("target_layer_ids", ids, "a list of layer numbers counted from 0")
    return tuple(ids)


def _rope_theta(fields: _Fields) -> float:
    theta = fields.get("rope_theta")
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name, {})
        if not isinstance(rope, Mapping):
            raise _bad(name, rope, "an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UnsupportedModel(f"The drafter's rope_type is {kind!r}, expected 'default': use another drafter.")
        theta = rope.get("rope_theta", theta)
    if theta is None:
        raise InvalidCheckpoint("Drafter config: rope_theta is missing, also in rope_parameters: correct config.json.")
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or theta <= 0:
        raise _bad("rope_theta", theta, "a positive number")
    return float(theta)
