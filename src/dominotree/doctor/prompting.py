"""How prompts become tokens: the chat template, thinking, the vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dominotree.doctor.findings import Finding
from dominotree.text import TextCodec

THINKING = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<reasoning>", "</reasoning>"))
"""What opens and what closes a stretch of thinking, in the models that have one."""


def template_finding(codec: TextCodec) -> Finding | None:
    """A target without a chat template."""
    if codec.template is not None:
        return None
    return Finding(
        "no-chat-template",
        "warning",
        "the target has no chat template, so prompts are continued as raw text",
        "neither chat_template.jinja nor tokenizer_config.json in the target's folder holds one",
        "put the template the drafter was trained with there; a drafter for a chat model is of little use without it",
    )


def thinking_finding(codec: TextCodec, answers: Sequence[Sequence[int]]) -> Finding | None:
    """A target that thinks aloud although thinking is switched off."""
    opened = ""
    if codec.template is not None:
        prompt = codec.render([{"role": "user", "content": "Hello"}])
        opened = next((start for start, end in THINKING if prompt.rfind(start) > prompt.rfind(end)), "")
    texts = [str(codec.tokenizer.decode(list(answer), skip_special_tokens=False)).lstrip() for answer in answers]
    thought = sum(text.startswith(tuple(start for start, _ in THINKING)) for text in texts)
    if not opened and not thought:
        return None
    known = [f"with enable_thinking false the chat template still ends with {opened}"] if opened else []
    known += [f"{thought} of {len(texts)} answers begin by thinking"] if thought else []
    return Finding(
        "thinking",
        "warning",
        "the target thinks before it answers; drafters are trained without that, and are right far less often with it",
        "; ".join(known),
        "use a chat template that heeds enable_thinking (the package sets it to false), the model's variant that does "
        "not think, or a drafter that was trained on thinking",
        {"template_opens": opened or None, "answers": len(texts), "answers_that_think": thought},
    )


def tokenizer_finding(codec: TextCodec, vocab_size: int) -> Finding | None:
    """A tokenizer with more tokens than the target has embeddings."""
    if codec.vocab_size <= vocab_size:
        return None
    return Finding(
        "vocabulary",
        "error",
        "the tokenizer knows tokens that the target has no embedding for",
        f"the tokenizer has {codec.vocab_size} tokens, the target {vocab_size}",
        "use the tokenizer that came with the target, or the weights that came with the tokenizer",
        {"tokenizer": codec.vocab_size, "target": vocab_size},
    )


def drafter_tokenizer_finding(codec: TextCodec, folder: Path) -> Finding | None:
    """A drafter that brings a tokenizer of its own which is not the target's."""
    if not (folder / "tokenizer.json").is_file():
        return None
    ours = codec.tokenizer.get_vocab(with_added_tokens=True)
    theirs = TextCodec.from_folder(folder).tokenizer.get_vocab(with_added_tokens=True)
    differing = sum(theirs.get(token, number) != number for token, number in ours.items())
    if not differing:
        return None
    return Finding(
        "vocabulary",
        "error",
        "the drafter was made for another vocabulary: its tokenizer numbers tokens otherwise than the target's",
        f"{differing} of {len(ours)} tokens have another number in the tokenizer.json of the drafter's folder",
        "use a drafter that was trained for this target",
        {"differing": differing, "tokens": len(ours)},
    )


def draft_vocabulary_finding(share: float, size: int) -> Finding | None:
    """A draft vocabulary that lacks much of what the target says."""
    if share >= 0.9:
        return None
    return Finding(
        "draft-vocabulary",
        "warning",
        "the draft vocabulary lacks many of the tokens that the target uses; these can hardly be drafted",
        f"{share:.0%} of the answers' tokens are among its {size}",
        "train a drafter with a larger draft vocabulary, or on text like yours",
        {"share": share, "size": size},
    )
