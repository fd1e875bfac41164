"""DominoTree inside `model.generate`: see `decoder`."""

from dominotree.engines.transformers import TreeDecoding, decoder

__all__ = ["TreeDecoding", "decoder"]
