"""What a drafter borrows of a model in vLLM; needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dominotree.engines.vllm.lender import ModelLender


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 4), (2, 0)])
def test_embeddings_have_the_shape_of_the_ids_even_of_none(shape: tuple[int, ...]) -> None:
    lender = ModelLender.__new__(ModelLender)
    lender._model = SimpleNamespace(embed_input_ids=lambda ids: ids[:, None].expand(-1, 8).float())
    ids = torch.arange(shape[0] * (shape[1] if len(shape) > 1 else 1)).view(shape)
    embedded = lender.embed(ids)
    assert embedded.shape == (*shape, 8)
    assert torch.equal(embedded[..., 0], ids.float())
