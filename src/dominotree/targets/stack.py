"""Decoder layers one after another."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

import torch

from dominotree import native
from dominotree.targets.attention import Attention, NativeAttention
from dominotree.targets.layer import Layer


class Stack:
    """Layers that a pass goes through in order; with our C kernels throughout in few calls, with the same bits."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = list(layers)
        kernels = [[linear.kernel for linear in layer.linears()] for layer in layers]
        self._native: ctypes.Array[native.Layer] | None = None
        if all(kernel is not None for row in kernels for kernel in row):
            self._native = (native.Layer * len(layers))(
                *(_as_native(layer, row) for layer, row in zip(layers, kernels, strict=True))
            )

    def __call__(
        self, x: torch.Tensor, attend: Attention, taps: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """`x` `[rows, hidden]`, overwritten, after all layers, and copies of it after each layer in `taps`."""
        tapped: dict[int, torch.Tensor] = {}
        if self._native is not None and isinstance(attend, NativeAttention):
            first, run = 0, attend.layers(self._native, self.layers[0].shape, x)
            for last in sorted({*taps, len(self.layers) - 1}):
                run(first, last + 1)
                if last in taps:
                    tapped[last] = x.clone()
                first = last + 1
            return x, tapped
        for i, layer in enumerate(self.layers):
            x = layer(i, x, attend)
            if i in taps:
                tapped[i] = x.clone()  # the next layer adds to x in place
        return x, tapped


def _as_native(layer: Layer, kernels: Sequence[native.Linear | None]) -> native.Layer:
    norms = layer.head_norms
    return native.Layer(
        layer.input_norm.data_ptr(),
        layer.mlp_norm.data_ptr(),
        None if norms is None else norms.query.data_ptr(),
        None if norms is None else norms.key.data_ptr(),
        *(ctypes.pointer(kernel) for kernel in kernels if kernel is not None),
    )
