"""`dominotree demo`: what `make demo` shows, an everyday question answered with a tree and plainly."""

from __future__ import annotations

from dominotree.cli import common
from dominotree.cli.common import ModelOptions, load_pair, sampling_params, screen
from dominotree.cli.generate import answer

PROMPT = "How do I cook rice so that it does not stick together?"


def demo(
    max_new_tokens: common.ChatTokens = 128,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Answer a question with the default pair, drafting and plainly, and compare the two."""
    sampling = sampling_params(max_new_tokens=max_new_tokens)
    pair, drafting = load_pair(ModelOptions(dtype=dtype, device=device, threads=threads), {})
    screen.write(f"> {PROMPT}\n")
    answer(pair, PROMPT, compare=True, sampling=sampling, **drafting)
