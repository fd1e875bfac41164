"""The names inside vLLM that mode tree relies on, looked at before anything runs."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any

from dominotree.errors import UnsupportedEngine

_WORKER = "vllm.v1.worker.cpu_worker:"
_RUNNER = _WORKER + "CPUModelRunner."

PARAMETERS: dict[str, str] = {
    _WORKER + "CPUWorker.init_device": "self",
    _WORKER + "CPUModelRunner": "vllm_config device",
    _RUNNER + "load_model": "self load_dummy_weights",
    _RUNNER + "initialize_kv_cache": "self kv_cache_config ...",
    _RUNNER + "_setup_eagle3_aux_hidden_state_outputs": "self",
    _RUNNER + "_prepare_inputs": "self scheduler_output num_scheduled_tokens",
    _RUNNER + "_build_attention_metadata": "self num_tokens num_reqs ...",
    _RUNNER + "execute_model": "self scheduler_output intermediate_tensors",
    _RUNNER + "_sample": "self logits spec_decode_metadata",
    _RUNNER + "_bookkeeping_sync": "self scheduler_output sampler_output ...",
    _RUNNER + "_input_fits_in_drafter": "self common_attn_metadata",
    _RUNNER + "propose_draft_token_ids": "self scheduler_output sampled_token_ids ...",
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState": "aux_hidden_states slot_mappings ...",
    "vllm.v1.core.sched.output:SchedulerOutput": "scheduled_spec_decode_tokens total_num_scheduled_tokens ...",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward": (
        "self layer query key value kv_cache attn_metadata output ..."
    ),
    "vllm._custom_ops:cpu_attn_reshape_and_cache": "key value key_cache value_cache slot_mapping isa ...",
    "vllm.v1.sample.sampler:Sampler.forward": "self logits sampling_metadata ...",
    "vllm.v1.sample.metadata:SamplingMetadata": "generators output_token_ids spec_token_ids ...",
    "vllm.v1.outputs:SamplerOutput": "sampled_token_ids logprobs_tensors ...",
    "vllm.v1.outputs:LogprobsTensors": "logprob_token_ids logprobs selected_token_ranks ...",
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": "...",
    "vllm.model_executor.models.interfaces:supports_eagle3": "model",
}
"""Functions and classes -> the parameters they take; before `...` those that must be among them."""

RUNNER_ATTRIBUTES = (
    "cache_config.block_size",
    "compilation_config.static_forward_context",
    "discard_request_mask.np",
    "drafter",
    "execute_model_state",
    "input_batch.block_table.block_tables",
    "input_batch.generators",
    "input_batch.num_tokens_no_spec",
    "input_batch.req_ids",
    "input_batch.sampling_metadata",
    "input_batch.token_ids_cpu",
    "max_model_len",
    "positions",
    "requests",
    "sampler",
    "use_aux_hidden_state_outputs",
)
LAYER_ATTRIBUTES = (
    "impl.alibi_slopes",
    "impl.attn_type",
    "impl.kv_sharing_target_layer_name",
    "impl.logits_soft_cap",
    "impl.scale",
    "impl.sinks",
    "impl.sliding_window",
)


def check_internals() -> None:
    """Raises `UnsupportedEngine` where a name in `PARAMETERS` is missing or takes other parameters."""
    for path, expected in PARAMETERS.items():
        module, _, name = path.partition(":")
        try:
            found = _follow(import_module(module), name)
        except (ImportError, AttributeError):
            raise _moved(f"it has no {path}") from None
        taken, wanted = list(signature(found).parameters), expected.split()
        if taken != wanted and not (wanted[-1] == "..." and set(wanted[:-1]) <= set(taken)):
            raise _moved(f"{path} takes ({', '.join(taken)}), not ({', '.join(wanted)})")


def check_attributes(owner: Any, paths: tuple[str, ...]) -> None:
    """Raises `UnsupportedEngine` where `owner` lacks one of `paths`."""
    for path in paths:
        try:
            _follow(owner, path)
        except AttributeError:
            raise _moved(f"its {type(owner).__name__} has no {path}") from None


def _follow(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def _moved(what: str) -> UnsupportedEngine:
    import vllm

    return UnsupportedEngine(f"mode tree does not know this build of vLLM {vllm.__version__}: {what}; use mode chain")
