"""What a pass of the target costs: linear layers by kernel, whole passes by rows, and how near memory's limit it is.

    python benchmarks/passes.py --rows 1 6 9 17 --contexts 128 1024 --dtype float32

Linear layers, all of the target's one after another: `ours` (as decoding uses them), `oneDNN` (packed), `plain`
(torch's own). Passes as ratios to one row. The bandwidth is that of summing a gigabyte; a pass of one row reads every
weight once and the cached keys and values. Medians of interleaved repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from dominotree.hub import resolve_target
from dominotree.machine import parse_dtype, set_threads
from dominotree.targets.decoder import DecoderTarget
from dominotree.targets.linear import onednn_works
from dominotree.targets.load import load_target, read_tensors
from dominotree.targets.rows import Segment


def medians(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Milliseconds of each call: medians over repeats that take turns, after one to warm up."""
    spent: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for call, times in zip(calls, spent, strict=True):
            start = time.perf_counter()
            call()
            if repeat:
                times.append(1000 * (time.perf_counter() - start))
    return [statistics.median(times) for times in spent]


def bandwidth(repeats: int) -> float:
    """GB/s of reading memory with all threads."""
    data = torch.ones(2**28)
    (ms,) = medians([data.sum], repeats)
    return data.numel() * 4 / ms / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 9, 17])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    cpu = torch.device("cpu")
    threads, dtype = set_threads(None), parse_dtype(args.dtype, cpu)
    folder = resolve_target("smollm2-135m")
    target = load_target(folder, dtype=dtype, device=cpu)
    assert isinstance(target, DecoderTarget)
    print(f"{dtype}, {threads} threads, ms, medians of {args.repeats} interleaved repeats")

    tensors = read_tensors(folder)
    ours = target._stack.linears()
    names = [name for name, tensor in tensors.items() if tensor.dim() == 2]  # q, k and v apart: a little in our favour
    plain = [tensors[name].to(dtype) for name in names]
    packs = onednn_works(dtype)
    onednn = [torch.ops.mkldnn._reorder_linear_weight(w, 16) for w in plain] if packs else []
    print("linear layers      " + "".join(f"{rows:>8} rows" for rows in args.rows))
    table: dict[str, list[str]] = {"ours": [], "oneDNN": [], "plain": []}
    kinds = [kind for kind in table if packs or kind != "oneDNN"]
    for rows in args.rows:
        inputs = {width: torch.randn(rows, width).to(dtype) for width in {w.shape[1] for w in plain}}

        def run_ours(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for linear in ours:
                linear(inputs[linear.in_features])

        def run_onednn(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight, packed in zip(plain, onednn, strict=True):
                torch.ops.mkldnn._linear_pointwise(inputs[weight.shape[1]], packed, None, "none", [], "")

        def run_plain(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight in plain:
                F.linear(inputs[weight.shape[1]], weight)

        calls = [run_ours, *([run_onednn] if packs else []), run_plain]
        for name, ms in zip(kinds, medians(calls, args.repeats), strict=True):
            table[name].append(f"{ms:13.1f}")
    for name, cells in table.items():
        print(f"  {name:<17}" + ("".join(cells) or "does not do this dtype here"))

    read = bandwidth(args.repeats)
    print(f"memory reads {read:.1f} GB/s")
    cache = target.new_cache(1, max(args.contexts) + max(args.rows) + 64)
    for start in range(0, max(args.contexts), 256):
        chunk = [7] * min(256, max(args.contexts) - start)
        target.forward(cache, [Segment(0, start, chunk)], last_only=True)
    weights = sum(linear.nbytes for linear in ours)
    for context in args.contexts:
        segments = [Segment(0, context, [11] * rows, [max(0, i - 2) for i in range(rows - 1)]) for rows in args.rows]
        spent = medians([lambda s=s: target.forward(cache, [s]) for s in segments], args.repeats)  # type: ignore[misc]
        kept = 2 * cache.keys[:, 0, :, :context].numel() * cache.keys.element_size()
        least = (weights + kept) / read / 1e6
        ratios = ", ".join(f"{rows} rows {ms / spent[0]:.2f}x" for rows, ms in zip(args.rows, spent, strict=True))
        limit = f"{least / spent[0]:.2f} of memory's limit"
        print(f"context {context}: {args.rows[0]} rows {spent[0]:.1f} ms, {ratios}; {limit}")


if __name__ == "__main__":
    main()
