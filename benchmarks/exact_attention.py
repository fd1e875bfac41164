"""What the row-invariant forward costs: a verify pass with each kind of attention, over context lengths.

    python benchmarks/exact_attention.py --rows 1 9 17 --contexts 128 512 2048

`native` is the C kernel (row-invariant), `fused` PyTorch's attention (not), `fp64` PyTorch in double precision
(row-invariant, the fallback behind --exact). Medians of interleaved repeats; the ratios are to `fused`.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from dominotree.hub import resolve_target
from dominotree.machine import DTYPES, parse_dtype, set_threads
from dominotree.targets.attention import ExactAttention, NativeAttention, TorchAttention
from dominotree.targets.load import load_target
from dominotree.targets.rows import Segment

KINDS = {"native": NativeAttention, "fused": TorchAttention, "fp64": ExactAttention}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9, 17])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    threads = set_threads(None)
    cpu = torch.device("cpu")
    target = load_target(resolve_target("smollm2-135m"), dtype=parse_dtype(args.dtype, cpu), device=cpu)
    longest = max(args.contexts)
    cache = target.new_cache(1, longest + max(args.rows) + 64)
    for start in range(0, longest, 256):
        target.forward(cache, [Segment(0, start, [7] * min(256, longest - start))], last_only=True)
    print(f"{target.dtype}, {threads} threads, ms a pass, medians of {args.repeats} interleaved repeats")
    print(f"{'context':>8} {'rows':>5} " + " ".join(f"{kind:>8}" for kind in KINDS) + "   native/fused fp64/fused")
    for context in args.contexts:
        for rows in args.rows:
            parents = [max(0, i - 2) for i in range(rows - 1)]
            segment = Segment(0, context, [11] * rows, parents)
            spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for repeat in range(args.repeats + 1):
                for name, kind in KINDS.items():
                    target._kind = kind
                    start_time = time.perf_counter()
                    target.forward(cache, [segment])
                    if repeat:
                        spent[name].append(1000 * (time.perf_counter() - start_time))
            ratios = [
                statistics.median(a / b for a, b in zip(spent[kind], spent["fused"], strict=True))
                for kind in ("native", "fp64")
            ]
            cells = " ".join(f"{statistics.median(ms):8.1f}" for ms in spent.values())
            print(f"{context:>8} {rows:>5} {cells}   {ratios[0]:12.2f} {ratios[1]:10.2f}")


if __name__ == "__main__":
    main()
