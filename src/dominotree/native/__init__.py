"""C kernels for the CPU: compiled once with the machine's own compiler, cached, checked, optional.

Without a compiler everything still runs through PyTorch; `available()` says which it is, `reason()` why not.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from dominotree.hub import cache_dir

_P, _I, _N, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_VOID_FUNCTIONS = {
    "dt_rope_store": [_P, _I],
    "dt_add_norm": [_P, _P, _P, _P, _I, _N, _N, _F, _I],
    "dt_swiglu": [_P, _P, _I, _N, _N, _I],
    "dt_argmax": [_P, _I, _N, _N, _P, _I],
    "dt_move": [_P, _N, _N, _N, _N, _N, _P, _P, _N],
    "dt_pack": [_P, _I, _N, _N, _N, _P],
    "dt_rest": [],
    "dt_couple": [_P, _I, _N, _N, _P, _P, _F, _F, _P, _I],
}
_FOLDER = Path(__file__).parent
_SOURCES = sorted(_FOLDER.glob("*.c"))
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-shared",
    "-fPIC",
)


class Attention(ctypes.Structure):
    """Arguments of `dt_attend`; pointers as returned by `Tensor.data_ptr()`."""

    _fields_ = [
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("q_bf16", ctypes.c_int),
        ("kv_bf16", ctypes.c_int),
        ("q", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("slot", ctypes.c_void_p),
        ("contiguous", ctypes.c_void_p),
        ("tail_start", ctypes.c_void_p),
        ("tail", ctypes.c_void_p),
    ]


class Linear(ctypes.Structure):
    """What `dt_linear` knows of a layer; the rest of its arguments are those of a call."""

    _fields_ = [
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("kept", ctypes.c_int),
        *[(name, ctypes.c_void_p) for name in ("panels", "bias", "scale")],
    ]


class Layer(ctypes.Structure):
    """A layer's weights, as `dt_layers` takes an array of."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")],
        *[(name, ctypes.POINTER(Linear)) for name in ("qkv", "output", "gate_up", "down")],
    ]


class Pass(ctypes.Structure):
    """Buffers of `dt_layers`."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("rows", "hidden", "intermediate", "plane")],
        ("eps", ctypes.c_float),
        ("bf16", ctypes.c_int),
        *[(name, ctypes.c_void_p) for name in ("x", "normed", "delta", "qkv", "gate_up", "active")],
        *[(name, ctypes.c_int64) for name in ("taps", "picks", "width")],
        *[(name, ctypes.c_void_p) for name in ("tapped", "features", "picked", "norm", "last")],
        ("head", ctypes.POINTER(Linear)),
        *[(name, ctypes.c_void_p) for name in ("logits", "best")],
    ]


class RopeStore(ctypes.Structure):
    """Arguments of `dt_rope_store`."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "head_dim", "length", "stride")],
        ("eps", ctypes.c_float),
        ("bf16", ctypes.c_int),
        ("kv_bf16", ctypes.c_int),
        *[
            (name, ctypes.c_void_p)
            for name in (
                "qkv",
                "q_norm",
                "k_norm",
                "cos",
                "sin",
                "q_out",
                "keys",
                "values",
                "position",
                "slot",
                "column",
            )
        ],
    ]


class Forest(ctypes.Structure):
    """Arguments of `dt_grow`."""

    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in (
                "sequences", "levels", "width", "size", "children", "state", "rank", "hidden_size", "vocab", "words",
                "prefix", "columns", "ranks",
            )
        ],
        *[(name, ctypes.c_int) for name in ("weight_bf16", "proj_bf16", "hidden_bf16", "base_bf16", "threads")],
        *[
            (name, ctypes.c_void_p)
            for name in (
                "log_prob", "base", "logits", "candidates", "d2t", "word_ids", "hidden", "root", "scale", "from_state",
                "from_hidden", "input_table", "word_inputs", "proj_out", "budget", "depth_limit", "calibration", "cost",
                "rate", "token", "parent", "depth", "count", "score", "given",
            )
        ],
    ]  # fmt: skip


def _compiler() -> str | None:
    return next(
        (path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (path := shutil.which(name))), None
    )


