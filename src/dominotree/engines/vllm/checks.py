"""What is refused, by name: other versions of vLLM, and options that cannot be served exactly."""

from __future__ import annotations

from typing import Any

from dominotree.engines.vllm.settings import Settings
from dominotree.errors import UnsupportedEngine

VERSIONS = ("0.32.0",)
"""The versions of vLLM that all this was proven with."""

WORKER = "dominotree.engines.vllm.worker.TreeWorker"


_IDLE = {
    "max_model_len": None,
    "draft_sample_method": "greedy",
    "draft_tensor_parallel_size": None,
    "enable_adaptive_verification": False,
    "attention_backend": None,
    "kv_cache_dtype": None,
    "parallel_drafting": False,
    "revision": None,
}
"""Fields of a speculative config that nothing here reads, and what they are when nobody sets them."""


def check_config(config: Any, settings: Settings) -> None:
    """Raises `UnsupportedEngine` naming what in a `VllmConfig` cannot be served exactly."""
    import vllm

    if vllm.__version__ not in VERSIONS:
        raise UnsupportedEngine(f"vLLM is {vllm.__version__}; dominotree was proven with {', '.join(VERSIONS)} only")
    refused = [name for name, present in _options(config, settings).items() if present]
    if refused:
        raise UnsupportedEngine(f"dominotree does not work in vLLM with {', '.join(refused)}; leave it out")


def check_worker(config: Any, settings: Settings) -> None:
    """Raises `UnsupportedEngine` where mode tree was asked for and our worker does not run."""
    worker = config.parallel_config.worker_cls
    if settings.mode == "tree" and worker != WORKER:
        raise UnsupportedEngine(
            f"mode tree runs in {WORKER} and the worker is {worker}: let VLLM_PLUGINS name dominotree too, "
            f"give --worker-cls {WORKER}, or use mode chain"
        )


def _options(config: Any, settings: Settings) -> dict[str, bool]:
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    tree, spec = settings.mode == "tree", config.speculative_config
    return {
        "LoRA": config.lora_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
        "the V2 model runner": config.use_v2_model_runner,
        "asynchronous scheduling": bool(config.scheduler_config.async_scheduling),
        "a KV connector": config.kv_transfer_config is not None,
        "a quantised KV cache": cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")),
        "kv_sharing_fast_prefill": cache.kv_sharing_fast_prefill,
        "prompt embeddings": model.enable_prompt_embeds,
        "a reasoning config (thinking budgets)": config.reasoning_config is not None,
        "rejection_sample_method": spec.rejection_sample_method != "standard",
        "num_speculative_tokens_per_batch_size": spec.num_speculative_tokens_per_batch_size is not None,
        **{f"speculative_config's {name}": getattr(spec, name) != usual for name, usual in _IDLE.items()},
        "an encoder-decoder": model.is_encoder_decoder,
        "a multimodal model": model.is_multimodal_model,
        "a pooling model": model.runner_type != "generate",
        "recurrent state": model.has_inner_state or model.is_hybrid,
        "latent attention (MLA)": model.use_mla,
        "M-RoPE": model.uses_mrope,
        "a sliding window": model.get_sliding_window() is not None,
        "a device other than the CPU in mode tree": tree and config.device_config.device_type != "cpu",
        "compilation in mode chain (give --enforce-eager)": not tree and not model.enforce_eager,
    }
