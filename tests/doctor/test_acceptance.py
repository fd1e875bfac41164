"""A drafter of another target, of a quantised copy of it, of another vocabulary, or of no use at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

from cli.conftest import VOCAB, byte_tokenizer
from doctor.healthy import broken, write_target
from dominotree.doctor import Finding, Report, examine
from dominotree.errors import InvalidRequest, ModelNotFound
from dominotree.targets.fingerprint import fingerprint
from drafters.synthetic import write_tiny_drafter


def found(report: Report) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings}


def test_the_drafter_of_another_target_of_the_same_shape(tmp_path: Path, target: Path, domino: Path) -> None:
    other = write_target(tmp_path / "other", seed=1)
    report = examine(str(other), str(domino), dtype="float32")
    finding = found(report)["another-target"]
    assert finding.severity == "warning"
    assert finding.figures["drafter"] == fingerprint(target)
    assert finding.figures["target"] == fingerprint(other)
    useless = found(report)["tau-near-1"]
    assert useless.severity == "error"
    assert max(useless.figures["tau"], useless.figures["best_tau"]) < 1.1
    assert [finding.name for finding in report.findings if finding.severity == "error"] == ["tau-near-1"]
    assert f"tau is {useless.figures['tau']:.2f}" in useless.known


def test_a_drafter_that_does_not_say_what_it_was_trained_on_is_judged_by_tau(tmp_path: Path, domino: Path) -> None:
    other = write_target(tmp_path / "other", seed=1)
    report = examine(str(other), str(broken(tmp_path / "d", domino, target_fingerprint=None)), dtype="float32")
    assert "another-target" not in found(report)
    assert found(report)["tau-near-1"].severity == "error"


def quantised(folder: Path, source: Path) -> Path:
    """A copy of a target whose matrices went through 4 bits, in blocks of 32."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if weight.dim() == 2 and ".layers." in name:
            blocks = weight.float().reshape(-1, 32)
            low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
            step = (high - low) / 15
            tensors[name] = (((blocks - low) / step).round() * step + low).view_as(weight).to(weight.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_drafter_of_another_quantisation(tmp_path: Path, target: Path, domino: Path) -> None:
    copy = quantised(tmp_path / "q4", target)
    finding = found(examine(str(copy), str(domino), dtype="float32", max_new_tokens=16))["another-target"]
    assert finding.severity == "warning"
    assert "another quantisation" in finding.what
    assert finding.figures["levels"] <= 16
    assert "quantised to 4 bits" in finding.known
    silent = broken(tmp_path / "d", domino, target_fingerprint=None)
    unsaid = found(examine(str(copy), str(silent), dtype="float32", max_new_tokens=16))["quantised-target"]
    assert unsaid.severity == "warning"
    assert unsaid.figures["levels"] <= 16


@pytest.mark.parametrize(
    ("changes", "name", "field"),
    [
        ({"hidden": 64}, "another-target", "hidden_size"),
        ({"target_layers": 6}, "another-target", "num_target_layers"),
        ({"target_layers": None, "layer_ids": (0, 9)}, "another-target", "target_layer_ids"),
        ({"vocab": 128}, "vocabulary", "vocab_size"),
    ],
)
def test_a_drafter_that_does_not_fit_is_an_error_that_names_the_field(
    tmp_path: Path, target: Path, changes: dict[str, object], name: str, field: str
) -> None:
    folder = write_tiny_drafter(tmp_path / "d", **{"vocab": VOCAB, **changes})  # type: ignore[arg-type]
    report = examine(str(target), str(folder), dtype="float32")
    finding = found(report)[name]
    assert finding.severity == "error"
    assert finding.figures["field"] == field
    assert field in finding.known
    assert "tau" not in report.measured


def test_a_drafter_folder_that_cannot_be_read_is_an_error(tmp_path: Path, target: Path, domino: Path) -> None:
    folder = broken(tmp_path / "d", domino, projector_type=None)
    finding = found(examine(str(target), str(folder), dtype="float32"))["unusable-drafter"]
    assert finding.severity == "error"
    assert "embed_proj" in finding.known


def test_a_drafter_with_another_tokenizer_is_an_error(tmp_path: Path, target: Path, domino: Path) -> None:
    folder = broken(tmp_path / "d", domino)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    assert "vocabulary" not in found(examine(str(target), str(folder), dtype="float32", max_new_tokens=8))
    entries = json.loads((folder / "tokenizer.json").read_text())
    vocab = entries["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (folder / "tokenizer.json").write_text(json.dumps(entries))
    finding = found(examine(str(target), str(folder), dtype="float32"))["vocabulary"]
    assert (finding.severity, finding.figures["differing"]) == ("error", 2)


def test_a_tokenizer_with_more_tokens_than_the_target_is_an_error(tmp_path: Path, target: Path) -> None:
    shutil.copytree(target, tmp_path / "t")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(f"word{i}") for i in range(20)])
    tokenizer.save(str(tmp_path / "t/tokenizer.json"))
    finding = found(examine(str(tmp_path / "t"), dtype="float32"))["vocabulary"]
    assert finding.severity == "error"
    assert finding.figures == {"tokenizer": 280, "target": VOCAB}


