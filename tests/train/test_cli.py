"""`dominotree train fit` from the command line."""

from __future__ import annotations

from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from dominotree.cli.train import app
from dominotree.drafters.checkpoint import read_checkpoint
from dominotree.errors import InvalidRequest
from dominotree.targets.fingerprint import fingerprint
from dominotree.train.data import CorpusError
from train.tiny_run import write_corpus

CONFIG = """
[drafter]
layers = 1
block_size = 4
gru_hidden_dim = 8
emb_dim = 4
draft_vocab_size = 64
target_layer_ids = [0, 2]

[fit]
packs = 1
sequences = 4
anchors = 6
eval_every = 2
"""


def fit(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["fit", *map(str, words)])


def test_fit_writes_a_drafter_with_its_card_and_goes_on_where_it_was(
    tmp_path: Path, target: Path, corpus: Path
) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    words = ["--target", target, "--data", corpus, "--out", tmp_path / "run", "--config", tmp_path / "c.toml"]
    done = fit(*words, "--steps", "2", "--held-out", "4")
    assert done.exit_code == 0, done.output
    assert "held-out tau" in done.output
    config, _ = read_checkpoint(tmp_path / "run/drafter")
    assert (config.is_domino, config.num_hidden_layers) == (True, 1)
    assert config.target_fingerprint == fingerprint(target)
    card = (tmp_path / "run/drafter/README.md").read_text()
    for told in ("kind0", "licence", "| muon_lr | 0.0025 |", "| 2 | ", "block_size | 4"):
        assert told in card
    again = fit(*words, "--steps", "4", "--held-out", "4")
    assert "step 2" in again.output
    assert "step 4/4" in again.output
    (tmp_path / "run/drafter/README.md").unlink()
    exported = fit(*words, "--held-out", "4", "--export")
    assert exported.exit_code == 0, exported.output
    assert "| steps | 4 |" in (tmp_path / "run/drafter/README.md").read_text()


def test_fit_without_a_projector_makes_a_plain_dflash_drafter(tmp_path: Path, target: Path, corpus: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    done = fit(
        "--target", target, "--data", corpus, "--out", tmp_path / "run", "--config", tmp_path / "c.toml",
        "--projector", "none", "--steps", "2", "--held-out", "4",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert not read_checkpoint(tmp_path / "run/drafter")[0].is_domino


def test_skipped_sequences_are_counted_aloud(tmp_path: Path, target: Path) -> None:
    sequences = [([5, 6], [7, 8, 9, 10])] * 6 + [([5], []), ([5], [6])]
    (tmp_path / "c.toml").write_text(CONFIG)
    done = fit(
        "--target", target, "--data", write_corpus(tmp_path / "data", sequences), "--out", tmp_path / "run",
        "--config", tmp_path / "c.toml", "--steps", "1", "--held-out", "2",
    )  # fmt: skip
    assert "skipped 1 sequences: empty answer" in done.output
    assert "skipped 1 sequences: answer too short" in done.output


def test_a_broken_corpus_or_config_is_one_line(tmp_path: Path, target: Path, corpus: Path) -> None:
    missing = fit("--target", target, "--data", tmp_path / "nothing", "--out", tmp_path / "run")
    assert isinstance(missing.exception, CorpusError)
    (tmp_path / "c.toml").write_text("[model]\n")
    bad = fit("--target", target, "--data", corpus, "--out", tmp_path / "run", "--config", tmp_path / "c.toml")
    assert isinstance(bad.exception, InvalidRequest)
    (tmp_path / "c.toml").write_text("[fit]\nepochs = 3\n")
    worse = fit("--target", target, "--data", corpus, "--out", tmp_path / "run", "--config", tmp_path / "c.toml")
    assert "epochs" in str(worse.exception)
