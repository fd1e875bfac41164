"""What this machine offers: processors we may use, bf16 arithmetic, devices."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

import torch

from dominotree.errors import InvalidRequest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
"""What weights can be kept in. int8 are rounded ones, on a CPU; activations then have the dtype that `auto` takes."""
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def usable_cpus() -> int:
    """Processors this process may really use: its affinity, bounded by a control group's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, _quota() or cpus))


def _quota() -> int | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return None


def set_threads(threads: int | None) -> int:
    """Uses that many threads; None: as many as there are usable processors, unless OMP_NUM_THREADS says."""
    if threads is None:
        if "OMP_NUM_THREADS" in os.environ:
            return torch.get_num_threads()
        threads = usable_cpus()
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise InvalidRequest(f"threads is {threads!r}; a positive integer is expected")
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return threads


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies bf16 itself; where it is emulated, fp32 is faster."""
    flags = _cpu_flags()
    return platform.machine() == "arm64" if flags is None else bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def vector_registers() -> int:
    """How many registers hold vectors, which is what bounds the rows that a pass multiplies at once."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return 32
    return 32 if "avx512f" in (_cpu_flags() or ()) else 16


def _cpu_flags() -> set[str] | None:
    """What the processor can do, in Linux's words; None: it is not said (elsewhere, as on Apple silicon)."""
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return None


def cpu_name() -> str:
    """The processor's name as its maker gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def parse_device(name: str | torch.device) -> torch.device:
    """`auto`, `cpu`, `cuda`, `cuda:1`, ...; raises `InvalidRequest` for one that is not there."""
    name = str(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise InvalidRequest(f"device {name!r} is unknown; auto, cpu, cuda or cuda:N is expected")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            found = f"{count} CUDA device{'s' * (count != 1)}" if count else "no CUDA device"
            raise InvalidRequest(f"device {name!r} was asked for and {found} can be used here; use --device cpu")
    return torch.device(name)


def parse_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` takes bf16 where the hardware has it and fp32 elsewhere."""
    if isinstance(name, torch.dtype):
        if name not in DTYPES.values():
            raise InvalidRequest(f"dtype {name} cannot be decoded in; {', '.join(DTYPES)} is expected")
        return name
    if name == "auto":
        has_bf16 = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_has_bf16()
        return torch.bfloat16 if has_bf16 else torch.float32
    full = _SHORT.get(name, name)
    if full not in DTYPES:
        raise InvalidRequest(f"dtype {name!r} is unknown; auto, {', '.join(DTYPES)} is expected")
    return DTYPES[full]
