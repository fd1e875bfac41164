"""Trees of the authors' released reference builder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dominotree.drafters.domino import DominoHead
from dominotree.tree.batched import build
from dominotree.tree.reference import build_reference
from dominotree.tree.scorers import ConditionalScorer, MarginalScorer, Scorer, StaticScorer


def golden_folder() -> Path | None:
    """`golden-trees` in `$DOMINOTREE_SHARED` or in a `shared` folder beside or above the project."""
    places = [Path(os.environ["DOMINOTREE_SHARED"])] if "DOMINOTREE_SHARED" in os.environ else []
    places += [parent / "shared" for parent in Path(__file__).resolve().parents]
    folders = [place / "data" / "golden-trees" for place in places]
    return next((folder for folder in folders if folder.is_dir()), None)


FOLDER = golden_folder()
CASES = sorted(FOLDER.glob("*.npz")) if FOLDER else []
pytestmark = pytest.mark.skipif(not CASES, reason="no shared/data/golden-trees beside the project")


def scorer_of(method: str, case: dict[str, np.ndarray]) -> Scorer:
    tensors = {name: torch.from_numpy(array) for name, array in case.items()}
    weights = {name.removeprefix("head."): t for name, t in tensors.items() if name.startswith("head.")}
    base, width = tensors["base"][None], int(case["candidates"])
    if method == "marginal":
        return MarginalScorer(base, width)
    head = DominoHead.from_tensors(weights, lambda ids: tensors["embed"][ids], prefix_len=int(case["prefix_len"]))
    kind = ConditionalScorer if method == "dominotree" else StaticScorer
    return kind(base, tensors["h"][None], tensors["root"].reshape(1), head, width)


@pytest.mark.parametrize("method", ["dominotree", "marginal", "static"])
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_both_builders_reproduce_the_released_trees(path, method):
    case = dict(np.load(path))
    scorer = scorer_of(method, case)
    budget, node_topk = int(case["budget"]), int(case["node_topk"])
    for trees in (
        build_reference(scorer, budget, node_topk=node_topk),
        build(scorer, budget, node_topk=node_topk),
        build(scorer, budget, node_topk=node_topk, early_stop=False),
    ):
        assert trees.count.tolist() == [len(case[f"{method}.token"])]
        for field in ("token", "parent", "depth"):
            assert getattr(trees, field)[0].tolist() == case[f"{method}.{field}"].tolist(), field
        np.testing.assert_allclose(trees.score[0].numpy(), case[f"{method}.score"], atol=1e-5, rtol=0)
