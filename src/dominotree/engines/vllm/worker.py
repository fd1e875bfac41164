"""vLLM's CPU worker with our model runner, see docs/vllm.md."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from dominotree.engines.vllm.internals import check_internals
from dominotree.engines.vllm.runner import TreeRunner


class TreeWorker(CPUWorker):  # type: ignore[misc]
    """What `--worker-cls` names in mode tree; the plugin fills it in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_internals()
        super().__init__(*args, **kwargs)

    def init_device(self) -> None:
        """Makes a `TreeRunner` where vLLM makes its own runner."""
        usual = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = TreeRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = usual
