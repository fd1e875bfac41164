"""A tiny target, its answers as a corpus, and drafters trained on them in seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dominotree.train.fit import FitSettings, Trainer
from dominotree.train.prepare import DrafterShape, prepare
from targets.tiny import tiny_model

VOCAB = 96
STOP = 1


def write_target(folder: Path, seed: int = 0) -> Path:
    """A random Llama whose greedy answers are regular enough to be learned."""
    model = tiny_model("llama", seed=seed, scale=3.0)
    model.generation_config.eos_token_id = STOP
    model.save_pretrained(folder)
    return folder


def write_corpus(
    folder: Path, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float = 0.0
) -> Path:
    """A corpus of (prompt, answer) token ids."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [token for prompt, answer in sequences for token in [*prompt, *answer]]
    np.array(tokens, dtype="<u2").tofile(folder / "tokens.bin")
    lines = [
        json.dumps([len(prompt), len(answer), f"kind{i % 3}", temperature])
        for i, (prompt, answer) in enumerate(sequences)
    ]
    (folder / "index.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def greedy_corpus(folder: Path, target_folder: Path, count: int = 24, length: int = 40) -> Path:
    """Greedy answers of the target to random prompts of six tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.bfloat16)
    prompts = torch.randint(4, VOCAB, (count, 6), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )
    rows = out.tolist()
    answers = [row[6:] for row in rows]
    answers = [answer[: answer.index(STOP) + 1] if STOP in answer else answer for answer in answers]
    return write_corpus(folder, [(row[:6], answer) for row, answer in zip(rows, answers, strict=True)])


SETTINGS: dict[str, Any] = {
    "steps": 120, "packs": 1, "sequences": 4, "anchors": 12, "muon_lr": 2e-2, "adamw_lr": 1e-2, "warmup": 5,
    "eval_every": 60, "ema": 0.95, "weight_decay": 0.0,
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "layers": 2, "block_size": 4, "gru_hidden_dim": 16, "emb_dim": 8, "draft_vocab_size": 64,
    "target_layer_ids": (1, 2, 3),
}  # fmt: skip


def tiny_trainer(
    target: Path, corpus: Path, out: Path, *, held_out: int = 4, cache: Path | None = None, **changes: Any
) -> Trainer:
    """A trainer in fp32; `changes` go to `FitSettings` or `DrafterShape` by name."""
    shape = {name: value for name, value in changes.items() if name in DrafterShape.__dataclass_fields__}
    rest = {name: value for name, value in changes.items() if name not in shape}
    return prepare(
        target,
        corpus,
        out,
        FitSettings.from_dict({**SETTINGS, **rest}),
        DrafterShape.from_dict({**SHAPE, **shape}),
        bf16=False,
        held_out=held_out,
        cache=cache,
    )
