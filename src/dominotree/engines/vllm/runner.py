"""vLLM's CPU model runner, verifying trees.

A tree comes back from the scheduler as a list of draft tokens, parents before children; whatever leading part of it was
scheduled is a tree again. Its rows get positions by depth and a mask (`attention.py`), the walk down it uses vLLM's
sampler (`walk.py`), and what was accepted is moved to where a chain would have put it, after which vLLM goes on as if
it had been one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from dominotree.engines.vllm.attention import BlockLayout, TreeRows, adopt
from dominotree.engines.vllm.context import slots_of
from dominotree.engines.vllm.internals import RUNNER_ATTRIBUTES, check_attributes
from dominotree.engines.vllm.proposer import Proposer, Root
from dominotree.engines.vllm.walk import Walk, walk_trees
from dominotree.errors import UnsupportedEngine
from dominotree.lookup import TextLookup
from dominotree.targets.rows import Rows, Segment
from dominotree.tree.tree import Tree


class TreeRunner(CPUModelRunner):  # type: ignore[misc]
    """Overrides the stages of a step that a tree changes; everything else is vLLM's."""

    drafter: Proposer

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        check_attributes(self, RUNNER_ATTRIBUTES)
        self.use_aux_hidden_state_outputs = True
        self._drafted: dict[str, Tree] = {}
        self._walks: list[Walk] = []
        self._tree_rows: list[TreeRows] = []
        self._slots = torch.empty(0, dtype=torch.int64)

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Loads target and drafter; raises `UnsupportedEngine` for attention that takes no trees."""
        super().load_model(load_dummy_weights)
        layers = self.compilation_config.static_forward_context
        self._attention = {name: layer for name, layer in layers.items() if isinstance(layer, AttentionLayerBase)}
        adopt(self._attention)

    def _setup_eagle3_aux_hidden_state_outputs(self) -> None:
        """Has the model return the outputs of the layers that the drafter listens to."""
        if not supports_eagle3(self.model):
            raise UnsupportedEngine(f"{type(self.model).__name__} does not return hidden states of its layers in vLLM")
        self.model.set_aux_hidden_state_layers(tuple(i + 1 for i in self.drafter.drafter.feature_layers))

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Raises `UnsupportedEngine` unless one block table says where everything lies, alike in every layer."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        tables, layers = self.input_batch.block_table.block_tables, list(self._attention.values())
        shapes = {layer.kv_cache.shape for layer in layers}
        if len(tables) != 1 or tables[0].block_size != self.cache_config.block_size or len(shapes) != 1:
            raise UnsupportedEngine(
                f"the KV cache has {len(tables)} block tables and {len(shapes)} shapes; one is expected"
            )
        self._layout = BlockLayout(layers[0])

    # The stages of a step, in order

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self._walks, self._tree_rows = [], []
        logits_row = 0
        for i, (name, end) in enumerate(zip(self.input_batch.req_ids, np.cumsum(num_scheduled_tokens), strict=True)):
            tokens = drafts.get(name, [])
            start = int(end) - 1 - len(tokens)
            walk = Walk(start, logits_row, self._tree_of(name, tokens), self._most_tokens(i, name))
            logits_row += 1 + len(tokens)
            self._walks.append(walk)
            if len(walk.tree):
                self._tree_rows.append(self._place(walk, self._blocks(i)))
        return prepared

    def _tree_of(self, name: str, tokens: list[int]) -> Tree:
        """The tree that draft tokens are the leading part of; none where vLLM made them up itself, as fillers."""
        tree = self._drafted.get(name, Tree())
        return tree.first(len(tokens)) if tree.token[: len(tokens)] == tokens else Tree()

    def _most_tokens(self, i: int, name: str) -> int:
        """Tokens a sequence may take in this step: none before its prompt ends, and up to where `min_tokens` ends,
        since what it forbids is decided once a step."""
        if self.discard_request_mask.np[i]:
            return 0
        request = self.requests[name]
        left: int = request.sampling_params.min_tokens - len(request.output_token_ids)
        return left if left > 0 else self.max_model_len

    def _place(self, walk: Walk, blocks: torch.Tensor) -> TreeRows:
        """Gives a tree's rows their positions, and says what they see."""
        root, tree = int(self.positions[walk.start]), walk.tree
        placed = Rows.of([Segment(0, root, [0, *tree.token], [parent + 1 for parent in tree.parent])])
        rows = slice(walk.start, walk.start + len(placed))
        self.positions[rows] = torch.from_numpy(placed.positions)
        columns = root + len(placed)
        mask = torch.from_numpy(placed.mask(0, 0, len(placed), columns)[0])
        return TreeRows(rows, mask, self._layout.elements(slots_of(blocks, self.cache_config.block_size, columns)))

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        built = super()._build_attention_metadata(*args, **kwargs)
        for metadata in built[0].values():
            metadata.trees = self._tree_rows
        self._tree_rows = []
        return built

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """Runs the target, then gives the drafter the hidden states of every row."""
        output = super().execute_model(scheduler_output, intermediate_tensors)
        state = self.execute_model_state
        if state is not None:
            rows = scheduler_output.total_num_scheduled_tokens
            self._slots = next(iter(state.slot_mappings.values()))[:rows].clone()
            features = torch.cat([hidden[:rows] for hidden in state.aux_hidden_states], dim=-1)
            self.drafter.context.write(self._slots, self.positions[:rows], features)
        return output

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        output = walk_trees(self.sampler, logits, self.input_batch.sampling_metadata, self._walks)
        self._keep_accepted()
        return output

    def _keep_accepted(self) -> None:
        """Moves what was accepted to right behind the roots: keys, values and the drafter's context."""
        moved = [
            (walk.start + 1 + i, walk.start + 1 + node)
            for walk in self._walks
            for i, node in enumerate(walk.nodes)
            if i != node
        ]
        if moved:
            to, source = (self._slots[list(rows)] for rows in zip(*moved, strict=True))
            self.drafter.context.move(to, source)
            to, source = self._layout.elements(to), self._layout.elements(source)
            for layer in self._attention.values():
                cache = layer.kv_cache.view(-1)
                cache[to] = cache[source]  # all read before any is written

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        self.input_batch.generators = {}  # vLLM takes back what they drew for unfinished prompts; here that is nothing
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return common_attn_metadata is not None  # every tree is kept within its own sequence's bounds

    def propose_draft_token_ids(self, scheduler_output: Any, sampled_token_ids: Any, *_: Any) -> list[list[int]]:
        """Trees for the sequences that go on, each as the list of its tokens."""
        names = self.input_batch.req_ids
        roots = {
            name: root
            for i, (name, sampled) in enumerate(zip(names, sampled_token_ids, strict=True))
            if sampled and (root := self._root(i, name, sampled[-1])).max_depth > 0
        }
        trees = dict(zip(roots, self.drafter.trees(list(roots.values())), strict=True))
        waiting = {name: tree for name, tree in self._drafted.items() if name in self.requests}
        self._drafted = {**waiting, **trees}
        return [trees[name].token if name in trees else [] for name in names]

    def _root(self, i: int, name: str, token: int) -> Root:
        """Where sequence i stands; a token comes for free in the next step, and nothing may pass the limits."""
        known = int(self.input_batch.num_tokens_no_spec[i])
        request = self.requests[name]
        params = request.sampling_params
        left = min((params.max_tokens or known) - len(request.output_token_ids), self.max_model_len - known)
        tokens = [*self.input_batch.token_ids_cpu[i, : known - 1].tolist(), token]
        chain = params.structured_outputs is not None
        return Root(tokens, self._blocks(i), left - 1, chain, _lookup_of(request))

    def _blocks(self, i: int) -> torch.Tensor:
        """Block numbers of sequence i, in order, fillers behind them."""
        blocks: torch.Tensor = self.input_batch.block_table[0].get_device_tensor(i + 1)[i]
        return blocks


def _lookup_of(request: Any) -> TextLookup:
    """A request's own, kept with what vLLM knows of it, and as long."""
    if not hasattr(request, "dominotree_lookup"):
        request.dominotree_lookup = TextLookup()
    lookup: TextLookup = request.dominotree_lookup
    return lookup
