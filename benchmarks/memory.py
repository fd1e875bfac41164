"""Peak memory of loading and decoding, against what must be held: weights once, and the caches.

    python benchmarks/memory.py --dtype float32 --context 2048

Memory of the process's own (not the mapped weight file's pages, which the system takes back when it needs them), less
what it had before the pair was loaded; the peak is the largest of samples every few milliseconds. Linux only.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import dominotree as dt
from dominotree.machine import DTYPES
from dominotree.targets.decoder import DecoderTarget


def held() -> float:
    """MB of its own that the process holds now."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024 / 1e6


class Peak(threading.Thread):
    """Watches what is held until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.done = 0.0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.003):
            self.most = max(self.most, held())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    before = held()
    watch = Peak()
    watch.start()
    pair = dt.load(dtype=args.dtype, context=args.context, max_batch=1)
    loaded = held()
    output = pair.generate("Why is the sky blue?", max_new_tokens=args.tokens)
    watch.done.set()
    peak = watch.most
    target, drafter = pair.target, pair.drafter
    assert isinstance(target, DecoderTarget) and drafter is not None
    linears = [*target._stack.linears(), *drafter._stack.linears()]
    embedding = target.head_weight().numel() * target.head_weight().element_size()
    decoder = next(iter(pair._decoders.values()))
    caches = [decoder._cache, *([] if decoder._drafts is None else [decoder._drafts])]
    kept = sum(2 * cache.keys.numel() * cache.keys.element_size() for cache in caches)
    need = (sum(linear.nbytes for linear in linears) + embedding + kept) / 1e6
    tokens = output.stats.new_tokens
    print(f"{target.dtype}: {need:.0f} MB of weights and caches (context {pair.context}), {tokens} tokens")
    print(f"before loading {before:.0f} MB; loaded {loaded - before:.0f} MB more, {(loaded - before) / need:.2f}x")
    print(f"peak {peak - before:.0f} MB more, {(peak - before) / need:.2f}x")


if __name__ == "__main__":
    main()
