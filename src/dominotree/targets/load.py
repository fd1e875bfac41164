"""Reading a target from a folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from dominotree.errors import UnsupportedModel
from dominotree.targets.config import TargetConfig
from dominotree.targets.decoder import DecoderTarget


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of `model.safetensors` or of the shards its index names, memory-mapped."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if not (folder / name).exists():
            raise UnsupportedModel(f"{folder / name} is missing; safetensors weights are expected there")
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                tensors[key] = file.get_tensor(key)
    return tensors


def load_target(folder: Path, *, dtype: torch.dtype, device: torch.device, exact: bool | None = None) -> DecoderTarget:
    """The target in `folder` as our own decoder; raises `UnsupportedModel` naming what cannot be run exactly."""
    config = TargetConfig.read(folder)
    return DecoderTarget(config, read_tensors(folder), dtype=dtype, device=device, exact=exact)
