"""What is refused, by name: other versions of vLLM, options that cannot be served exactly, internals that moved."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any

from dominotree.engines.vllm.settings import Settings
from dominotree.errors import UnsupportedEngine

VERSIONS = ("0.32.0",)
"""The versions of vLLM that all this was proven with."""

WORKER = "dominotree.engines.vllm.worker.TreeWorker"


def check_config(config: Any, settings: Settings) -> None:
    """Raises `UnsupportedEngine` naming what in a `VllmConfig` cannot be served exactly."""
    import vllm

    if vllm.__version__ not in VERSIONS:
        raise UnsupportedEngine(f"vLLM is {vllm.__version__}; dominotree was proven with {', '.join(VERSIONS)} only")
    refused = [name for name, present in _options(config, settings).items() if present]
    if refused:
        raise UnsupportedEngine(f"{', '.join(refused)} cannot be used with dominotree in vLLM; leave out")


def check_worker(config: Any, settings: Settings) -> None:
    """Raises `UnsupportedEngine` where mode tree was asked for and our worker does not run."""
    worker = config.parallel_config.worker_cls
    if settings.mode == "tree" and worker != WORKER:
        raise UnsupportedEngine(
            f"mode tree runs in {WORKER} and the worker is {worker}: let VLLM_PLUGINS name dominotree too, "
            f"give --worker-cls {WORKER}, or use mode chain"
        )


def check_internals() -> None:
    """Raises `UnsupportedEngine` where a name inside vLLM that mode tree relies on is missing or takes other things."""
    for path, expected in INTERNALS.items():
        module, _, names = path.partition(":")
        try:
            found: Any = import_module(module)
            for name in names.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            raise UnsupportedEngine(f"vLLM has no {path}, which mode tree relies on; use mode chain") from None
        taken = tuple(name for name in signature(found).parameters if name != "self") if expected is not None else None
        if taken != expected:
            takes, expects = ", ".join(taken or ()), ", ".join(expected or ())
            raise UnsupportedEngine(
                f"vLLM's {path} takes ({takes}), not ({expects}) as mode tree expects; use mode chain"
            )


_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner."
INTERNALS: dict[str, tuple[str, ...] | None] = {
    "vllm.v1.worker.cpu_worker:CPUModelRunner": ("vllm_config", "device"),
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device": (),
    _RUNNER + "_prepare_inputs": ("scheduler_output", "num_scheduled_tokens"),
    _RUNNER + "execute_model": ("scheduler_output", "intermediate_tensors"),
    _RUNNER + "_sample": ("logits", "spec_decode_metadata"),
    _RUNNER + "_input_fits_in_drafter": ("common_attn_metadata",),
    _RUNNER + "_setup_eagle3_aux_hidden_state_outputs": (),
}
"""Names mode tree relies on -> the parameters it expects there, None where that does not matter."""


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
        "a quantised KV cache": cache.cache_dtype != "auto",
        "kv_sharing_fast_prefill": cache.kv_sharing_fast_prefill,
        "prompt embeddings": model.enable_prompt_embeds,
        "a thinking budget": config.reasoning_config is not None,
        "rejection_sample_method": spec.rejection_sample_method != "standard",
        "num_speculative_tokens_per_batch_size": spec.num_speculative_tokens_per_batch_size is not None,
        "an encoder-decoder": model.is_encoder_decoder,
        "a multimodal model": model.is_multimodal_model,
        "a pooling model": model.runner_type != "generate",
        "recurrent state": model.has_inner_state or model.is_hybrid,
        "latent attention (MLA)": model.use_mla,
        "a sliding window": model.get_sliding_window() is not None,
        "a device other than the CPU (mode tree)": tree and config.device_config.device_type != "cpu",
        "compilation (mode chain; give --enforce-eager)": not tree and not model.enforce_eager,
    }
