"""How near a simulated machine comes to a real server: tokens a second of both, for clients that ask one after another.

dominotree profile
python benchmarks/plan.py --clients 1,4,16 --budget 0,8

The server runs in this process, the clients in another, over HTTP. It needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from serve_load import load, serving

import dominotree as dt
from dominotree.bench.datasets import BUILTIN, load_sets
from dominotree.costs import find_profile
from dominotree.pair import Pair
from dominotree.plan import Acceptance, Fleet, Load, Prompt, simulate
from dominotree.sampling import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--budget", default="0,8")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    budgets, counts = ([int(part) for part in text.split(",")] for text in (args.budget, args.clients))
    pair = dt.load(dtype=args.dtype, max_batch=args.max_batch)
    assert pair.drafter is not None
    costs = find_profile(pair.name, pair.target, pair.drafter)
    if costs is None:
        sys.exit("there is no profile of this pair on this machine: run `dominotree profile` first")
    turns = [turns[0] for one in load_sets([BUILTIN], limit=6) for turns in one.samples]
    acceptance = record(pair, turns, sorted({4, *budgets} - {0}), args.tokens)
    print(f"{pair.target.dtype}, {len(turns)} prompts, {args.requests} requests of {args.tokens} tokens")
    print("clients  budget      real  simulated  difference   (tokens/s)")
    with (
        serving(pair, args.max_batch, max(counts), 1024) as (url, _),
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as elsewhere,
    ):
        for clients in counts:
            for budget in budgets:
                bodies = [body(turns[i % len(turns)], i, budget, args.tokens) for i in range(args.requests)]
                elsewhere.submit(load, url, bodies[: args.max_batch], args.max_batch).result()  # the first are slow
                bodies = [body(turns[i % len(turns)], -i, budget, args.tokens) for i in range(args.requests)]
                samples, seconds = elsewhere.submit(load, url, bodies, clients).result()
                real = sum(sample.tokens for sample in samples) / seconds
                asked = Load(clients=clients, requests=args.requests, answer=(args.tokens, args.tokens))
                simulated = simulate(Fleet(costs, acceptance, budget, max_batch=args.max_batch), asked).tokens_per_s
                difference = 100 * (simulated / real - 1)
                print(f"{clients:7d} {budget:7d} {real:9.1f} {simulated:10.1f} {difference:10.1f}%", flush=True)


def body(turn: str, number: int, budget: int, tokens: int) -> dict[str, Any]:
    """A request; the number keeps the prefix cache out of it, which the simulation does not know."""
    return {
        "messages": [{"role": "system", "content": f"Request {number}."}, {"role": "user", "content": turn}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **({"method": "dominotree", "budget": budget} if budget else {"method": "ar"}),
    }


def record(pair: Pair, turns: list[str], budgets: list[int], tokens: int) -> Acceptance:
    """What each prompt's answer commits round by round, at every budget."""
    found, prefill_s, read = [], 0.0, 0
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    messages = [body(turn, i, 0, tokens)["messages"] for i, turn in enumerate(turns)]
    pair.generate(messages[0], sampling=sampling)  # the first passes are slow
    for each in messages:
        lists = {0: [1]}
        for budget in budgets:
            stats = pair.generate(each, method="dominotree", budget=budget, sampling=sampling).stats
            lists[budget] = stats.accepted
        prefill_s, read = prefill_s + stats.prefill_s, read + stats.prompt_tokens
        found.append(Prompt(stats.prompt_tokens, tokens, lists))
    return Acceptance(found, [0, *budgets], 1000 * prefill_s / read)


if __name__ == "__main__":
    main()
