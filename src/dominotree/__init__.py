"""DominoTree: lossless tree speculative decoding with Domino drafters."""

__version__ = "0.1.0"
