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
    best = (tmp_path / "run/drafter/model.safetensors").read_bytes()
    exported = fit("--target", target, "--data", corpus, "--out", tmp_path / "run", "--export")
    assert exported.exit_code == 0, exported.output
    assert "step 4" in exported.output
    assert "tau" not in exported.output
    last, _ = read_checkpoint(tmp_path / "run/last")
    assert (last, last.target_fingerprint) == (config, fingerprint(target))
    assert "| steps | 4 |" in (tmp_path / "run/last/README.md").read_text()
    assert (tmp_path / "run/drafter/model.safetensors").read_bytes() == best
    nothing = fit("--target", target, "--data", corpus, "--out", tmp_path / "other", "--export")
    assert "No training run" in str(nothing.exception)


def test_nothing_held_out_is_said(tmp_path: Path, target: Path, corpus: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    done = fit(
        "--target", target, "--data", corpus, "--out", tmp_path / "run", "--config", tmp_path / "c.toml",
        "--steps", "2", "--held-out", "0",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "tau on what it trains on" in done.output
    assert "held-out" not in done.output + (tmp_path / "run/drafter/README.md").read_text().lower()


def test_the_card_has_the_licences_it_is_given_and_guesses_none(tmp_path: Path, target: Path) -> None:
    data = write_corpus(tmp_path / "data", [([5, 6], [7, 8, 9, 10])] * 6)
    index = data / "index.jsonl"
    index.write_text(index.read_text().replace("kind0", "code").replace("kind1", "gsm8k"))
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[licences]\ngsm8k = 3\n")
    run = ("--target", target, "--data", data, "--out", tmp_path / "run", "--steps", "1", "--held-out", "2")
    refused = fit(*run, "--config", wrong)
    assert "licence of 'gsm8k'" in str(refused.exception)
    (tmp_path / "c.toml").write_text(CONFIG + '\n[licences]\ngsm8k = "MIT"\n')
    fit(*run, "--config", tmp_path / "c.toml")
    card = (tmp_path / "run/drafter/README.md").read_text()
    assert "| code | not known | 2 |" in card and "| gsm8k | MIT | 2 |" in card


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


def test_wrong_values_are_found_before_the_target_is_looked_for(tmp_path: Path) -> None:
    config, given = tmp_path / "c.toml", ("--config", tmp_path / "c.toml")
    for content, words, says in (
        ("fit = 3\n", given, "fit = 3, expected tables"),
        ('[fit]\nweighting = "loud"\n', given, "weighting is 'loud'"),
        ("[drafter]\nlayers = 0\n", given, "layers is 0"),
        ("[drafter]\nlayers = 3\n", (*given, "--init-from", tmp_path / "d"), "'layers' has no effect with --init-from"),
        ("", ("--projector", "foo"), "projector is 'foo'"),
        ("", ("--device", "tpu"), "device 'tpu' is unknown"),
    ):
        config.write_text(content)
        refused = fit("--target", tmp_path / "none", "--data", tmp_path, "--out", tmp_path / "run", *words)
        assert isinstance(refused.exception, InvalidRequest), refused.output
        assert says in str(refused.exception)
