"""vLLM's model as what a drafter borrows from."""

from __future__ import annotations

from typing import Any

import torch

from dominotree.errors import UnsupportedEngine


class ModelLender:
    """Embedding and output matrix of a vLLM model, gathered over its tensor-parallel ranks."""

    def __init__(self, model: Any, config: Any) -> None:
        """`config` is the `VllmConfig`. Raises `UnsupportedEngine` where the model hides its output matrix."""
        from vllm.distributed import tensor_model_parallel_all_gather as gather

        sizes = config.model_config
        self.vocab_size: int = sizes.get_vocab_size()
        self.hidden_size: int = sizes.get_hidden_size()
        self.num_layers: int = sizes.hf_text_config.num_hidden_layers
        stop = sizes.hf_text_config.eos_token_id
        self.eos_token_ids: tuple[int, ...] = tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,)
        self.dtype: torch.dtype = sizes.dtype
        self.device = torch.device(config.device_config.device)
        self._model = model
        weight = getattr(getattr(model, "lm_head", None), "weight", None)
        if weight is None or weight.dim() != 2 or not weight.is_floating_point():
            raise UnsupportedEngine(f"{type(model).__name__} has no plain lm_head.weight, which drafters score with")
        self._head: torch.Tensor = gather(weight.data, dim=0)[: self.vocab_size]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings `[..., hidden]`, scaled as the model scales them."""
        embedded: torch.Tensor = self._model.embed_input_ids(token_ids.flatten())
        return embedded.view(*token_ids.shape, embedded.shape[-1])

    def head_weight(self) -> torch.Tensor:
        """The output embedding `[vocab, hidden]`."""
        return self._head
