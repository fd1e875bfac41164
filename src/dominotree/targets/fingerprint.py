"""Which weights a target folder holds: a drafter fits the weights it was trained on, not a name."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from dominotree.files import weight_files

BLOCK = 32
"""Weights that common 4-bit formats quantise together."""

_BLOCKS_TO_LOOK_AT = 64


def fingerprint(folder: Path) -> str:
    """16 hexadecimal digits of the weights in `folder`: the first row of every tensor, rounded to bf16.

    The same for copies in other shards or wider dtypes; another one as soon as any layer was trained further or
    quantised. The output embedding is left out, since tied ones are sometimes stored and sometimes not.
    """
    digest = hashlib.sha256()
    for name, row in sorted(_first_rows(folder, 1), key=lambda pair: pair[0]):
        if row.is_floating_point() and name != "lm_head.weight":
            digest.update(f"{name} {list(row.shape)}".encode())
            digest.update(row.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def levels_per_block(folder: Path) -> int:
    """How many different values a block of 32 neighbouring weights takes: the median over the decoder's matrices.

    About 31 for weights in bf16; 16 or fewer for weights that were once quantised to 4 bits.
    """
    counts = []
    for name, rows in _first_rows(folder, 4):
        if rows.dim() == 2 and ".layers." in name and rows.is_floating_point() and rows.shape[1] >= BLOCK:
            blocks = rows[:, : rows.shape[1] // BLOCK * BLOCK].reshape(-1, BLOCK)[:_BLOCKS_TO_LOOK_AT]
            counts += [len(block.unique()) for block in blocks.float()]
    return int(statistics.median(counts)) if counts else BLOCK


def _first_rows(folder: Path, count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The first `count` rows of every tensor, as stored; nothing else is read."""
    with ExitStack() as opened:
        for path in weight_files(folder):
            file = opened.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 - not a mapping
                stored = file.get_slice(name)
                if stored.get_shape():
                    yield name, stored[:count]
