"""How near a simulated machine comes to a real one: tokens a second of both, for clients that ask one after another.

python benchmarks/plan.py --clients 1,4,16 --budget 0,16

One thread, and processor time in place of time, so that other work on the machine counts for little. The real side is
the engine's decoder with its sharing of rows, without HTTP.
"""

from __future__ import annotations

import argparse
import time

import dominotree as dt
from dominotree.adaptive import AdaptiveBudget
from dominotree.bench.datasets import BUILTIN, load_sets
from dominotree.calibration import Calibration
from dominotree.costs import CostModel, measure
from dominotree.decode import Decoder
from dominotree.generation import Request
from dominotree.methods import Drafting
from dominotree.pair import Pair
from dominotree.plan import Acceptance, Fleet, Load, Prompt, simulate
from dominotree.sampling import SamplingParams
from dominotree.serve.sharing import RowShare

time.perf_counter = time.process_time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--budget", default="0,16")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    budgets = [int(text) for text in args.budget.split(",")]
    pair = dt.load(dtype=args.dtype, threads=1, max_batch=args.max_batch)
    assert pair.drafter is not None
    costs = measure(pair.name, pair.target, pair.drafter, contexts=(64, 256), repeats=5)
    turns = [turns[0] for one in load_sets([BUILTIN], limit=2) for turns in one.samples]
    prompts = [pair.prompt_ids(turn) for turn in turns]
    acceptance = record(pair, prompts, sorted({4, *budgets} - {0}), args.tokens)
    print(f"{pair.target.dtype}, {len(prompts)} prompts, {args.requests} requests of {args.tokens} tokens")
    print("clients  budget      real  simulated  difference   (tokens/s)")
    for clients in map(int, args.clients.split(",")):
        for budget in budgets:
            load = Load(clients=clients, requests=args.requests, answer=(args.tokens, args.tokens))
            simulated = simulate(Fleet(costs, acceptance, budget, max_batch=args.max_batch), load).tokens_per_s
            real = measured(pair, costs, prompts, budget, clients, args)
            print(f"{clients:7d} {budget:7d} {real:9.1f} {simulated:10.1f} {100 * (simulated / real - 1):10.1f}%")


def record(pair: Pair, prompts: list[list[int]], budgets: list[int], tokens: int) -> Acceptance:
    """What each prompt's answer commits round by round, at every budget."""
    found, prefill_s = [], 0.0
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    pair.generate(prompts[0], sampling=sampling)  # the first passes are slow
    for prompt in prompts:
        lists = {0: [1]}
        for budget in budgets:
            stats = pair.generate(prompt, budget=budget, sampling=sampling).stats
            lists[budget] = stats.accepted
        prefill_s += stats.prefill_s
        found.append(Prompt(len(prompt), tokens, lists))
    return Acceptance(found, [0, *budgets], 1000 * prefill_s / sum(map(len, prompts)))


def measured(
    pair: Pair, costs: CostModel, prompts: list[list[int]], budget: int, clients: int, args: argparse.Namespace
) -> float:
    """Tokens a second of the decoder, set up as the server's engine does."""
    assert pair.drafter is not None
    decoder = Decoder(
        pair.target,
        pair.drafter if budget else None,
        pair.codec,
        slots=args.max_batch,
        context=512,
        max_nodes=64,
        adaptive=AdaptiveBudget(costs, Calibration.fresh(pair.drafter.draft_length)),
        share=RowShare(64, costs),
    )
    drafting = Drafting("dominotree", budget) if budget else Drafting("ar")
    sampling = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    waiting = [Request(prompts[i % len(prompts)], sampling, drafting) for i in range(args.requests)]
    decoder.run(waiting[:1])
    running, tokens, started = [], 0, time.perf_counter()
    while waiting or running:
        while waiting and len(running) < clients:
            running.append(decoder.add(waiting.pop(0)))
        decoder.step()
        tokens += sum(g.stats.new_tokens for g in running if g.finished)
        running = [g for g in running if not g.finished]
    return tokens / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
