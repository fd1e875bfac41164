"""The head against PyTorch's own modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tree"))

from dominotree.drafters.domino import DominoHead
from dominotree.errors import InvalidCheckpoint
from tree.tabulated import random_head


def modules(tensors: dict[str, torch.Tensor]) -> tuple[torch.nn.GRU, torch.nn.Sequential]:
    """The same weights as `torch.nn.GRU` and `Linear, SiLU, Linear`."""
    size = tensors["prefix_gru.weight_hh_l0"].shape[1]
    gru = torch.nn.GRU(tensors["prefix_gru.weight_ih_l0"].shape[1], size, bias=False, batch_first=True)
    layers = [torch.nn.Linear(*tensors[f"embed_proj.{i}.weight"].shape[::-1], bias=False) for i in (0, 2)]
    projection = torch.nn.Sequential(layers[0], torch.nn.SiLU(), layers[1])
    gru.load_state_dict({n.removeprefix("prefix_gru."): t for n, t in tensors.items() if "gru" in n})
    projection.load_state_dict({n.removeprefix("embed_proj."): t for n, t in tensors.items() if "proj" in n})
    return gru, projection


@pytest.mark.parametrize("offsets", [False, True])
@torch.no_grad()
def test_states_and_corrections_equal_those_of_torch_modules(offsets):
    head, tensors, embedding = random_head(offsets=offsets)
    gru, projection = modules(tensors)
    draft = torch.tensor([[3, 50, 89], [7, 7, 0]])
    roots, path = torch.tensor([5, 60]), head.target_ids(draft)
    states, _ = gru(embedding[torch.cat([roots[:, None], path], 1)])

    state = head.initial_state(roots)
    packed = head.pack(state)
    torch.testing.assert_close(state, states[:, 0])
    for i in range(3):
        state, packed = head.advance(state, path[:, i]), head.step(packed, draft[:, i])
        torch.testing.assert_close(state, states[:, i + 1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed[..., -head.state_size :], state, atol=1e-5, rtol=1e-5)

    h = torch.randn(2, 24)
    expected = projection(torch.cat([h, state], -1))
    part = head.hidden_part(h)
    torch.testing.assert_close(head.correction(part, state), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(head.full_correction(head.inner(part, packed)), expected, atol=1e-5, rtol=1e-4)
    some = torch.tensor([[4, 1], [88, 89]])
    torch.testing.assert_close(head.correction(part, state, some), expected.gather(1, some), atol=1e-5, rtol=1e-4)


def test_the_draft_vocabulary_maps_by_offsets():
    head, tensors, _ = random_head(offsets=True)
    ids = torch.arange(90)
    assert torch.equal(head.target_ids(ids), ids + tensors["d2t"])
    assert torch.equal(random_head()[0].target_ids(ids), ids)


def test_the_input_table_changes_nothing(monkeypatch):
    with_table = random_head(offsets=True)[0]
    monkeypatch.setattr("dominotree.drafters.domino.TABLE_BYTES", 0)
    without = random_head(offsets=True)[0]
    packed, ids = with_table.pack(with_table.initial_state(torch.tensor([1, 2]))), torch.tensor([8, 30])
    torch.testing.assert_close(with_table.step(packed, ids), without.step(packed, ids), atol=1e-5, rtol=1e-5)


def test_bf16_weights_are_computed_with_in_fp32():
    _, tensors, embedding = random_head()
    half = {name: t.bfloat16() for name, t in tensors.items()}
    full = {name: t.float() for name, t in half.items()}
    heads = [DominoHead.from_tensors(t, lambda ids: embedding[ids], prefix_len=0) for t in (half, full)]
    states = [head.initial_state(torch.tensor([4])) for head in heads]
    assert torch.equal(*states)
    assert states[0].dtype == torch.float32
    assert torch.equal(*(head.correction(torch.ones(1, 8), states[0]) for head in heads))


def test_names_may_carry_the_released_prefixes():
    head, tensors, embedding = random_head()
    prefixed = {f"logit_head.{name}": t for name, t in tensors.items()} | {"model.fc.weight": torch.zeros(1)}
    other = DominoHead.from_tensors(prefixed, lambda ids: embedding[ids], prefix_len=1)
    roots = torch.tensor([3])
    assert torch.equal(head.initial_state(roots), other.initial_state(roots))


def test_a_misfit_is_named():
    _, tensors, embedding = random_head(offsets=True)

    def load(**changed: torch.Tensor) -> DominoHead:
        return DominoHead.from_tensors({**tensors, **changed}, lambda ids: embedding[ids], prefix_len=0)

    with pytest.raises(InvalidCheckpoint, match=r"embed_proj\.0\.weight"):
        load(**{"embed_proj.0.weight": torch.zeros(8, 7)})
    with pytest.raises(InvalidCheckpoint, match="d2t"):
        load(d2t=torch.zeros(3, dtype=torch.int64))
    del tensors["prefix_gru.weight_hh_l0"]
    with pytest.raises(InvalidCheckpoint, match=r"prefix_gru\.weight_hh_l0"):
        load()
