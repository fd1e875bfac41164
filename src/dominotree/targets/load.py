"""Reading a target from a folder."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dominotree.errors import UnsupportedModel
from dominotree.files import weight_files
from dominotree.machine import parse_dtype
from dominotree.targets.base import Target
from dominotree.targets.config import TargetConfig
from dominotree.targets.decoder import DecoderTarget

log = logging.getLogger("dominotree")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the weight files of `folder`, memory-mapped."""
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    tensors[key] = file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise UnsupportedModel(f"{path} is no readable safetensors file ({error}); fetch it again") from error
    return tensors


def load_target(
    folder: Path, *, dtype: torch.dtype, device: torch.device, exact: bool | None = None, context: int | None = None
) -> Target:
    """The target in `folder`: our own decoder, or what transformers makes of a model that ours refuses (a notice says).

    With the dtype int8 its weights are rounded to that. `context` is the most tokens that are asked of it, None for all
    it was made for. Raises `UnsupportedModel` naming what neither runs exactly.
    """
    int8, dtype = dtype == torch.int8, parse_dtype("auto", device) if dtype == torch.int8 else dtype
    try:
        config = TargetConfig.read(folder)
    except UnsupportedModel as refusal:
        if refusal.__cause__ is not None:  # the config cannot even be read
            raise
        if int8:
            raise UnsupportedModel(f"{refusal}; int8 weights need our own decoder, choose another --dtype") from None
        return _fallback(str(refusal), folder, dtype, device, exact, context)
    return DecoderTarget(config, read_tensors(folder), dtype=dtype, device=device, exact=exact, int8=int8)


def _fallback(
    refusal: str, folder: Path, dtype: torch.dtype, device: torch.device, exact: bool | None, context: int | None
) -> Target:
    if exact:
        raise UnsupportedModel(f"{refusal}; exact needs our own decoder, leave it out to run the model by transformers")
    from dominotree.targets.transformers import load_transformers_target

    try:
        target = load_transformers_target(folder, dtype=dtype, device=device, context=context)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{refusal}; {error}") from error
    log.warning(f"{refusal}: transformers runs this target, one sequence at a time")
    return target
