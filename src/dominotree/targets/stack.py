"""Decoder layers one after another, with the norm and the head behind them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dominotree import native
from dominotree.targets.attention import Attention, NativeAttention
from dominotree.targets.elementwise import argmax_rows, normalise
from dominotree.targets.layer import Layer
from dominotree.targets.linear import Linear


class Passed(NamedTuple):
    """What a pass leaves: `hidden` `[picked, H]` behind the last norm, `logits` `[picked, out + room]`, and `features`
    `[rows, taps * H]`, the outputs of the tapped layers side by side, or None when none was tapped; `best` the places
    of the largest logits (`argmax_rows`), if asked for.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    features: torch.Tensor | None
    best: list[int]


class Stack:
    """Layers that a pass goes through in order; with our C kernels throughout in one call, with the same bits."""

    def __init__(self, layers: Sequence[Layer], norm: torch.Tensor, head: Linear) -> None:
        """`norm` `[H]` are the weights of the last norm, which has the layers' epsilon."""
        self.layers, self.norm, self.head = list(layers), norm, head
        kernels = [[linear.kernel for linear in layer.linears()] for layer in layers]
        self._native: ctypes.Array[native.Layer] | None = None
        if head.kernel is not None and all(kernel is not None for row in kernels for kernel in row):
            self._native = (native.Layer * len(layers))(
                *(_as_native(layer, row) for layer, row in zip(layers, kernels, strict=True))
            )

    def linears(self) -> list[Linear]:
        """Every linear map, the head first."""
        return [self.head, *(linear for layer in self.layers for linear in layer.linears())]

    def __call__(
        self,
        x: torch.Tensor,
        attend: Attention,
        *,
        taps: Sequence[int] = (),
        picked: Sequence[int] | None = None,
        room: int = 0,
        best: bool = False,
    ) -> Passed:
        """`x` `[rows, H]`, overwritten, through all layers; `taps` are those whose outputs are wanted too.

        `picked` are the rows that go on to the head, None: all; `room` columns behind its outputs are left to fill,
        which does not go with `best`.
        """
        if best and room:
            raise ValueError("the best of columns that are still to be filled cannot be told")
        if self._native is not None and self.head.kernel is not None and isinstance(attend, NativeAttention):
            return self._in_one_call(self._native, self.head.kernel, x, attend, taps, picked, room, best)
        tapped: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(self.layers):
            x = layer(i, x, attend)
            if i in taps:
                tapped[i] = x.clone()  # the next layer adds to x in place
        features = torch.cat([tapped[i] for i in taps], dim=-1) if taps else None
        if picked is not None:
            x = x[torch.tensor(picked, dtype=torch.int64, device=x.device)]
        hidden = normalise(x, self.norm, self.layers[0].shape.eps)
        logits = self.head(hidden)
        places = argmax_rows(logits) if best else []
        if room:
            logits = torch.cat([logits, logits.new_empty(len(logits), room)], dim=-1)
        return Passed(hidden, logits, features, places)

    def encodes(
        self, attend: Attention, features: torch.Tensor, fuse: Linear, norm: torch.Tensor, project: Linear
    ) -> bool:
        """Stores keys and values of all layers for a drafter's `features`, in one call; False where that cannot be."""
        if self._native is None or not isinstance(attend, NativeAttention) or not (fuse.kernel and project.kernel):
            return False
        eps = self.layers[0].shape.eps
        attend.encode(self._native, features.contiguous(), fuse.kernel, norm, project.kernel, eps)
        return True

    def _in_one_call(
        self,
        layers: ctypes.Array[native.Layer],
        head: native.Linear,
        x: torch.Tensor,
        attend: NativeAttention,
        taps: Sequence[int],
        picked: Sequence[int] | None,
        room: int,
        best: bool,
    ) -> Passed:
        rows, width = x.shape
        picks, out = rows if picked is None else len(picked), head.out_features + room
        hidden, logits = x.new_empty(picks, width), x.new_empty(picks, out)
        features = x.new_empty(rows, len(taps) * width) if taps else None
        places = torch.empty(picks if best else 0, dtype=torch.int64)
        wanted, tapped = ((ctypes.c_int64 * len(ids))(*ids) if ids else None for ids in (picked, taps))
        attend.run(
            layers,
            self.layers[0].shape,
            x,
            taps=len(taps),
            picks=picks,
            width=out,
            tapped=None if tapped is None else ctypes.addressof(tapped),
            features=None if features is None else features.data_ptr(),
            picked=None if wanted is None else ctypes.addressof(wanted),
            norm=self.norm.data_ptr(),
            last=hidden.data_ptr(),
            head=ctypes.pointer(head),
            logits=logits.data_ptr(),
            best=places.data_ptr() if best else None,
        )
        return Passed(hidden, logits, features, places.tolist())


def _as_native(layer: Layer, kernels: Sequence[native.Linear | None]) -> native.Layer:
    norms = layer.head_norms
    return native.Layer(
        layer.input_norm.data_ptr(),
        layer.mlp_norm.data_ptr(),
        None if norms is None else norms.query.data_ptr(),
        None if norms is None else norms.key.data_ptr(),
        *(ctypes.pointer(kernel) for kernel in kernels if kernel is not None),
    )
