"""The drafter's context in the blocks of another engine's cache."""

from __future__ import annotations

import torch

from dominotree.engines.vllm.context import PagedContext
from oracle import tiny_drafter
from targets.tiny import tiny_target


def test_it_drafts_as_behind_a_cache_of_its_own_and_takes_no_more_room_than_it_needs() -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    paged = PagedContext(drafter, block_size=4, longest=400)
    lengths, width = [37, 5, 120], len(drafter.feature_layers) * target.hidden_size
    features = [torch.randn(n, width, generator=torch.Generator().manual_seed(n)) for n in lengths]
    blocks = [torch.arange(40 * i, 40 * i + 40) for i in range(3)]
    cache = drafter.new_cache(3, 128)
    for slot, (rows, own) in enumerate(zip(features, blocks, strict=True)):
        drafter.extend(cache, [slot], [len(rows)], rows)
        position = torch.arange(len(rows))
        paged.write(own[position // 4] * 4 + position % 4, position, rows)
    expected = drafter.draft(cache, [0, 1, 2], [7, 8, 9])
    sizes = set()
    for count in (1, 2, 3, 2, 3):
        got = paged.draft(blocks[:count], lengths[:count], [7, 8, 9][:count])
        torch.testing.assert_close(got.base, expected.base[:count])
        torch.testing.assert_close(got.hidden, expected.hidden[:count])
        assert paged._room is not None
        sizes.add(paged._room.length)
    assert max(sizes) <= 128 + drafter.config.block_size
