"""Our decoder against transformers, and a row's logits against whatever shares its pass."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from dominotree import native
from dominotree.errors import UnsupportedModel
from dominotree.targets.config import TargetConfig
from dominotree.targets.rows import Segment
from targets.tiny import VARIANTS, tiny_model, tiny_target

KINDS = [None, True, False]


def prompt(length: int, seed: int = 0, vocab: int = 96) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


def random_parents(nodes: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(max(0, i - 4), i + 1) for i in range(nodes)]


def path_to(parents: list[int], row: int) -> list[int]:
    path = []
    while row:
        path.append(row)
        row = parents[row - 1]
    return [0, *reversed(path)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("exact", KINDS)
def test_logits_and_layer_outputs_match_transformers(variant: str, exact: bool | None) -> None:
    model, target = tiny_model(variant), tiny_target(variant, exact=exact)
    ids = prompt(70)
    outputs = {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda _m, _a, out, i=i: outputs.__setitem__(i, out if torch.is_tensor(out) else out[0])
        )
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    cache = target.new_cache(1, 128)
    got = target.forward(cache, [Segment(0, 0, ids)], feature_layers=(0, 3))
    torch.testing.assert_close(got.logits, expected, atol=1e-4, rtol=0)
    assert got.features is not None
    torch.testing.assert_close(got.features, torch.cat([outputs[0][0], outputs[3][0]], -1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("exact", KINDS)
@pytest.mark.parametrize("nodes", [1, 2, 7, 40])
def test_a_tree_equals_each_of_its_paths_run_alone(nodes: int, exact: bool | None) -> None:
    target = tiny_target("qwen3", exact=exact)
    ids, tree, parents = prompt(37), prompt(nodes + 1, seed=1), random_parents(nodes, seed=nodes)
    cache = target.new_cache(2, 128)
    target.forward(cache, [Segment(1, 0, ids)])
    cache.lengths[1] = len(ids)
    got = target.forward(cache, [Segment(1, len(ids), tree, parents)]).logits
    for row in range(nodes + 1):
        path = [tree[i] for i in path_to(parents, row)]
        alone = target.forward(target.new_cache(1, 128), [Segment(0, 0, ids + path)]).logits[-1]
        torch.testing.assert_close(got[row], alone, atol=2e-5, rtol=0)


def bitwise_target(variant: str, dtype: torch.dtype, exact: bool):  # type: ignore[no-untyped-def]
    if not exact and not native.available():
        pytest.skip(native.reason())
    if dtype == torch.int8:
        return tiny_target(variant, dtype=torch.bfloat16, int8=True, max_position_embeddings=1024)
    return tiny_target(variant, dtype=dtype, exact=True if exact else None, max_position_embeddings=1024)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("variant", ["llama", "llama-mha-wide-heads", "qwen2-three-groups", "qwen3", "llama-bias"])
def test_a_rows_logits_have_the_same_bits_whatever_shares_the_pass(variant: str, dtype: torch.dtype) -> None:
    """Decoded one by one, in one prefill, as nodes of trees and beside other sequences: bit for bit."""
    target = bitwise_target(variant, dtype, exact=False)
    ids = prompt(300)
    reference = target.forward(target.new_cache(1, 320), [Segment(0, 0, ids)]).logits

    cache = target.new_cache(3, 400)
    target.forward(cache, [Segment(0, 0, prompt(90, 5))])
    target.forward(cache, [Segment(1, 0, ids[:100])])
    cache.lengths[:] = [90, 100, 0]
    rng = random.Random(7)
    at = 100
    while at < len(ids):
        # A tree whose accepted path is the known continuation, its nodes hidden among random ones.
        depth = min(rng.choice([0, 1, 2, 5]), len(ids) - at - 1)
        nodes = depth + (rng.choice([0, 3, 11]) if depth else 0)
        parents, tokens, path = [], [ids[at]], [0]
        good = sorted(rng.sample(range(1, nodes + 1), depth))
        for row in range(1, nodes + 1):
            if row in good:
                parents.append(path[-1])
                path.append(row)
                tokens.append(ids[at + len(path) - 1])
            else:
                parents.append(rng.randrange(row))
                tokens.append(rng.randrange(96))
        others = [Segment(0, 90, prompt(4, at), [0, 0, 1])] if rng.random() < 0.5 else []
        got = target.forward(cache, [Segment(1, at, tokens, parents), *others]).logits
        for offset, row in enumerate(path):
            assert torch.equal(got[row], reference[at + offset]), (at, offset, nodes)
        cache.commit(1, path)
        at += len(path)
    assert cache.lengths[1] == len(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp64_attention_keeps_a_rows_logits_too(dtype: torch.dtype) -> None:
    target = tiny_target("llama", dtype=dtype, exact=True)
    target._kind = __import__("dominotree.targets.attention", fromlist=["x"]).ExactAttention
    ids, nodes = prompt(60), 12
    tree, parents = prompt(nodes + 1, seed=1), random_parents(nodes, seed=3)
    cache = target.new_cache(1, 128)
    target.forward(cache, [Segment(0, 0, ids)])
    got = target.forward(cache, [Segment(0, len(ids), tree, parents)]).logits
    for row in range(nodes + 1):
        path = [tree[i] for i in path_to(parents, row)]
        alone = target.forward(target.new_cache(1, 128), [Segment(0, 0, ids + path)]).logits[-1]
        assert torch.equal(got[row], alone)


@pytest.mark.parametrize("content", ['{"eos_token', "[1]"])
def test_a_damaged_generation_config_is_one_line(tmp_path: Path, content: str) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UnsupportedModel, match=r"generation_config\.json cannot be read"):
        TargetConfig.read(tmp_path)
