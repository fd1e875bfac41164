"""A checkpoint is told for what it is, whatever of it is here and whether or not it can be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import byte_tokenizer
from dominotree import hub
from dominotree.errors import ModelNotFound
from dominotree.inspection import inspect
from dominotree.targets.fingerprint import fingerprint
from drafters.synthetic import tiny_config, write_tiny_drafter
from engines.zoo import FULL_ATTENTION, REFUSED, tiny
from targets.tiny import tiny_model


def test_a_target_with_its_sizes_and_weights(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    found = inspect(str(tmp_path))
    expected = {
        "kind": "target", "family": "qwen3", "architecture": "Qwen3ForCausalLM", "layers": 4, "hidden_size": 32,
        "heads": 4, "kv_heads": 2, "head_dim": 24, "vocab_size": 96, "max_positions": 256, "rope_type": "default",
        "tokenizer_size": 260, "chat_template": False, "runs_in": "our own decoder", "our_own_decoder": None,
        "refusal": None, "made_from": None, "fingerprint": fingerprint(tmp_path),
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["weights"]["dtypes"] == {"float32": sum(p.numel() for p in model.parameters())}
    assert found["weights"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["weights"]["files"] == len(list(tmp_path.glob("*.safetensors"))) > 1
    assert found["weights"]["bytes"] == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    json.dumps(found)


@pytest.mark.parametrize("kind", ["gpt2", "gemma", "qwen3_moe"])
def test_a_target_of_another_family_runs_in_transformers(tmp_path: Path, kind: str) -> None:
    tiny(kind, **FULL_ATTENTION[kind]).save_pretrained(tmp_path)
    found = inspect(str(tmp_path))
    assert (found["family"], found["runs_in"], found["refusal"]) == (kind, "transformers", None)
    assert kind in found["our_own_decoder"]


@pytest.mark.parametrize("kind", ["mamba", "mpt", "mistral"])
def test_a_target_that_nothing_here_runs_is_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    settings, word = REFUSED[kind]
    tiny(kind, **settings).save_pretrained(tmp_path)
    found = inspect(str(tmp_path))
    assert found["runs_in"] is None
    assert word in found["refusal"]


def test_a_target_of_no_known_family_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    found = inspect(str(tmp_path))
    assert "nonesuch" in found["refusal"]
    assert "transformers does not know it" in found["refusal"]


@pytest.mark.parametrize("projector", ["domino", None])
def test_a_drafter_with_what_it_taps_and_what_it_is_for(tmp_path: Path, projector: str | None) -> None:
    shape: dict[str, Any] = dict(projector=projector, draft_vocab=40, context_vocab=8, shift_label=False)
    found = inspect(str(write_tiny_drafter(tmp_path, **shape)))
    config = tiny_config(**shape)
    expected = {
        "kind": "drafter", "family": "Domino" if projector else "DFlash", "layers": 2, "target_layers": 4,
        "target_layer_ids": [0, 2], "block_size": 6, "draft_length": config.draft_length, "shift_label": False,
        "mask_token_id": 3, "vocab_size": 96, "draft_vocab_size": 40, "context_vocab_size": 8,
        "refusal": None,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert ("dominotree" in found["methods"]) == (projector is not None)
    assert "ddtree" in found["methods"] and "ar" not in found["methods"]
    assert found["weights"]["dtypes"].keys() == {"float32", "i64", "bool"}
    assert found["weights"]["parameters"] == found["weights"]["dtypes"]["float32"]


def broken(folder: Path, **changes: Any) -> Path:
    write_tiny_drafter(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        ({"num_hidden_layers": 3}, "layers.2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"architectures": ["EagleDraftModel"]}, "EagleDraftModel"),
    ],
)
def test_a_drafter_that_is_refused_says_why(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    found = inspect(str(broken(tmp_path, **changes)))
    assert found["kind"] == "drafter"
    assert word in found["refusal"]
    assert found["methods"] == []


def test_a_hub_model_is_described_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    write_tiny_drafter(tmp_path / "d")
    (tmp_path / "d/model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(tmp_path / "d"))
    found = inspect("org/name")
    assert (found["kind"], found["family"], found["weights"], found["refusal"]) == ("drafter", "Domino", None, None)


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("")
    found = inspect(str(tmp_path))
    assert found["kind"] == "checkpoint"
    assert "pytorch_model.bin" in found["refusal"]


def test_a_named_pair_holds_its_parts_and_says_what_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "t")
    byte_tokenizer().save(str(tmp_path / "t/tokenizer.json"))
    (tmp_path / "t/provenance.json").write_text('{"source": "x.gguf", "weights": "4-bit"}')
    write_tiny_drafter(tmp_path / "d")

    def target(name: str, **_: Any) -> Path:
        return tmp_path / "t"

    def drafter(name: str, **_: Any) -> Path:
        if name.endswith("-dflash"):
            raise ModelNotFound("offline")
        return tmp_path / "d"

    monkeypatch.setattr(hub, "resolve_target", target)
    monkeypatch.setattr(hub, "resolve_drafter", drafter)
    found = inspect("qwen3-4b")
    assert (found["kind"], found["name"]) == ("pair", "qwen3-4b")
    assert found["target"]["source"] == "Qwen/Qwen3-4B"
    assert found["target"]["made_from"] == "x.gguf, 4-bit"
    assert found["drafter"]["mask_token"] == "<|mask|>"
    assert found["dflash_drafter"]["missing"] == "offline"
    assert inspect("llama3.1-8b")["drafter"] is None


@pytest.mark.parametrize("name", ["no-such-name", "./no-such-folder"])
def test_a_name_that_leads_nowhere_is_an_error(name: str) -> None:
    with pytest.raises(ModelNotFound):
        inspect(name)


@pytest.mark.parametrize("content", ["{ damaged", "[]"])
def test_a_damaged_config_is_an_error(tmp_path: Path, content: str) -> None:
    write_tiny_drafter(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        inspect(str(tmp_path))
