"""Time of the fast tree builder over that of the reference heap: medians of interleaved pairs.

    OMP_NUM_THREADS=1 python benchmarks/build_tree.py

The drafter is random, in the shapes of the default pair; `--peak` says how peaked its logits are.
"build" is given a scorer that is ready; "round" makes the scorer anew each time, as decoding does.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from dominotree.drafters.domino import DominoHead
from dominotree.tree.batched import build
from dominotree.tree.reference import build_reference
from dominotree.tree.scorers import ConditionalScorer

HIDDEN, STATE, RANK, VOCAB, LEVELS, WIDTH = 576, 256, 128, 8192, 8, 64


def random_round(batch: int, seed: int, peak: float) -> Callable[[], ConditionalScorer]:
    """What makes the scorer of one round of `batch` sequences; a larger `peak` gives deeper trees."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    embedding = normal(VOCAB, HIDDEN)
    head = DominoHead(
        normal(3 * STATE, HIDDEN) / HIDDEN**0.5,
        normal(3 * STATE, STATE) / STATE**0.5,
        normal(RANK, HIDDEN + STATE) * 3 / (HIDDEN + STATE) ** 0.5,
        normal(VOCAB, RANK) * peak / RANK**0.5,
        lambda ids: embedding[ids],
        prefix_len=1,
    )
    base = normal(batch, LEVELS, VOCAB) * peak
    hidden = normal(batch, LEVELS, HIDDEN)
    roots = torch.arange(batch)
    return lambda: ConditionalScorer(base, hidden, roots, head, WIDTH)


def paired(
    fast: Callable[[], object], slow: Callable[[], object], pairs: int, clock: Callable[[], float]
) -> tuple[float, float, float]:
    """Median seconds of both and the median of the ratio, over interleaved pairs after a warm-up."""

    def seconds(work: Callable[[], object]) -> float:
        start = clock()
        work()
        return clock() - start

    times = [(seconds(fast), seconds(slow)) for _ in range(pairs + 3)][3:]
    return (
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(a / b for a, b in times),
    )


def main() -> None:
    """Print one line per budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--peak", type=float, default=3.0, help="larger: deeper trees")
    parser.add_argument("--cpu-time", action="store_true", help="processor time: steadier on a busy machine")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(1)
    make = random_round(args.batch, seed=0, peak=args.peak)
    with torch.inference_mode():
        scorer = make()
        print(f"batch {args.batch}, K {LEVELS}, M {WIDTH}, V' {VOCAB}, G {STATE}, E {RANK}, {args.pairs} pairs")
        print("   n  depth   build ms  heap ms  ratio   round ms  heap ms  ratio")
        for n in (4, 8, 16, 32, 64, 128):
            depth = int(build(scorer, n).depth.max()) + 1
            a, b, ratio = paired(
                lambda n=n: build(scorer, n), lambda n=n: build_reference(scorer, n), args.pairs, clock
            )
            c, d, whole = paired(
                lambda n=n: build(make(), n), lambda n=n: build_reference(make(), n), args.pairs, clock
            )
            print(
                f"{n:4d} {depth:6d} {a * 1e3:10.3f} {b * 1e3:8.3f} {ratio:6.3f} "
                f"{c * 1e3:10.3f} {d * 1e3:8.3f} {whole:6.3f}"
            )


if __name__ == "__main__":
    main()
