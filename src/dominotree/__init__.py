"""DominoTree: lossless tree speculative decoding with Domino drafters.

>>> import dominotree as dt
>>> pair = dt.load("smollm2-135m")
>>> pair.generate("Why is the sky blue?", method="dominotree", budget=16).text
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Chat": "pair",
    "Decoder": "decode",
    "DominoTreeError": "errors",
    "Drafter": "drafters.dflash",
    "Drafting": "methods",
    "METHODS": "methods",
    "Output": "pair",
    "Pair": "pair",
    "Request": "generation",
    "SamplingParams": "sampling",
    "Stats": "generation",
    "load": "pair",
}

__all__ = ["__version__", *sorted(_HOMES)]

if TYPE_CHECKING:
    from dominotree.decode import Decoder as Decoder
    from dominotree.drafters.dflash import Drafter as Drafter
    from dominotree.errors import DominoTreeError as DominoTreeError
    from dominotree.generation import Request as Request
    from dominotree.generation import Stats as Stats
    from dominotree.methods import METHODS as METHODS
    from dominotree.methods import Drafting as Drafting
    from dominotree.pair import Chat as Chat
    from dominotree.pair import Output as Output
    from dominotree.pair import Pair as Pair
    from dominotree.pair import load as load
    from dominotree.sampling import SamplingParams as SamplingParams


def __getattr__(name: str) -> Any:  # names load what they need at first use, so that `--help` is instant
    if name not in _HOMES:
        raise AttributeError(f"module 'dominotree' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"dominotree.{_HOMES[name]}"), name)