def _open(compiler: str) -> ctypes.CDLL:
    """The kernels out of the cache, built again where they are damaged; for this process alone without a cache."""
    try:
        library = _build(compiler, cache_dir() / "native")
        try:
            return ctypes.CDLL(str(library))
        except OSError:
            library.unlink()
            return ctypes.CDLL(str(_build(compiler, library.parent)))
    except OSError:  # read-only or full
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return ctypes.CDLL(str(_build(compiler, Path(folder))))


def _build(compiler: str, folder: Path) -> Path:
    """The shared library for this source, compiler and processor in `folder`; built at most once, atomically.

    Raises `SubprocessError` when the compiler fails and `OSError` when the folder cannot be used.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    source = "".join(file.read_text() for file in sorted([*_SOURCES, *_FOLDER.glob("*.h")]))
    key = hashlib.sha256("\0".join((source, version, platform.machine(), _processor(), *_FLAGS)).encode())
    library = folder / f"kernels-{key.hexdigest()[:16]}.so"
    checksum = library.with_suffix(".sha256")
    if library.exists() and checksum.exists() and checksum.read_text() == _sha256(library):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        out = Path(scratch) / library.name
        for threads in (("-fopenmp",), ()):
            command = [compiler, *_FLAGS, *threads, *map(str, _SOURCES), "-o", str(out), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                out.with_suffix(".sha256").write_text(_sha256(out))  # loading a file cut short kills the process
                out.replace(library)
                out.with_suffix(".sha256").replace(checksum)
                return library
    said = done.stderr.strip().splitlines()
    raise subprocess.SubprocessError(said[-1] if said else f"{compiler} failed")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _processor() -> str:
    """What -march=native depends on, so that a cache folder shared by several machines stays right."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("DOMINOTREE_NATIVE") == "0":
        return None, "switched off by DOMINOTREE_NATIVE=0"
    compiler = _compiler()
    if compiler is None:
        return None, "no C compiler found (cc, gcc or clang)"
    try:
        library = _open(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"the C kernels did not build: {error}"
    library.dt_attend.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.dt_attend.restype = ctypes.c_int
    library.dt_grow.argtypes = [ctypes.c_void_p]
    library.dt_grow.restype = ctypes.c_int
    library.dt_top.argtypes = [_P, _I, _N, _N, _N, _P, _P, _I]
    library.dt_top.restype = _N
    library.dt_draw.argtypes = [_P, _I, _N, ctypes.c_double, ctypes.c_uint64, _I]
    library.dt_draw.restype = _N
    library.dt_lanes.argtypes = []
    library.dt_lanes.restype = ctypes.c_int64
    library.dt_bf16.argtypes = []
    library.dt_bf16.restype = ctypes.c_int
    library.dt_linear.argtypes = [_P, _P, _P, _I, _N, _N, _I]
    library.dt_linear.restype = ctypes.c_int
    library.dt_layers.argtypes = [_P, _N, _P, _P, _P, _I]
    library.dt_layers.restype = ctypes.c_int
    library.dt_encode.argtypes = [_P, _P, _F, _P, _P, _N, _P, _P, _P, _N, _P, _I]
    library.dt_encode.restype = ctypes.c_int
    for function, arguments in _VOID_FUNCTIONS.items():
        getattr(library, function).argtypes = arguments
        getattr(library, function).restype = None
    return library, ""


def available() -> bool:
    """Whether the C kernels can be used in this process."""
    return _load()[0] is not None


def reason() -> str:
    """Why the C kernels are not used; empty when they are."""
    return _load()[1]


def multiplies_bf16() -> bool:
    """Whether the C kernels can be used and have the processor multiply bf16 itself."""
    return available() and library().dt_bf16() > 0


def rest() -> None:
    """Lets go the threads that the calling thread has had kernels run on, before another takes over.

    OpenMP keeps a team for every thread that ever computed. With more of them than processors all sleep between the
    parts of a pass, and are woken for every one.
    """
    if available():
        library().dt_rest()


def library() -> ctypes.CDLL:
    """The loaded kernels; call only when `available()`."""
    loaded = _load()[0]
    assert loaded is not None
    return loaded
