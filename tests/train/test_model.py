"""The trainable drafter: released names, no leaks between blocks, the same numbers as when drafting."""

from __future__ import annotations

import pytest
import torch

from dominotree.drafters.checkpoint import expected_shapes
from dominotree.drafters.dflash import Drafter
from dominotree.train.model import DrafterModel
from drafters.synthetic import tiny_config, tiny_tensors
from targets.tiny import tiny_target

CONFIG = tiny_config()


def model(seed: int = 0, **changes: object) -> DrafterModel:
    config = tiny_config(**changes)  # type: ignore[arg-type]
    made = DrafterModel(config)
    made.load_state_dict({n: t for n, t in tiny_tensors(config, seed=seed).items() if n not in ("d2t", "t2d")})
    return made.requires_grad_(False)


@pytest.mark.parametrize("projector", ["domino", None])
@pytest.mark.parametrize("attention_bias", [False, True])
def test_the_state_dict_has_the_released_names_and_shapes(projector: str | None, attention_bias: bool) -> None:
    config = tiny_config(projector=projector, attention_bias=attention_bias)
    state = {name: tuple(tensor.shape) for name, tensor in DrafterModel(config).state_dict().items()}
    assert state == expected_shapes(config)


def run(drafter: DrafterModel, features: torch.Tensor, blocks: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    return drafter(blocks, anchors, drafter.context(features))


def case(anchors: list[int], length: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    features = torch.randn(1, length, 2 * CONFIG.hidden_size, generator=g)
    blocks = torch.randn(1, len(anchors), CONFIG.block_size, CONFIG.hidden_size, generator=g)
    return features, blocks, torch.tensor([anchors])


def test_overlapping_blocks_do_not_see_each_other() -> None:
    drafter = model()
    features, blocks, anchors = case([7, 8, 9, 12])
    together = run(drafter, features, blocks, anchors)
    for i in range(4):
        alone = run(drafter, features, blocks[:, i : i + 1], anchors[:, i : i + 1])
        torch.testing.assert_close(together[:, i], alone[:, 0])
    changed = blocks.clone()
    changed[:, 2] += 1
    after = run(drafter, features, changed, anchors)
    assert torch.equal(after[:, [0, 1, 3]], together[:, [0, 1, 3]])


def test_a_block_sees_features_before_its_anchor_and_none_from_there_on() -> None:
    drafter = model()
    features, blocks, anchors = case([7, 12])
    before = run(drafter, features, blocks, anchors)
    for place, moved in [(6, [True, True]), (7, [False, True]), (11, [False, True]), (12, [False, False])]:
        changed = features.clone()
        changed[:, place] += 1
        after = run(drafter, changed, blocks, anchors)
        assert [not torch.equal(after[:, i], before[:, i]) for i in range(2)] == moved


def test_padding_has_no_effect() -> None:
    drafter = model()
    features, blocks, anchors = case([7, 12])
    padded = torch.cat([features, torch.full((1, 9, features.shape[2]), 3.0)], dim=1)
    torch.testing.assert_close(run(drafter, padded, blocks, anchors), run(drafter, features, blocks, anchors))


def test_every_slot_of_a_block_sees_every_other() -> None:
    drafter = model()
    features, blocks, anchors = case([7])
    before = run(drafter, features, blocks, anchors)
    changed = blocks.clone()
    changed[:, :, -1] += 1
    assert (run(drafter, features, changed, anchors) != before).any(-1).all()


@pytest.mark.parametrize("prefix_len", [0, 1, 2])
def test_the_correction_spares_the_prefix_and_looks_only_back(prefix_len: int) -> None:
    drafter = model(prefix_len=prefix_len)
    g = torch.Generator().manual_seed(0)
    hidden, path = torch.randn(2, 3, 6, 32, generator=g), torch.randn(2, 3, 6, 32, generator=g)
    inner = drafter.correction(hidden, path)
    assert not inner[..., :prefix_len, :].any()
    assert inner[..., prefix_len:, :].all(-1).all()
    later = path.clone()
    later[..., 4, :] += 1
    moved = (drafter.correction(hidden, later) != inner).any(-1)
    assert not moved[..., :4].any()
    assert moved[..., 4:].all()


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_training_and_drafting_compute_the_same_logits(shift_label: bool, draft_vocab: int | None) -> None:
    target = tiny_target("llama")
    config = tiny_config(shift_label=shift_label, draft_vocab=draft_vocab)
    tensors = tiny_tensors(config)
    drafter = Drafter(config, tensors, target)
    cache = drafter.new_cache(1, 32)
    features = torch.randn(11, 2 * config.hidden_size)
    drafter.extend(cache, [0], [11], features)
    draft = drafter.draft(cache, [0], [42])

    trained = DrafterModel(config)
    trained.load_state_dict({n: t for n, t in tensors.items() if n not in ("d2t", "t2d")})
    ids = torch.tensor([42] + [config.mask_token_id] * (config.block_size - 1))
    with torch.inference_mode():
        hidden = trained(target.embed(ids)[None, None], torch.tensor([[11]]), trained.context(features[None]))[0, 0]
    torch.testing.assert_close(draft.hidden[0], hidden, atol=1e-4, rtol=1e-4)
    head = target.head_weight()
    rows = head if drafter.token_ids is None else head[drafter.token_ids]
    torch.testing.assert_close(draft.base[0], hidden @ rows.T, atol=1e-4, rtol=1e-4)
