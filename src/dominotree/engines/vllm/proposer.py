"""The proposer that vLLM's speculative config names: drafts for a batch, and in chain mode listens to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dominotree.drafters.dflash import Drafter
from dominotree.drafters.words import ContextWords
from dominotree.engines.vllm.checks import check_config, check_worker
from dominotree.engines.vllm.context import PagedContext
from dominotree.engines.vllm.lender import ModelLender
from dominotree.engines.vllm.settings import Settings
from dominotree.errors import UnsupportedEngine
from dominotree.lookup import TextLookup
from dominotree.methods import grow
from dominotree.pair import load_drafter
from dominotree.tree.join import join
from dominotree.tree.tree import Tree


@dataclass(frozen=True)
class Root:
    """Where a sequence stands: its tokens, the last of which is not encoded yet, its blocks, how deep drafting pays."""

    tokens: Sequence[int]
    blocks: torch.Tensor
    max_depth: int
    chain: bool = False
    """Whether only a chain will do, since the host checks drafts one after another."""
    lookup: TextLookup | None = None
    """What the text is looked up in, by methods that do so; not for chains."""


class Proposer:
    """What `"method": "custom_class", "model": "dominotree.vllm.Proposer"` makes."""

    drafter: Drafter
    context: PagedContext

    def __init__(self, config: Any) -> None:
        """`config` is the `VllmConfig`; raises `UnsupportedEngine` and `InvalidRequest` for what is refused."""
        self.settings = Settings.of(config)
        check_config(config, self.settings)
        check_worker(config, self.settings)
        self._config = config
        self._budget: int = config.speculative_config.num_speculative_tokens
        self._longest: int = config.model_config.max_model_len

    def load_model(self, model: Any) -> None:
        """Loads the drafter for vLLM's loaded model."""
        drafter = load_drafter(self.settings.drafter, ModelLender(model, self._config), None, progress=False)
        assert drafter is not None
        layers = drafter.feature_layers
        if list(layers) != sorted(set(layers)):  # vLLM returns their outputs in order
            raise UnsupportedEngine(
                f"the drafter listens to layers {list(layers)}; increasing ones are expected in vLLM"
            )
        self.drafter = drafter
        self._drafting = self.settings.drafting(drafter, self._budget)
        self._chains = self.settings.drafting(drafter, self._budget, chain=True)
        self.context = PagedContext(drafter, self._config.cache_config.block_size, self._longest)
        if self.settings.mode == "chain":
            self._listener = Listener(model, layers, self.context)

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """Chain mode: draft tokens for every sequence of the step; none for those whose prompt is still encoded."""
        roots: dict[int, Root] = {}
        for row, sampled in enumerate(sampled_token_ids):
            known = int(num_tokens_no_spec[row])
            depth = min(self.drafter.draft_length, self._budget, self._longest - known - 1)
            if sampled and depth > 0:
                tokens = [*token_ids_cpu[row, : known - 1].tolist(), sampled[-1]]
                roots[row] = Root(tokens, self._listener.blocks[row], depth)
        trees = dict(zip(roots, self.trees(list(roots.values())), strict=True))
        return [trees[row].token if row in trees else [] for row in range(len(sampled_token_ids))]

    @torch.inference_mode()
    def trees(self, roots: Sequence[Root]) -> list[Tree]:
        """One tree (or chain) a root; the drafts are made together."""
        if not roots:
            return []
        draft = self.context.draft(
            [root.blocks for root in roots],
            [len(root.tokens) - 1 for root in roots],
            [root.tokens[-1] for root in roots],
            self._texts(roots),
        )
        grown: dict[int, Tree] = {}
        for chain in (False, True):
            members = [i for i, root in enumerate(roots) if root.chain == chain]
            if members:
                part = draft.part(members)
                depths = [min(roots[i].max_depth, self.drafter.draft_length) for i in members]
                batch = grow(self._chains if chain else self._drafting, self.drafter, part, depths)
                grown.update((i, batch.single(row)) for row, i in enumerate(members))
        return [self._joined(grown[i], root) for i, root in enumerate(roots)]

    def _joined(self, tree: Tree, root: Root) -> Tree:
        """The tree with what the text itself says, within the same budget."""
        if not self._drafting.kind.lookup or root.chain or root.lookup is None:
            return tree
        text = root.lookup.propose(root.tokens, min(self._budget, root.max_depth))
        return join(tree, text.tokens, text.chances, self._budget) if text.tokens else tree

    def _texts(self, roots: Sequence[Root]) -> list[ContextWords]:
        """The words of each sequence, for a drafter that uses them."""
        texts = []
        for root in roots:
            text = self.drafter.words()
            if text is not None:
                text.read(root.tokens)
                texts.append(text)
        return texts


class Listener:
    """Hears every step's hidden states through hooks on the model's layers and writes the drafter's context."""

    blocks: torch.Tensor
    """Block table `[sequences, blocks]` of the last step."""

    def __init__(self, model: Any, layers: Sequence[int], context: PagedContext) -> None:
        try:
            modules = [model.model.layers[i] for i in layers]
        except (AttributeError, IndexError, TypeError):
            raise UnsupportedEngine(
                f"{type(model).__name__} does not keep its decoder layers in model.layers"
            ) from None
        self._context = context
        self._features: list[torch.Tensor] = []
        for module in modules:
            module.register_forward_hook(self._on_layer)
        model.register_forward_hook(self._on_model, with_kwargs=True)

    def _on_layer(self, _module: Any, _args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        hidden, residual = output
        self._features.append(hidden + residual)

    def _on_model(self, _module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        from vllm.forward_context import get_forward_context

        features, self._features = torch.cat(self._features, dim=-1), []
        step = get_forward_context()
        if not step.attn_metadata:  # a rehearsal while the engine starts
            return
        metadata = next(iter(step.attn_metadata.values()))
        self.blocks = metadata.block_table
        slots = metadata.slot_mapping
        self._context.write(slots, kwargs["positions"][: len(slots)], features[: len(slots)])
