"""One pre-norm decoder layer: the target's, and (with query and key norms) the drafter's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dominotree.errors import UnsupportedModel
from dominotree.targets.attention import Attention, HeadNorms, LayerShape
from dominotree.targets.elementwise import add_normalise, normalise, swiglu
from dominotree.targets.linear import Linear


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; query/key/value and gate/up are fused."""

    shape: LayerShape
    input_norm: torch.Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    def __call__(self, index: int, x: torch.Tensor, attend: Attention) -> torch.Tensor:
        """`x` `[rows, hidden]`, overwritten, -> the layer's output; `attend` is told the layer's index."""
        eps = self.shape.eps
        qkv = self.qkv(normalise(x, self.input_norm, eps))
        x, normed = add_normalise(x, self.output(attend(index, qkv, self.head_norms)), self.mlp_norm, eps)
        return x + self.down(swiglu(self.gate_up(normed)))

    def linears(self) -> tuple[Linear, ...]:
        """The layer's linear maps."""
        return self.qkv, self.output, self.gate_up, self.down


class Weights:
    """Takes tensors by name with the shape they must have, in one dtype on one device."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        owner: str,
        int8: bool = False,
    ) -> None:
        """With `int8` linear layers are rounded to it, where our kernel computes them."""
        self._tensors, self._dtype, self._device, self._owner = tensors, dtype, device, owner
        self._int8 = int8

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor `name`; raises `UnsupportedModel` when it is missing or of another shape."""
        return self._checked(name, shape).to(self._device, self._dtype)

    def stored(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """As `take`, but bf16 is left as it is for fp32 on a CPU: the same numbers in half the memory."""
        tensor = self._checked(name, shape)
        if self._device.type == "cpu" and (tensor.dtype, self._dtype) == (torch.bfloat16, torch.float32):
            return tensor
        return tensor.to(self._device, self._dtype)

    def _checked(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise UnsupportedModel(f"tensor {name} is missing from the weights of {self._owner}")
        if tuple(tensor.shape) != tuple(shape):
            raise UnsupportedModel(
                f"tensor {name} of {self._owner} has shape {tuple(tensor.shape)}; its config says {tuple(shape)}"
            )
        return tensor

    def linear(self, names: Sequence[str], outs: Sequence[int], width: int, bias: bool = False) -> Linear:
        """The linear layers `names` stacked into one."""
        weight = [self.stored(f"{name}.weight", (out, width)) for name, out in zip(names, outs, strict=True)]
        biases = [self.take(f"{name}.bias", (out,)) for name, out in zip(names, outs, strict=True)] if bias else []
        return Linear(torch.cat(weight), torch.cat(biases) if bias else None, dtype=self._dtype, int8=self._int8)


def read_layer(weights: Weights, prefix: str, shape: LayerShape) -> Layer:
    """The layer whose tensors start with `prefix`, in the naming that Llama and Qwen share."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    heads = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
    norms = None
    if shape.qk_norm:
        query, key = (weights.take(f"{attention}{part}_norm.weight", (shape.head_dim,)) for part in "qk")
        norms = HeadNorms(query, key, shape.eps)
    wide = [mlp + "gate_proj", mlp + "up_proj"]
    return Layer(
        shape=shape,
        input_norm=weights.take(prefix + "input_layernorm.weight", (shape.hidden,)),
        qkv=weights.linear(heads, (q, kv, kv), shape.hidden, shape.qkv_bias),
        head_norms=norms,
        output=weights.linear([attention + "o_proj"], (shape.hidden,), q, shape.output_bias),
        mlp_norm=weights.take(prefix + "post_attention_layernorm.weight", (shape.hidden,)),
        gate_up=weights.linear(wide, (shape.intermediate,) * 2, shape.hidden, shape.mlp_bias),
        down=weights.linear([mlp + "down_proj"], (shape.hidden,), shape.intermediate, shape.mlp_bias),
    )
