"""A target's fingerprint says which weights it holds, however they are stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from dominotree.errors import ModelNotFound
from dominotree.targets.fingerprint import fingerprint, levels_per_block
from targets.tiny import tiny_model


def save(folder: Path, change: Callable[[PreTrainedModel], object] = lambda model: None, **options: object) -> Path:
    model = tiny_model().to(torch.bfloat16)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder, **options)
    return folder


def quantise(model: PreTrainedModel) -> None:
    """Every matrix of the decoder in 16 levels a block of 32, as 4-bit formats do."""
    for layer in model.model.layers:
        for weight in layer.parameters():
            if weight.dim() == 2:
                blocks = weight.float().reshape(-1, 32)
                low, step = (
                    blocks.amin(1, keepdim=True),
                    (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15,
                )
                weight.copy_((((blocks - low) / step).round() * step + low).view_as(weight))


def test_it_is_the_same_for_other_shards_and_a_wider_dtype(tmp_path: Path) -> None:
    one = fingerprint(save(tmp_path / "one"))
    assert one == fingerprint(save(tmp_path / "shards", max_shard_size="10KB"))
    assert (tmp_path / "shards/model.safetensors.index.json").exists()
    assert one == fingerprint(save(tmp_path / "wide", lambda model: model.float()))


@pytest.mark.parametrize(
    "change",
    [
        quantise,
        lambda model: model.model.layers[2].self_attn.q_proj.weight.add_(0.01),
        lambda model: model.model.embed_tokens.weight.mul_(1.01),
        lambda model: model.model.norm.weight.mul_(1.1),
    ],
)
def test_it_is_another_for_weights_that_were_quantised_or_trained_further(
    tmp_path: Path, change: Callable[[PreTrainedModel], object]
) -> None:
    assert fingerprint(save(tmp_path / "one")) != fingerprint(save(tmp_path / "other", change))


def test_weights_that_were_once_in_4_bits_take_few_values_a_block(tmp_path: Path) -> None:
    assert levels_per_block(save(tmp_path / "one")) > 24
    assert levels_per_block(save(tmp_path / "other", quantise)) <= 16


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, max_shard_size="10KB")
    gone = sorted(folder.glob("*.safetensors"))[0]
    gone.unlink()
    with pytest.raises(ModelNotFound, match=gone.name):
        fingerprint(folder)
