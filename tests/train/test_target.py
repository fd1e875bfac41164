"""Which targets a drafter can be trained for, and what is read from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from dominotree.errors import UnsupportedModel
from dominotree.train.target import load_target_reader

SIZES: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    pad_token_id=0,
)


def test_what_is_read_is_what_the_model_computes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().save_pretrained(tmp_path)
    reader = load_target_reader(tmp_path)
    tokens = torch.arange(5, 25)
    features, last = reader.read(tokens, (0, 2))
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=reader.head.dtype).eval()
    with torch.no_grad():
        out = model(tokens[None], output_hidden_states=True)
    assert features.shape == (20, 64)
    torch.testing.assert_close(features[:, :32], out.hidden_states[1][0])
    torch.testing.assert_close((last @ reader.head.T).float(), out.logits[0].float(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("capping", [30.0, None])
def test_a_target_whose_embedding_or_head_is_not_plain_is_refused(tmp_path: Path, capping: float | None) -> None:
    torch.manual_seed(0)
    Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=capping)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="softcapping" if capping else "scales or shifts its embeddings"):
        load_target_reader(tmp_path)
