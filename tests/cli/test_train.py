"""`dominotree train`: from prompts to a drafter that is measured, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

from cli.conftest import Run
from dominotree.cli.train import _tau
from dominotree.generation import Stats

CONFIG = """
[drafter]
layers = 1
block_size = 4
gru_hidden_dim = 8
emb_dim = 4
draft_vocab_size = 64
target_layer_ids = [0, 1]

[fit]
packs = 1
sequences = 2
anchors = 4
eval_every = 2
"""


def test_prompts_become_a_corpus_a_drafter_and_a_measured_tau(bare: Run, model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(6)))
    (tmp_path / "c.toml").write_text(CONFIG)
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    collect = ["train", "collect", "--target", model, "--prompts", prompts, "--out", corpus, "--max-new-tokens", "24"]
    first = bare(*collect, "--limit", "4")
    assert first.exit_code == 0, first.output
    assert "answers to 4 conversations" in first.output
    assert "answers to 6 conversations" in bare(*collect).output  # goes on
    fit = ["train", "fit", "--target", model, "--data", corpus, "--out", run, "--config", tmp_path / "c.toml"]
    fitted = bare(*fit, "--steps", "2", "--held-out", "2")
    assert fitted.exit_code == 0, fitted.output
    measured = bare(
        "train", "eval", "--target", model, "--drafter", run / "drafter", "--prompts", prompts, "--limit", "2",
        "--max-new-tokens", "12", "--methods", "domino,dominotree",
    )  # fmt: skip
    assert measured.exit_code == 0, measured.output
    rows = [line.split() for line in measured.stdout.splitlines() if line.startswith("asked")]
    assert [row[1] for row in rows] == ["domino", "dominotree"]
    for row in rows:
        assert float(row[2]) >= 1.0  # tau
        assert int(row[3]) + int(row[5]) == 2  # ended and cut


def test_wrong_values_are_one_line(bare: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "say"}\n')
    collect = ["train", "collect", "--target", model, "--prompts", tmp_path / "asked.jsonl", "--out", tmp_path / "c"]
    for words, says in (
        ([*collect, "--temperatures", "0,warm"], "--temperatures is '0,warm'"),
        ([*collect, "--prompts", tmp_path / "none.jsonl"], "none.jsonl cannot be read"),
        (["train", "eval", "--target", model, "--drafter", tmp_path, "--prompts", tmp_path / "asked.jsonl"], "config"),
    ):
        refused = bare(*words)
        assert refused.exit_code != 0
        assert says in refused.output
        assert "Traceback" not in refused.output


def test_an_answer_without_a_round_has_no_tau() -> None:
    assert _tau([Stats(accepted=[3, 2]), Stats(), Stats(accepted=[1])]) == "1.750"
    assert _tau([Stats()]) == "-"


def test_conversations_too_long_for_the_target_are_counted_aloud(bare: Run, model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("say", "say " * 1100)))
    done = bare(
        "train", "collect", "--target", model, "--prompts", prompts, "--out", tmp_path / "c", "--max-new-tokens", "2"
    )
    assert done.exit_code == 0, done.output
    assert "skipped the rest of 1 conversations" in done.output
