"""Speed inside vLLM: plain, with n-grams, with our chains and our trees, prompt by prompt in turn in one process.

OMP_NUM_THREADS=1 python benchmarks/vllm_engines.py --budget 4,8,16 --clients 1,4 --tokens 64

Needs the environment of `make test-vllm`. tau is the mean number of tokens a pass with a draft yields.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import vllm
from rich.console import Console
from rich.table import Table

import dominotree
from dominotree.hub import resolve_target
from dominotree.text import TextCodec

BUILTIN = Path(dominotree.__file__).parent / "bench" / "builtin"
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="smollm2-135m-domino")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--budget", default="4,8,16", help="nodes of a tree, one engine each")
    parser.add_argument("--methods", default="dominotree,lookuptree", help="of the trees")
    parser.add_argument("--clients", default="1,4", help="requests at a time")
    parser.add_argument("--prompts", type=int, default=2, help="of each built-in set")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)

    folder = resolve_target(args.target)
    codec = TextCodec.from_folder(folder)
    texts = [
        json.loads(line)["turns"][0]
        for file in sorted(BUILTIN.glob("*.jsonl"))
        for line in file.read_text().splitlines()[: args.prompts]
    ]
    prompts = [{"prompt_token_ids": codec.prompt_ids(text)} for text in texts]
    params = vllm.SamplingParams(
        temperature=args.temperature, seed=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False
    )
    budgets = [int(part) for part in args.budget.split(",")]
    kinds: dict[str, Any] = {"plain": {}, "chain": ours("chain", 16, args.drafter)}
    for method in args.methods.split(","):
        kinds |= {f"{method} {budget}": ours("tree", budget, args.drafter, method=method) for budget in budgets}
    kinds["ngram"] = {"speculative_config": NGRAM}  # last: numba comes with it, and then vLLM makes no further engine
    engines = {name: make(folder, args.dtype, arguments) for name, arguments in kinds.items()}

    table = Table("engine", "clients", "tokens/s", "speedup", "tau", "identical", box=None)
    for clients in (int(part) for part in args.clients.split(",")):
        batches = [prompts[i : i + clients] for i in range(0, len(prompts), clients)]
        runs = {name: Run(llm, params) for name, llm in engines.items()}
        for run in runs.values():
            run.generate(batches[0], counts=False)
        for batch in batches:  # in turn, so that what else the machine does falls on all alike
            for run in runs.values():
                run.generate(batch)
        for name, run in runs.items():
            same = "-" if name == "plain" else "yes" if run.answers == runs["plain"].answers else "no"
            speedup = run.speed / runs["plain"].speed
            table.add_row(name, str(clients), f"{run.speed:.1f}", f"{speedup:.2f}x", f"{run.tau:.2f}", same)
    print(
        f"vLLM {vllm.__version__}, {args.target}, {args.dtype}, eager, {len(prompts)} prompts of {args.tokens} tokens"
    )
    Console(highlight=False).print(table)


def ours(mode: str, budget: int, drafter: str, **settings: str) -> dict[str, Any]:
    """The arguments of an engine that drafts with us."""
    spec = {"method": "custom_class", "model": "dominotree.vllm.Proposer", "num_speculative_tokens": budget}
    return {
        "speculative_config": spec,
        "additional_config": {"dominotree": {"drafter": drafter, "mode": mode, **settings}},
    }


def make(folder: Path, dtype: str, arguments: dict[str, Any]) -> vllm.LLM:
    """An engine in this process, with a quarter of a GiB of cache."""
    if arguments:
        arguments = {**arguments, "per_request_spec_decode_metrics": "detailed"}
    return vllm.LLM(
        str(folder),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**28,
        disable_log_stats=False,
        **arguments,
    )


class Run:
    """What one engine took for the prompts of a run, prompt encoding included."""

    def __init__(self, llm: vllm.LLM, params: vllm.SamplingParams) -> None:
        self.llm, self.params = llm, params
        self.answers: list[list[int]] = []
        self.seconds = 0.0
        self.kept: list[int] = []

    def generate(self, batch: list[Any], *, counts: bool = True) -> None:
        """Times a batch, or warms up with it."""
        started = time.perf_counter()
        outputs = self.llm.generate(batch, self.params, use_tqdm=False)
        if counts:
            self.seconds += time.perf_counter() - started
            self.answers += [list(output.outputs[0].token_ids) for output in outputs]
            found = (output.outputs[0].spec_decode_metrics for output in outputs)
            self.kept += [kept for metrics in found if metrics is not None for kept in metrics.per_step_accepted]

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.answers)) / self.seconds

    @property
    def tau(self) -> float:
        """Tokens a pass with a draft yields."""
        return 1 + sum(self.kept) / len(self.kept) if self.kept else 1.0


if __name__ == "__main__":
    main()
