"""Which targets a drafter can be trained for, and what is read from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

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


def test_a_target_without_decoder_layers_in_their_place_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel without model\.layers"):
        load_target_reader(tmp_path)


def test_a_target_with_a_bias_in_its_head_is_refused(tmp_path: Path) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    PhiForCausalLM(PhiConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="a bias in its head"):
        load_target_reader(tmp_path)


def test_code_in_a_targets_folder_is_never_run(tmp_path: Path) -> None:
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": classes}))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(UnsupportedModel, match="transformers cannot load") as refusal:
        load_target_reader(tmp_path)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "ran").exists()
