"""DominoTree inside vLLM: `dominotree.vllm.Proposer` is what its speculative config names, see docs/vllm.md."""

from dominotree.engines.vllm.proposer import Proposer

__all__ = ["Proposer"]
