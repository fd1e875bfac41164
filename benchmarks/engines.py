"""Ours against other programs on the default target: decoded tokens/s, all contenders in turn on every prompt.

    python benchmarks/engines.py --dtype bfloat16 --ours ar dominotree:8 --tokens 128

transformers runs its plain `generate` and its prompt lookup (10 tokens). With `pip install llama-cpp-python` and
`--gguf FILE`, the target converted to GGUF in the same dtype, llama.cpp joins. All decode greedily, as many tokens
whatever the end token says; encoding the prompt is left out. Medians over the prompts of the built-in sets; ratios are
medians over pairs of one prompt.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import dominotree as dt
from dominotree.bench.datasets import load_sets
from dominotree.hub import resolve_target
from dominotree.machine import DTYPES, set_threads

Contender = Callable[[list[int], int], float]
"""(prompt, tokens to decode) -> tokens/s."""


def ours(pair: dt.Pair, spec: str) -> Contender:
    """A method of ours, `METHOD` or `METHOD:BUDGET`."""
    method, _, budget = spec.partition(":")

    def run(ids: list[int], tokens: int) -> float:
        options = {"budget": int(budget)} if budget else {}
        stats = pair.generate(ids, method=method, max_new_tokens=tokens, ignore_eos=True, **options).stats
        return (stats.new_tokens - 1) / stats.decode_s

    return run


def transformers(model: torch.nn.Module, **options: object) -> Contender:
    """`generate` of transformers; the time of a single token, most of it the prompt's, is taken off."""

    def run(ids: list[int], tokens: int) -> float:
        inputs = torch.tensor([ids])

        def seconds(count: int) -> float:
            start = time.perf_counter()
            with torch.inference_mode():
                model.generate(  # type: ignore[operator]
                    inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=count,
                    min_new_tokens=count, pad_token_id=0, **options,
                )  # fmt: skip
            return time.perf_counter() - start

        return (tokens - 1) / (seconds(tokens) - seconds(1))

    return run


def llama_cpp(gguf: Path, threads: int) -> Contender:
    """llama.cpp through its Python binding."""
    from llama_cpp import Llama

    model = Llama(str(gguf), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(ids: list[int], tokens: int) -> float:
        model.reset()
        stream = model.generate(ids, temp=0.0, repeat_penalty=1.0)
        next(stream)
        start = time.perf_counter()
        for _ in range(tokens - 1):
            next(stream)
        return (tokens - 1) / (time.perf_counter() - start)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=[name for name in DTYPES if name != "int8"])
    parser.add_argument("--ours", nargs="+", default=["ar", "dominotree"], help="METHOD or METHOD:BUDGET")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=3, help="prompts of each built-in set")
    parser.add_argument("--gguf", type=Path)
    args = parser.parse_args()
    threads = set_threads(None)
    pair = dt.load(dtype=args.dtype)
    model = AutoModelForCausalLM.from_pretrained(resolve_target("smollm2-135m"), dtype=DTYPES[args.dtype]).eval()
    contenders: dict[str, Contender] = {
        "transformers generate": transformers(model),
        "transformers prompt lookup": transformers(model, prompt_lookup_num_tokens=10),
    }
    if args.gguf:
        contenders["llama.cpp"] = llama_cpp(args.gguf, threads)
    contenders |= {f"dominotree {spec}": ours(pair, spec) for spec in args.ours}

    prompts = [pair.prompt_ids(turns[0]) for found in load_sets(limit=args.limit) for turns in found.samples]
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run(prompts[0], 16)
    for ids in prompts:
        for name, run in contenders.items():
            speeds[name].append(run(ids, args.tokens))
    print(f"{args.dtype}, {threads} threads, {args.tokens} tokens, {len(prompts)} prompts, medians")
    first = next(iter(speeds.values()))
    for name, found in speeds.items():
        ratio = statistics.median(b / a for a, b in zip(first, found, strict=True))
        print(f"{name:<28} {statistics.median(found):7.1f} tokens/s  {ratio:5.2f}x")


if __name__ == "__main__":
    main()
