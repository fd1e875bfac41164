"""Tiny drafter folders with random weights, for any test that needs a drafter in the released form."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from dominotree.drafters.checkpoint import expected_shapes, write_checkpoint
from dominotree.drafters.config import DrafterConfig


def tiny_config(
    *,
    hidden: int = 32,
    vocab: int = 96,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    block: int = 6,
    shift_label: bool = True,
    prefix_len: int = 1,
    projector: str | None = "domino",
    target_layers: int = 4,
    layer_ids: tuple[int, ...] = (0, 2),
    mask_token: int = 3,
    draft_vocab: int | None = None,
    context_vocab: int = 0,
    attention_bias: bool = False,
) -> DrafterConfig:
    """A config whose drafter has a few thousand parameters."""
    domino = projector is not None
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        block_size=block,
        mask_token_id=mask_token,
        target_layer_ids=layer_ids,
        num_target_layers=target_layers,
        attention_bias=attention_bias,
        projector_type=projector,
        gru_hidden_dim=16 if domino else 0,
        emb_dim=8 if domino else 0,
        pure_draft_prefix_len=prefix_len if domino else 0,
        shift_label=shift_label,
        draft_vocab_size=draft_vocab,
        context_vocab_size=context_vocab,
    )


def tiny_tensors(
    config: DrafterConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    keep: Collection[int] = (0, 1, 2),
) -> dict[str, torch.Tensor]:
    """Random tensors for `config`; the draft vocabulary, where there is one, is `keep` and random others."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if name in ("d2t", "t2d"):
            continue
        values = torch.randn(shape, generator=generator)
        tensors[name] = (1 + 0.1 * values if "norm" in name else values * shape[-1] ** -0.5).to(dtype)
    if config.draft_vocab_size is not None:
        others = [int(i) for i in torch.randperm(config.vocab_size, generator=generator) if int(i) not in keep]
        ids = torch.tensor(sorted([*keep, *others][: config.draft_vocab_size]))
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write_tiny_drafter(
    folder: str | Path,
    *,
    hidden: int = 32,
    vocab: int = 96,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    block: int = 6,
    shift_label: bool = True,
    prefix_len: int = 1,
    projector: str | None = "domino",
    target_layers: int = 4,
    layer_ids: tuple[int, ...] = (0, 2),
    mask_token: int = 3,
    draft_vocab: int | None = None,
    context_vocab: int = 0,
    attention_bias: bool = False,
    keep: Collection[int] = (0, 1, 2),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random drafter into `folder` and return the folder; `keep` are tokens its draft vocabulary must
    hold.
    """
    config = tiny_config(
        hidden=hidden,
        vocab=vocab,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        block=block,
        shift_label=shift_label,
        prefix_len=prefix_len,
        projector=projector,
        target_layers=target_layers,
        layer_ids=layer_ids,
        mask_token=mask_token,
        draft_vocab=draft_vocab,
        context_vocab=context_vocab,
        attention_bias=attention_bias,
    )
    write_checkpoint(folder, config, tiny_tensors(config, seed=seed, dtype=dtype, keep=keep))
    return Path(folder)