def test_a_draft_vocabulary_that_lacks_what_the_target_says(tmp_path: Path, target: Path) -> None:
    folder = write_tiny_drafter(tmp_path, vocab=VOCAB, draft_vocab=20, block=5)
    finding = found(examine(str(target), str(folder), dtype="float32", max_new_tokens=24))["draft-vocabulary"]
    assert finding.severity == "warning"
    assert finding.figures["share"] < 0.5
    assert finding.figures["size"] == 20


def test_answers_too_short_to_judge_by_are_said_to_be(target: Path, domino: Path) -> None:
    report = examine(str(target), str(domino), dtype="float32", prompts=["Why?"], max_new_tokens=8)
    assert found(report)["short-answers"].severity == "warning"
    assert "tau" not in report.measured


def test_without_a_drafter_target_and_machine_are_examined(target: Path) -> None:
    report = examine(str(target), dtype="float32", max_new_tokens=8)
    assert found(report)["no-drafter"].severity == "note"
    assert report.drafter is None
    assert report.count("error") == 0


def test_wrong_use_is_no_finding(target: Path, domino: Path) -> None:
    with pytest.raises(ModelNotFound):
        examine(str(target), "no-such-drafter", dtype="float32")
    with pytest.raises(InvalidRequest, match="does not draft"):
        examine(str(target), str(domino), method="ar", dtype="float32")
    with pytest.raises(InvalidRequest, match="does not draft"):
        examine(str(target), "none", method="lookup", dtype="float32")
    with pytest.raises(InvalidRequest, match="budget has no effect with method domino"):
        examine(str(target), str(domino), method="domino", budget=9, dtype="float32")
    with pytest.raises(InvalidRequest, match="shorter"):
        examine(str(target), str(domino), prompts=["x" * 600], dtype="float32")


def test_a_rope_base_that_is_not_the_targets_is_noted_where_it_does_not_matter(tmp_path: Path, target: Path) -> None:
    """A random drafter foresees nothing with either, so only the configs tell."""
    folder = broken(tmp_path / "b", write_tiny_drafter(tmp_path / "d", vocab=VOCAB, block=5), rope_theta=20000.0)
    report = examine(str(target), str(folder), dtype="float32", max_new_tokens=24)
    finding = found(report)["rope-theta"]
    assert finding.severity == "note"
    assert (finding.figures["drafter"], finding.figures["target"]) == (20000.0, 10000.0)
    assert any(one["value"] == 10000.0 for one in report.measured["tried"])


def test_findings_come_worst_first() -> None:
    report = Report("t", "d")
    for severity in ("note", "error", "warning"):
        report.add(Finding(severity, severity, "", "", ""))  # type: ignore[arg-type]
    report.add(None)
    assert [finding.severity for finding in report.findings] == ["error", "warning", "note"]
    assert (report.count("error"), report.count("note")) == (1, 1)
