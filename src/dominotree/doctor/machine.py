"""The machine: threads, bf16 arithmetic, the C kernels."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from dominotree import machine, native
from dominotree.doctor.findings import Finding
from dominotree.machine import set_threads
from dominotree.targets.base import Target
from dominotree.targets.linear import Linear
from dominotree.targets.rows import Segment

PASSES = 5
CLEARLY_FASTER = 0.8
"""A thread count is better when a pass takes less than this share of the time."""


def examine_machine(target: Target) -> list[Finding]:
    """What is wrong with how this target runs on this machine; the thread count is left as it was."""
    if target.device.type == "cuda":
        native_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return [found for found in [bf16_finding(target, native_bf16)] if found is not None]
    findings = [
        load_finding(_load_average(), os.cpu_count() or 1),
        threads_finding(torch.get_num_threads(), machine.usable_cpus(), time_threads(target)),
        bf16_finding(target, machine.cpu_has_bf16()),
        kernels_finding(target),
    ]
    return [found for found in findings if found is not None]


def _load_average() -> float:
    """Processes that ran or waited, averaged over the last minute; 0 where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def load_finding(load: float, processors: int) -> Finding | None:
    """Other processes that want the same processors."""
    if load <= processors:
        return None
    return Finding(
        "busy-machine",
        "warning",
        "other processes keep this machine busy, so every time that is measured here is too long",
        f"before the examination {load:.1f} processes wanted to run, on {processors} processors",
        "stop them, or measure when the machine is idle; threads that share a processor wait for each other",
        {"load": load, "processors": processors},
    )


def time_threads(target: Target) -> dict[int, float]:
    """Milliseconds of a plain pass with as many threads as are set, as can run, with half of those, and with one."""
    before = torch.get_num_threads()
    cpus = min(before, machine.usable_cpus())
    cache = target.new_cache(1, 64)
    tokens = [token % target.vocab_size for token in range(8)]

    def one_pass() -> None:
        target.forward(cache, [Segment(0, 0, tokens)])

    try:
        found = {}
        for threads in sorted({1, (cpus + 1) // 2, cpus, before}):
            set_threads(threads)
            found[threads] = median_ms(one_pass)
        return found
    finally:
        set_threads(before)


def threads_finding(threads: int, usable: int, ms: Mapping[int, float]) -> Finding | None:
    """More threads than can run, or more than help; `ms` are times of a pass by thread count."""
    best = min(ms, key=lambda n: ms[n])
    if threads <= usable and ms[best] > CLEARLY_FASTER * ms[threads]:
        return None
    advised = best if ms[best] <= CLEARLY_FASTER * ms[threads] else usable
    told = ", ".join(f"{time:.1f} ms with {n}" for n, time in sorted(ms.items()))
    what = (
        f"{threads} threads are set and {usable} can run at once: they wait for each other"
        if threads > usable
        else f"{threads} threads are slower here than {best}"
    )
    return Finding(
        "threads",
        "warning",
        what,
        f"a pass over eight rows takes {told} threads",
        f"use --threads {advised}, and unset OMP_NUM_THREADS if it says otherwise",
        {"threads": threads, "usable": usable, "ms": dict(ms)},
    )


def bf16_finding(target: Target, has_bf16: bool) -> Finding | None:
    """A target in bf16 where the hardware has no such arithmetic."""
    if target.dtype != torch.bfloat16 or has_bf16:
        return None
    ms = {dtype: _time_product(target, dtype) for dtype in (torch.bfloat16, torch.float32)}
    slow, fast = ms[torch.bfloat16], ms[torch.float32]
    where = "processor" if target.device.type == "cpu" else "GPU"
    return Finding(
        "bf16-emulated",
        "warning",
        f"this {where} has no bf16 arithmetic and imitates it",
        f"the output matrix takes {slow:.2f} ms for eight rows in bf16 and {fast:.2f} ms in fp32",
        "use --dtype float32" if where == "processor" else "use --dtype float16 or float32",
        {"bfloat16_ms": slow, "float32_ms": fast},
    )


def _time_product(target: Target, dtype: torch.dtype) -> float:
    weight = target.head_weight().to(dtype)
    linear, x = Linear(weight), torch.ones(8, weight.shape[1], dtype=dtype, device=weight.device)
    return median_ms(lambda: linear(x))


def kernels_finding(target: Target) -> Finding | None:
    """A CPU without our C kernels."""
    if native.available():
        return None
    exact = target.row_invariant
    return Finding(
        "no-kernels",
        "warning",
        "the C kernels are not in use, so everything but the matrix products runs through PyTorch, more slowly"
        + ("" if exact else ", and answers may part from plain decoding's at near-ties"),
        str(native.reason()),
        "install a C compiler (gcc or clang)" + ("" if exact else ", or use --exact where equal tokens matter"),
        {"row_invariant": exact},
    )


def median_ms(call: Callable[[], object], passes: int = PASSES) -> float:
    """The median time of a call in milliseconds, after one that warms up."""
    times = []
    for i in range(passes + 1):
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i:
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)
