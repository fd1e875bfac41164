"""The released config.json, wherever its keys stand, read into one form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dominotree.drafters.config import DrafterConfig, evenly_spaced_layers
from dominotree.errors import InvalidCheckpoint, ModelNotFound, UnsupportedModel
from drafters.synthetic import tiny_config

NESTED = ("mask_token_id", "target_layer_ids", "projector_type", "gru_hidden_dim", "emb_dim", "shift_label")


def released(**changes: Any) -> dict[str, Any]:
    """A released config with changed or, given None, removed top-level and nested keys."""
    raw = tiny_config().to_dict()
    for name, value in changes.items():
        place = raw["dflash_config"] if name in raw["dflash_config"] else raw
        if value is None:
            place.pop(name, None)
        else:
            place[name] = value
    return raw


@pytest.mark.parametrize("projector", ["domino", None])
@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_the_released_form_is_written_and_read_back(
    projector: str | None, shift_label: bool, draft_vocab: int | None
) -> None:
    config = tiny_config(projector=projector, shift_label=shift_label, draft_vocab=draft_vocab)
    assert DrafterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_what_it_was_trained_on_is_kept_and_no_part_of_its_shape() -> None:
    raw = released(target_fingerprint="0123456789abcdef")
    config = DrafterConfig.from_dict(raw)
    assert config.target_fingerprint == "0123456789abcdef"
    assert config.to_dict() == raw
    assert config == tiny_config()
    assert "target_fingerprint" not in tiny_config().to_dict()


def test_keys_are_found_at_the_top_level_too() -> None:
    raw = released()
    flat = {**raw, **raw.pop("dflash_config")}
    assert DrafterConfig.from_dict(flat) == tiny_config()


def test_a_nested_key_wins_over_one_at_the_top_level() -> None:
    assert DrafterConfig.from_dict({**released(), "mask_token_id": 9}).mask_token_id == tiny_config().mask_token_id


def test_a_null_nested_key_leaves_the_top_level_one() -> None:
    raw = released()
    raw["dflash_config"]["mask_token_id"] = None
    assert DrafterConfig.from_dict({**raw, "mask_token_id": 9}).mask_token_id == 9


def test_causal_v5_is_domino() -> None:
    assert DrafterConfig.from_dict(released(projector_type="causal_v5")).is_domino


def test_without_a_projector_it_is_a_plain_dflash_drafter() -> None:
    config = DrafterConfig.from_dict(released(projector_type=None))
    assert (config.is_domino, config.gru_hidden_dim, config.emb_dim) == (False, 0, 0)


def test_absent_prefix_and_shift_are_zero_and_false() -> None:
    config = DrafterConfig.from_dict(released(pure_draft_prefix_len=None, shift_label=None))
    assert (config.pure_draft_prefix_len, config.shift_label) == (0, False)
    assert config.draft_length == config.block_size - 1


def test_with_shift_label_every_slot_drafts() -> None:
    assert DrafterConfig.from_dict(released(shift_label=True)).draft_length == tiny_config().block_size


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "expected"),
    [(36, 5, (1, 9, 17, 25, 33)), (30, 1, (15,)), (36, 2, (1, 33)), (30, 4, (1, 10, 18, 27)), (4, 2, (1, 1))],
)
def test_absent_layer_ids_are_evenly_spaced(target_layers: int, draft_layers: int, expected: tuple[int, ...]) -> None:
    assert evenly_spaced_layers(target_layers, draft_layers) == expected
    raw = released(target_layer_ids=None, num_target_layers=target_layers, num_hidden_layers=draft_layers)
    raw["layer_types"] = ["full_attention"] * draft_layers
    assert DrafterConfig.from_dict(raw).target_layer_ids == expected


def test_rope_theta_may_stand_in_rope_parameters() -> None:
    raw = released(rope_theta=None)
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert DrafterConfig.from_dict(raw).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"use_sliding_window": True}, "sliding"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"projector_type": "medusa"}, "medusa"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    ],
)
def test_what_cannot_be_drafted_exactly_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named) as refusal:
        DrafterConfig.from_dict(released(**changes))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", 0),
        ("block_size", 1.5),
        ("mask_token_id", -1),
        ("mask_token_id", True),
        ("target_layer_ids", []),
        ("target_layer_ids", [0, "2"]),
        ("target_layer_ids", 3),
        ("shift_label", "yes"),
        ("rope_theta", -1),
        ("rms_norm_eps", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("draft_vocab_size", 97),
        ("pure_draft_prefix_len", 7),
        ("layer_types", "full_attention"),
    ],
)
def test_a_senseless_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidCheckpoint, match=field) as refusal:
        DrafterConfig.from_dict(released(**{field: value}))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "field", ["hidden_size", "block_size", "mask_token_id", "gru_hidden_dim", "emb_dim", "rope_theta"]
)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=field):
        DrafterConfig.from_dict(released(**{field: None}))


def test_a_block_of_one_needs_shift_label() -> None:
    with pytest.raises(InvalidCheckpoint, match="block_size"):
        DrafterConfig.from_dict(released(block_size=1, shift_label=False))


def test_a_folder_without_config_is_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        DrafterConfig.from_file(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '"a"'])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidCheckpoint, match="JSON"):
        DrafterConfig.from_file(tmp_path)
