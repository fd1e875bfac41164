"""The target as training sees it: hidden states to listen to, and the frozen embedding and head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dominotree.errors import UnsupportedModel
from dominotree.machine import parse_dtype

__all__ = ["TargetReader", "load_target_reader"]


@dataclass(frozen=True)
class TargetReader:
    """A frozen target. `embedding` and `head` are `[vocab, hidden]`, in its dtype on its device.

    `sizes` are the fields of its config that a drafter takes over. This class is all that training knows of
    the target: another decoder can stand behind it.
    """

    embedding: Tensor
    head: Tensor
    num_layers: int
    stop_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]
    sizes: dict[str, Any]
    _model: Any

    @torch.inference_mode()
    def read(self, tokens: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Run the target over one sequence, int64 `[length]`.

        Returns the features `[length, len(layer_ids) * hidden]` (outputs of these decoder layers, counted
        from 0, side by side) and the last hidden state after the final norm `[length, hidden]`, on which
        `head` acts.
        """
        outputs: dict[int, Tensor] = {}

        def keep(i: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                outputs[i] = (output[0] if isinstance(output, tuple) else output)[0]

            return hook

        layers = self._model.model.layers
        handles = [layers[i].register_forward_hook(keep(i)) for i in layer_ids]
        try:
            ids = tokens[None].to(self.embedding.device)
            last = self._model.model(ids, use_cache=False).last_hidden_state[0]
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat([outputs[i] for i in layer_ids], dim=-1), last


@torch.inference_mode()
def _embeds_plainly(model: Any) -> bool:
    """Whether the first layer reads rows of the embedding, as a drafter does: not all families multiply by 1."""
    seen: list[Tensor] = []
    ids = torch.tensor([[0, model.config.vocab_size // 2, model.config.vocab_size - 1]], device=model.device)
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    try:
        model.model(ids, use_cache=False)
    finally:
        hook.remove()
    return torch.equal(seen[0][0], model.get_input_embeddings().weight[ids[0]])


def load_target_reader(folder: str | Path, *, device: str = "cpu") -> TargetReader:
    """Load the target in `folder` (Hugging Face form) on `device`: in bf16, in fp32 where bf16 is emulated.

    Raises `UnsupportedModel` for what transformers cannot load by itself, for a decoder that is not built like Llama's,
    and where logits are not simply `head` times the last hidden state.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = parse_dtype("auto", torch.device(device))
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, trust_remote_code=False)
    except Exception as error:  # whatever a model's own code raises
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UnsupportedModel(f"transformers cannot load {folder} ({reason}): name another target.") from error
    model = model.to(device).eval()
    model.requires_grad_(False)
    config = model.config
    for scaled in ("final_logit_softcapping", "logits_scaling", "logit_scale", "embedding_multiplier"):
        if getattr(config, scaled, None):
            raise UnsupportedModel(
                f"The target {folder} has {scaled}, expected plain embedding and head: no drafter can be trained."
            )
    if not hasattr(getattr(model, "model", None), "layers"):
        raise UnsupportedModel(
            f"The target {folder} is a {type(model).__name__} without model.layers, expected a decoder built like "
            "Llama's: no drafter can be trained."
        )
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UnsupportedModel(f"The target {folder} has a bias in its head, expected none: no drafter can be trained.")
    if not _embeds_plainly(model):
        raise UnsupportedModel(
            f"The target {folder} scales or shifts its embeddings, expected its layers to read them as they are: no "
            "drafter can be trained."
        )
    special: set[int] = set()
    if any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        special = set(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False).all_special_ids)
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops] if stops is not None else []
    rope = getattr(config, "rope_parameters", None) or {}
    heads = config.num_attention_heads
    return TargetReader(
        embedding=model.get_input_embeddings().weight,
        head=model.get_output_embeddings().weight,
        num_layers=config.num_hidden_layers,
        stop_token_ids=tuple(stops),
        special_token_ids=tuple(sorted(special | set(stops))),
        sizes={
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
            "rope_theta": rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0),
            "max_position_embeddings": config.max_position_embeddings,
        },
        _model=model,
    )
