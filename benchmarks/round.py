"""Where a round goes: milliseconds per stage, and the share outside model forwards (build, commit, the rest).

python benchmarks/round.py --budget 16 --tokens 128
"""

from __future__ import annotations

import argparse
import statistics

import torch

import dominotree as dt

PROMPTS = [
    "Explain the difference between weather and climate to a ten-year-old.",
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "A shirt costs 40 after a discount of 20 percent. What did it cost before?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--method", default="dominotree")
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    pair = dt.load(dtype=args.dtype)
    options = {"method": args.method, "budget": args.budget, "max_new_tokens": args.tokens, "ignore_eos": True}
    pair.generate(PROMPTS[0], **options)
    rows = []
    for _ in range(args.repeats):
        for prompt in PROMPTS:
            stats = pair.generate(prompt, **options).stats
            whole = 1000 * stats.decode_s / stats.rounds
            rows.append({"round": whole, **{name: ms / stats.rounds for name, ms in stats.stage_ms.items()}})
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    outside = statistics.median(1 - (row["draft"] + row["verify"]) / row["round"] for row in rows)
    print(
        f"{args.method} n={args.budget}, {pair.target.dtype}, threads {torch.get_num_threads()}, "
        f"medians of {len(rows)} answers"
    )
    print("  ".join(f"{name} {ms:.2f} ms" for name, ms in median.items()))
    print(f"outside model forwards: {100 * outside:.1f}% of a round")


if __name__ == "__main__":
    main()
