"""vLLM engines in this process over tiny random models, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dominotree.drafters.checkpoint import write_checkpoint
from dominotree.drafters.dflash import Draft, Drafter
from dominotree.targets.cache import SlotCache
from drafters.synthetic import tiny_config, tiny_tensors
from targets.tiny import tiny_model

SIZES: dict[str, Any] = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)  # heads of 32, the least
PROPOSER = "dominotree.vllm.Proposer"
_engines: list[Any] = []
_done: list[Any] = []


def write_target(folder: Path, variant: str = "llama", **changes: Any) -> Path:
    """A tiny random model as a folder without a tokenizer; no token ends its answers."""
    model = tiny_model(variant, **{**SIZES, "eos_token_id": None, **changes})
    model.save_pretrained(folder)
    return folder


def write_drafter(folder: Path, **changes: Any) -> Path:
    """A random drafter for it, whose head is too weak to talk an oracle over."""
    config = tiny_config(**{"hidden": SIZES["hidden_size"], **changes})
    tensors = tiny_tensors(config)
    if "embed_proj.2.weight" in tensors:
        tensors["embed_proj.2.weight"] *= 0.1
    write_checkpoint(folder, config, tensors)
    return folder


@contextmanager
def engine(target: Path, drafter: Path | str | None = None, *, budget: int = 8, **options: Any) -> Iterator[Any]:
    """An `LLM` in this process; plain without a drafter. `dominotree` are further settings of ours."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    ours = options.pop("dominotree", {})
    if drafter is not None:
        options |= {
            "speculative_config": {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": budget},
            "additional_config": {"dominotree": {"drafter": str(drafter), **ours}},
            "per_request_spec_decode_metrics": "detailed",
        }
    usual: dict[str, Any] = dict(dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8, block_size=32)
    usual["kv_cache_memory_bytes"] = 2**28
    if not (target / "tokenizer.json").exists():
        usual["skip_tokenizer_init"] = True
    llm = LLM(str(target), disable_log_stats=False, **{**usual, **options})
    _engines.append(llm)
    try:
        yield llm
    finally:
        _done.append(llm)
        if len(_done) == len(_engines):  # shutting one down destroys what all of a process share
            for each in _engines:
                each.llm_engine.engine_core.shutdown()
            _engines.clear()
            _done.clear()
            cleanup_dist_env_and_memory()


def generate(llm: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Any]:
    """vLLM's outputs for prompts sent together."""
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "detokenize": False, **sampling})
    return list(llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False))


def answers(llm: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    """Token ids of the answers to prompts sent together."""
    return [list(output.outputs[0].token_ids) for output in generate(llm, prompts, **sampling)]


def accepted(outputs: Sequence[Any]) -> list[int]:
    """Draft tokens accepted in each round with a draft, of all outputs."""
    return [kept for output in outputs for kept in output.outputs[0].spec_decode_metrics.per_step_accepted]


def metric(llm: Any, name: str) -> int:
    """A counter of the newest engine."""
    return sum(found.value for found in llm.get_metrics() if found.name == f"vllm:{name}")


def random_prompts(count: int, *, longest: int = 40, vocab: int = 96) -> list[list[int]]:
    """Prompts of different lengths, the same ones every time."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(3, longest, (count,), generator=generator).tolist()
    return [torch.randint(4, vocab, (n,), generator=generator).tolist() for n in lengths]


class Oracle:
    """Replaces a drafter's logits by what is known of the answers, spoilt in a fixed way.

    Every third depth hides the true token behind a wrong favourite, every fifth does not propose it. A sequence is
    known by its length and last token, whatever row or slot it has.
    """

    def __init__(self) -> None:
        self.scripts: list[list[int]] = []

    def install(self, monkeypatch: Any) -> None:
        """Has every drafter loaded from now on ask the oracle."""
        draft = Drafter.draft

        def knowing(
            drafter: Drafter, cache: SlotCache, slots: Sequence[int], roots: Sequence[int], **options: Any
        ) -> Draft:
            made = draft(drafter, cache, slots, roots, **options)
            base = made.base.clone()
            for row, (slot, root) in enumerate(zip(slots, roots, strict=True)):
                self._tell(base[row], cache.lengths[slot], root)
            return replace(made, base=base)

        monkeypatch.setattr(Drafter, "draft", knowing)

    def _tell(self, base: torch.Tensor, length: int, root: int) -> None:
        script = next((s for s in self.scripts if length < len(s) and s[length] == root), None)
        if script is None:
            return
        for depth, token in enumerate(script[length + 1 : length + 1 + len(base)]):
            at = length + depth
            other = (token + 1 + at) % base.shape[-1]
            best = float(base[depth].max()) + 5
            if at % 5:
                base[depth, token] = best
            base[depth, other if at % 3 == 0 else token] += 3
