"""DominoTree inside vLLM, from outside: a proposer, a model runner and an attention backend, chosen by configuration.

Nothing here is imported before vLLM asks for it, and an engine whose speculative config does not name our proposer is
left alone.
"""

from __future__ import annotations

from typing import Any

from dominotree.engines.vllm.checks import WORKER, check_config
from dominotree.engines.vllm.settings import PROPOSER, Settings

_PLAIN_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def register() -> None:
    """The plugin that vLLM runs in each of its processes: has every new configuration looked at. May run twice."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    finish = getattr(platform, "check_and_update_config", None)
    if finish is None or getattr(finish, "__func__", None) is _finish_config:
        return
    platform._finish_without_dominotree = finish
    platform.check_and_update_config = classmethod(_finish_config)


def _finish_config(platform: Any, config: Any) -> None:
    platform._finish_without_dominotree(config)
    spec = config.speculative_config
    if spec is None or spec.method != "custom_class" or spec.model != PROPOSER:
        return
    settings = Settings.of(config)
    check_config(config, settings)
    if settings.mode == "tree" and config.parallel_config.worker_cls == _PLAIN_WORKER:
        config.parallel_config.worker_cls = WORKER
