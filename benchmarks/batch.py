"""Throughput of a batch against the same prompts one after another, for plain decoding and for trees.

    python benchmarks/batch.py --prompts 8 --tokens 64 --repeats 5

Ratios of medians over repeats that take turns; the outputs of both must be the same.
"""

from __future__ import annotations

import argparse
import statistics
import time

import dominotree as dt
from dominotree.bench.datasets import load_sets
from dominotree.machine import DTYPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--budgets", type=int, nargs="+", default=[2, 5, 16])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    pair = dt.load(dtype=args.dtype, max_batch=args.prompts, context=1024)
    sets = load_sets(["builtin"], data=None, limit=args.prompts)
    prompts = [turns[0] for group in zip(*(s.samples for s in sets), strict=False) for turns in group][: args.prompts]
    common = {"max_new_tokens": args.tokens, "ignore_eos": True}
    print(
        f"{pair.target.dtype}, {len(prompts)} prompts of {args.tokens} new tokens; tokens/s, medians of {args.repeats}"
    )
    for method, budget in [("ar", None), *(("dominotree", budget) for budget in args.budgets)]:
        together: list[float] = []
        apart: list[float] = []
        for repeat in range(args.repeats + 1):
            start = time.perf_counter()
            batch = pair.generate(prompts, method=method, budget=budget, **common)
            middle = time.perf_counter()
            single = [pair.generate(prompt, method=method, budget=budget, **common) for prompt in prompts]
            end = time.perf_counter()
            assert [out.token_ids for out in batch] == [out.token_ids for out in single]
            if repeat:
                together.append(middle - start)
                apart.append(end - middle)
        tokens = len(prompts) * args.tokens
        a, b = tokens / statistics.median(together), tokens / statistics.median(apart)
        name = method if budget is None else f"{method} n={budget}"
        print(f"{name:<16} batch {a:7.1f}   one by one {b:7.1f}   {a / b:.2f}x")


if __name__ == "__main__":
    main()
