"""What cannot be served exactly is refused by name, and other engines are left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM; `make test-vllm` runs this in an environment of its own")

from vllm.engine.arg_utils import EngineArgs

from dominotree.engines.vllm import register
from dominotree.engines.vllm.checks import WORKER, check_worker
from dominotree.engines.vllm.internals import check_attributes, check_internals
from dominotree.engines.vllm.settings import Settings
from dominotree.errors import DominoTreeError, UnsupportedEngine
from engines.vllm.host import PROPOSER, engine, write_drafter, write_target

PLAIN_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def configured(target: Path, ours: dict[str, Any] | None = None, **options: Any) -> Any:
    """The `VllmConfig` that vLLM makes of arguments; nothing is loaded."""
    spec = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 8, **options.pop("spec", {})}
    usual = dict(model=str(target), dtype="float32", enforce_eager=True, max_model_len=256, skip_tokenizer_init=True)
    settings = {"drafter": "somewhere", **(ours or {})}
    return EngineArgs(
        **{**usual, **options}, speculative_config=spec, additional_config={"dominotree": settings}
    ).create_engine_config()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_lora": True}, "LoRA"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"reasoning_config": {"reasoning_start_str": "<think>"}}, "reasoning config"),
        (
            {"spec": {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5] * 8}},
            "rejection_sample",
        ),
        ({"ours": {"mode": "chain"}, "enforce_eager": False}, "compilation in mode chain"),
        ({"spec": {"max_model_len": 64}}, "speculative_config's max_model_len"),
        ({"spec": {"draft_sample_method": "probabilistic"}}, "speculative_config's draft_sample_method"),
    ],
)
def test_options_that_cannot_be_served_exactly(target: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedEngine, match=named):
        configured(target, **options)


def test_sliding_windows(tmp_path: Path) -> None:
    model = write_target(tmp_path / "model", "qwen2")
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedEngine, match="sliding window"):
        configured(model)


def test_another_version_of_vllm(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    with pytest.raises(UnsupportedEngine, match=r"vLLM is 0\.33\.0; .* proven with 0\.32\.0"):
        configured(target)


def test_a_drafter_of_another_target(target: Path, tmp_path: Path) -> None:
    other = write_drafter(tmp_path / "drafter", hidden=128)
    with pytest.raises(DominoTreeError, match="does not fit the target: its hidden_size is 128"), engine(target, other):
        pass


def test_mode_tree_without_the_plugin(target: Path) -> None:
    config = configured(target)
    config.parallel_config.worker_cls = PLAIN_WORKER
    with pytest.raises(UnsupportedEngine, match="VLLM_PLUGINS"):
        check_worker(config, Settings.of(config))


def test_internals_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    check_internals()
    with monkeypatch.context() as patch:
        patch.delattr(GPUModelRunner, "_sample")
        with pytest.raises(UnsupportedEngine, match=r"has no .*CPUModelRunner\._sample; use mode chain"):
            check_internals()
    with monkeypatch.context() as patch:
        patch.setattr(GPUModelRunner, "_prepare_inputs", lambda self, batch: None)
        with pytest.raises(
            UnsupportedEngine, match=r"_prepare_inputs takes \(self, batch\), not \(self, scheduler_output"
        ):
            check_internals()
    with pytest.raises(UnsupportedEngine, match=r"its str has no join\.order"):
        check_attributes("", ("join", "join.order"))


def test_the_plugin_may_be_registered_twice_and_leaves_other_engines_alone(target: Path) -> None:
    register()
    register()
    assert configured(target).parallel_config.worker_cls == WORKER
    assert configured(target, {"mode": "chain"}).parallel_config.worker_cls == PLAIN_WORKER
    plain = EngineArgs(model=str(target), dtype="float32", skip_tokenizer_init=True).create_engine_config()
    assert plain.parallel_config.worker_cls == PLAIN_WORKER
