"""Plain decoding, ours against transformers' own `generate`, on the default target: tokens/s in interleaved pairs.

python benchmarks/ar_vs_transformers.py --dtype bfloat16 --tokens 128 --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

import dominotree as dt
from dominotree.hub import resolve_target
from dominotree.machine import DTYPES

PROMPT = "Explain the difference between weather and climate to a ten-year-old."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    pair = dt.load(dtype=args.dtype, drafter="none")
    model = AutoModelForCausalLM.from_pretrained(resolve_target("smollm2-135m"), dtype=DTYPES[args.dtype]).eval()
    ids = pair.prompt_ids(PROMPT)
    inputs = torch.tensor([ids])

    def theirs() -> float:
        def run(tokens: int) -> float:
            start = time.perf_counter()
            with torch.inference_mode():
                model.generate(
                    inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=tokens,
                    min_new_tokens=tokens, pad_token_id=0,
                )  # fmt: skip
            return time.perf_counter() - start

        return (args.tokens - 1) / (run(args.tokens) - run(1))  # prefill left out, as in our own figure

    def ours() -> float:
        stats = pair.generate(ids, method="ar", max_new_tokens=args.tokens, ignore_eos=True).stats
        return (stats.new_tokens - 1) / stats.decode_s

    theirs(), ours()
    pairs = [(ours(), theirs()) for _ in range(args.repeats)]
    print(f"threads {torch.get_num_threads()}, {args.dtype}, {args.tokens} tokens, medians of {args.repeats} pairs")
    print(f"dominotree ar          {statistics.median(a for a, _ in pairs):7.1f} tokens/s")
    print(f"transformers generate  {statistics.median(b for _, b in pairs):7.1f} tokens/s")
    print(f"ratio                  {statistics.median(a / b for a, b in pairs):7.2f}")


if __name__ == "__main__":
    main()
