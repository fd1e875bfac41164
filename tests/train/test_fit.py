"""Training runs: they learn, resume to the same losses, and decode as well as they say."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from dominotree.drafters.checkpoint import draft_token_ids, read_checkpoint
from dominotree.errors import InvalidRequest, NumericalError
from dominotree.train.evaluate import walk
from dominotree.train.fit import FitSettings, Trainer
from train.tiny_run import STOP, tiny_trainer, write_corpus


def rows(trainer: Trainer) -> list[dict[str, str]]:
    with (trainer.folder / "log.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("projector", ["domino", "none"])
@pytest.mark.parametrize("shift_label", [True, False])
def test_a_trained_drafter_beats_an_untrained_one(
    tmp_path: Path, target: Path, corpus: Path, projector: str, shift_label: bool
) -> None:
    trainer = tiny_trainer(target, corpus, tmp_path, projector=projector, shift_label=shift_label, block_size=5)
    before = trainer.evaluate()
    after = trainer.run()
    assert after.tau > before.tau + 0.5
    assert after.accuracy[1] > 0.5
    if projector == "domino":
        assert after.tau > after.base_tau - 0.4  # a run this short leaves the correction where rounding takes it
    config, tensors = read_checkpoint(tmp_path / "drafter")
    assert config == trainer.model.config
    ids = draft_token_ids(tensors)
    assert ids is not None
    assert STOP in ids


def test_acceptance_weights_learn_too(tmp_path: Path, target: Path, corpus: Path) -> None:
    trainer = tiny_trainer(target, corpus, tmp_path, weighting="acceptance")
    before = trainer.evaluate()
    assert trainer.run().tau > before.tau + 0.4


def test_a_whole_vocabulary_drafter_needs_nothing_of_ours(tmp_path: Path, target: Path, corpus: Path) -> None:
    tiny_trainer(target, corpus, tmp_path, draft_vocab_size=0, steps=2, eval_every=2).run()
    config, tensors = read_checkpoint(tmp_path / "drafter")
    assert config.draft_vocab_size is None
    assert "draft_vocab_size" not in config.to_dict()
    assert tensors["embed_proj.2.weight"].shape[0] == 96


def test_a_killed_run_resumes_to_the_same_steps_and_losses(tmp_path: Path, target: Path, corpus: Path) -> None:
    whole = tiny_trainer(target, corpus, tmp_path / "whole", steps=12, eval_every=4)
    whole.run()
    killed = tiny_trainer(target, corpus, tmp_path / "killed", steps=12, eval_every=4)

    def stop(row: dict[str, Any]) -> None:
        if row["step"] == 6:
            raise KeyboardInterrupt

    killed.on_log = stop
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    resumed = tiny_trainer(target, corpus, tmp_path / "killed", steps=12, eval_every=4)
    assert resumed.step == 4
    resumed.run()
    names = ("step", "anchors", "epoch", "lr", "lambda", "loss", "nll", "grad_norm", "tau", "accuracy")
    one, two = ([[row[name] for name in names] for row in rows(t)] for t in (whole, resumed))
    assert one == two
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "whole/drafter" / name).read_bytes() == (tmp_path / "killed/drafter" / name).read_bytes()


def test_a_run_of_another_shape_is_refused(tmp_path: Path, target: Path, corpus: Path) -> None:
    tiny_trainer(target, corpus, tmp_path, steps=1, eval_every=1).run()
    with pytest.raises(InvalidRequest, match="another drafter shape"):
        tiny_trainer(target, corpus, tmp_path, steps=2, gru_hidden_dim=24)


def test_training_goes_on_from_a_given_drafter(tmp_path: Path, target: Path, corpus: Path) -> None:
    from dominotree.train.prepare import DrafterShape, prepare
    from train.tiny_run import SETTINGS

    first = tiny_trainer(target, corpus, tmp_path / "one")
    first.run()
    settings = FitSettings.from_dict({**SETTINGS, "steps": 1})
    again = prepare(
        target,
        corpus,
        tmp_path / "two",
        settings,
        DrafterShape(),
        init_from=tmp_path / "one/drafter",
        bf16=False,
        held_out=4,
    )
    assert again.model.config == first.model.config
    assert again.evaluate().tau == pytest.approx(first.best_tau, abs=0.1)


def test_a_plain_drafter_starts_from_the_backbone_of_a_domino_one(tmp_path: Path, target: Path, corpus: Path) -> None:
    from dominotree.train.prepare import DrafterShape, prepare
    from train.tiny_run import SETTINGS

    tiny_trainer(target, corpus, tmp_path / "one").run()
    settings = FitSettings.from_dict({**SETTINGS, "steps": 1, "eval_every": 1})
    domino, plain = (
        prepare(
            target,
            corpus,
            tmp_path / projector,
            settings,
            DrafterShape(projector=projector),
            init_from=tmp_path / "one/drafter",
            bf16=False,
            held_out=4,
        )
        for projector in ("domino", "none")
    )
    assert plain.evaluate().tau == domino.evaluate().base_tau
    plain.run()
    config, tensors = read_checkpoint(tmp_path / "none/drafter")
    assert not config.is_domino
    assert "gru_hidden_dim" not in str(config.to_dict())
    assert not [name for name in tensors if name.startswith(("prefix_gru", "embed_proj"))]


def test_patience_ends_a_run_that_does_not_improve(tmp_path: Path, target: Path, corpus: Path) -> None:
    trainer = tiny_trainer(target, corpus, tmp_path, steps=50, eval_every=2, muon_lr=0.0, adamw_lr=0.0, patience=3)
    trainer.run()
    assert trainer.step == 8  # the first evaluation is the best, three more are not better


def test_a_nan_stops_the_run_before_it_reaches_the_weights(tmp_path: Path, target: Path, corpus: Path) -> None:
    trainer = tiny_trainer(target, corpus, tmp_path)
    kept = trainer.model.fc.weight.detach().clone()
    with torch.no_grad():
        trainer.model.hidden_norm.weight.fill_(float("nan"))
    with pytest.raises(NumericalError, match="step 0"):
        trainer.train_step()
    assert torch.equal(trainer.model.fc.weight, kept)


def test_the_log_tells_lambda_rates_and_held_out_figures(tmp_path: Path, target: Path, corpus: Path) -> None:
    trainer = tiny_trainer(target, corpus, tmp_path, steps=8, eval_every=4, base_until=0.5, warmup=2)
    trainer.run()
    told = rows(trainer)
    assert [float(row["lambda"]) for row in told] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0]
    assert [bool(row["base_nll"]) for row in told] == [True] * 4 + [False] * 4
    assert [bool(row["tau"]) for row in told] == [False, False, False, True] * 2
    assert float(told[0]["lr"]) < float(told[1]["lr"]) > float(told[-1]["lr"])


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"epochs": 3}, "epochs"),
        ({"steps": "many"}, "steps"),
        ({"packs": True}, "packs"),
        ({"clip": "1"}, "clip"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        FitSettings.from_dict(values)


def test_an_unknown_weighting_is_named() -> None:
    with pytest.raises(InvalidRequest, match="loud"):
        FitSettings(weighting="loud").weigh()


def test_walking_an_answer_counts_rounds_as_a_chain_decoder_does() -> None:
    yes, no = [True, True], [False, True]
    assert walk(torch.tensor([no, no, no])) == (3, 3)
    assert walk(torch.tensor([yes, no, no, yes])) == (2, 4)
    assert walk(torch.tensor([[True, False], no, yes])) == (2, 3)


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("projector", ["domino", "none"])
def test_accuracy_along_an_answer_is_acceptance_when_decoding(
    tmp_path: Path, target: Path, projector: str, shift_label: bool
) -> None:
    """Overfit on the target's answer to one prompt, then decode that prompt."""
    import dominotree as dt
    from dominotree.targets.load import load_target

    model = load_target(target, dtype=torch.float32, device=torch.device("cpu"))
    plain = dt.Pair(model, None)
    prompt = [5, 17, 33, 60]
    answer = plain.generate(prompt, method="ar", max_new_tokens=40).token_ids
    folder = write_corpus(tmp_path / "c", [(prompt, answer)])
    trainer = tiny_trainer(
        target, folder, tmp_path / "run", held_out=0, steps=60, eval_every=60, sequences=1,
        projector=projector, shift_label=shift_label, block_size=5,
    )  # fmt: skip
    told = trainer.run()
    config, tensors = read_checkpoint(tmp_path / "run/drafter")
    pair = dt.Pair(model, None, dt.Drafter(config, tensors, model))
    method = "domino" if projector == "domino" else "dflash"
    out = pair.generate(prompt, method=method, max_new_tokens=40)
    assert out.token_ids == answer
    # the first answer token comes from the prompt's own pass, and is no draft's; a checkpoint is rounded to bf16
    assert out.stats.rounds == pytest.approx((len(answer) - 1) / told.tau, abs=1)
    assert told.tau > 2
