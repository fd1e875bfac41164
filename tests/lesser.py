"""The C kernels as other processors would have them, tried on this one."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from dominotree import native

_NO_AVX512 = ["-mno-amx-bf16", "-mno-avx512f"]
_X86 = platform.machine() in ("x86_64", "AMD64")
_MARKS = [
    pytest.mark.skipif(not _X86, reason="the instructions left out are those of x86"),
    pytest.mark.skipif(not native.available(), reason=f"no C kernels here: {native.reason()}"),
]
FEWER = [  # what a compiler is forbidden
    pytest.param(["-mno-amx-bf16"], id="without tiles", marks=_MARKS),
    pytest.param(["-mno-amx-bf16", "-mno-avx512bf16"], id="without bf16 products", marks=[*_MARKS, pytest.mark.slow]),
    pytest.param(_NO_AVX512, id="with AVX2 only", marks=_MARKS),
    pytest.param(
        [*_NO_AVX512, "-mno-avx", "-mno-avx2", "-mno-fma"], id="with SSE only", marks=[*_MARKS, pytest.mark.slow]
    ),
]


@contextmanager
def kernels_without(left_out: Sequence[str]) -> Iterator[None]:
    """The kernels compiled without some of this processor's instructions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_FLAGS", (*native._FLAGS, *left_out))
        native._load.cache_clear()
        try:
            assert native.available(), native.reason()
            yield
        finally:
            native._load.cache_clear()
