"""A tiny pair without a fault: a random target that speaks bytes, and a drafter overfitted on what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from cli.conftest import TEMPLATE, VOCAB, byte_tokenizer
from dominotree.doctor.examine import NEW_TOKENS, PROMPTS, _builtin_prompts
from dominotree.pair import load
from targets.tiny import tiny_model
from train.tiny_run import tiny_trainer, write_corpus

MASK = 3
LAYERS = (1, 2)
SCALES = {"norm": 1, "embed": 3, "attn": 1, "mlp": 3}


def write_target(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A random Llama with the byte tokenizer."""
    model = tiny_model("llama", seed=seed, scale=1.0, vocab_size=VOCAB, max_position_embeddings=512, **changes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(next((by for part, by in SCALES.items() if part in name), 1))
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|bos|>", "eos_token": "<|end|>"}')
    return folder


def write_drafter(folder: Path, target: Path, **shape: Any) -> Path:
    """A drafter trained on the target's own answers to the prompts that the doctor asks first."""
    pair = load(target=str(target), drafter="none", dtype="float32")
    prompts = [pair.prompt_ids(text) for text in _builtin_prompts()[:PROMPTS]]
    answers = [o.token_ids for o in pair.generate(prompts, method="ar", max_new_tokens=NEW_TOKENS)]
    corpus = write_corpus(folder / "corpus", list(zip(prompts, answers, strict=True)))
    changes = {"target_layer_ids": LAYERS, "mask_token_id": MASK, "draft_vocab_size": 0, "block_size": 5, **shape}
    trainer = tiny_trainer(target, corpus, folder / "run", held_out=0, **changes)
    trainer.run()
    return folder / "run/drafter"


def broken(folder: Path, source: Path, **settings: Any) -> Path:
    """A copy of a drafter with other settings in its config; None takes one out."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    for name, value in settings.items():
        place = config["dflash_config"] if name in config["dflash_config"] else config
        if value is None:
            del place[name]
        else:
            place[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder
