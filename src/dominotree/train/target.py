"""The target as training sees it: hidden states to listen to, and the frozen embedding and head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["TargetReader", "load_target_reader"]


@dataclass(frozen=True)
class TargetReader:
    """A frozen target. `embedding` and `head` are `[vocab, hidden]`; all tensors share `embedding`'s device and dtype.

    This class is all that training knows of the target: another decoder can stand behind it.
    """

    embedding: Tensor
    head: Tensor
    num_layers: int
    stop_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]
    _model: Any

    @torch.inference_mode()
    def read(self, tokens: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Run the target over one sequence, int64 `[length]`.

        Returns the features `[length, len(layer_ids) * hidden]` (outputs of these decoder layers, counted from 0, side
        by side) and the last hidden state after the final norm `[length, hidden]`, on which `head` acts.
        """
        outputs: dict[int, Tensor] = {}

        def keep(i: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                outputs[i] = (output[0] if isinstance(output, tuple) else output)[0]

            return hook

        layers = self._model.model.layers
        handles = [layers[i].register_forward_hook(keep(i)) for i in layer_ids]
        try:
            last = self._model.model(tokens[None].to(self.embedding.device), use_cache=False).last_hidden_state[0]
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat([outputs[i] for i in layer_ids], dim=-1), last


def load_target_reader(folder: str | Path, *, device: str = "cpu") -> TargetReader:
    """Load the target in `folder` (Hugging Face form) in bf16 on `device`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16).to(device).eval()
    model.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops] if stops is not None else []
    return TargetReader(
        embedding=model.get_input_embeddings().weight,
        head=model.get_output_embeddings().weight,
        num_layers=model.config.num_hidden_layers,
        stop_token_ids=tuple(stops),
        special_token_ids=tuple(sorted(set(tokenizer.all_special_ids) | set(stops))),
        _model=model,
    )
