"""Layers run in one call give the bits that they give one by one."""

from __future__ import annotations

import pytest
import torch

from dominotree import native
from dominotree.targets.rows import Segment
from targets.tiny import tiny_target

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no C kernels here: {native.reason()}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["llama", "llama-mha-wide-heads", "qwen2-three-groups", "qwen3", "llama-bias"])
def test_one_call_gives_the_bits_of_layer_by_layer(variant: str, dtype: torch.dtype) -> None:
    target = tiny_target(variant, dtype=dtype)
    if not target._stack.layers[0].qkv.kernel:
        pytest.skip("this processor multiplies bf16 itself, so linear layers go through oneDNN")
    found = []
    for together in (True, False):
        if not together:
            target._stack._native = None
        cache = target.new_cache(2, 64)
        target.forward(cache, [Segment(0, 0, [5, 6, 7]), Segment(1, 0, [9, 8])])
        segments = [Segment(0, 3, [4, 3, 2, 1], [0, 0, 1]), Segment(1, 2, [6])]
        found.append(target.forward(cache, segments, feature_layers=[0, target.num_layers - 1]))
    assert torch.equal(found[0].logits, found[1].logits)
    assert found[0].features is not None and found[1].features is not None
    assert torch.equal(found[0].features, found[1].features)
