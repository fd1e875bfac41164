"""Training runs: they learn, resume to the same losses, and decode as well as they say."""

from __future__ import annotations

import csv
import re
import shutil
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dominotree.drafters.checkpoint import draft_token_ids, read_checkpoint
from dominotree.errors import InvalidCheckpoint, InvalidRequest, NumericalError
from dominotree.train import prepare as preparing
from dominotree.train.data import CorpusError, read_corpus
from dominotree.train.evaluate import walk
from dominotree.train.fit import FitSettings, Trainer
from dominotree.train.prepare import DrafterShape, prepare
from dominotree.train.settings import Settings
from train.tiny_run import SETTINGS, STOP, VOCAB, tiny_trainer, write_corpus, write_target


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


def test_a_run_killed_before_its_first_state_begins_its_log_anew(tmp_path: Path, target: Path, corpus: Path) -> None:
    begun = tiny_trainer(target, corpus, tmp_path / "run")
    for _ in range(3):
        begun._log(begun.train_step())
    again = tiny_trainer(target, corpus, tmp_path / "run")
    again._log(again.train_step())
    with (tmp_path / "run/log.csv").open() as lines:
        assert [row["step"] for row in csv.DictReader(lines)] == ["1"]


def test_a_damaged_state_is_named(tmp_path: Path, target: Path, corpus: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/state.pt").write_text("junk")
    with pytest.raises(InvalidRequest, match=r"state\.pt is damaged"):
        tiny_trainer(target, corpus, tmp_path / "run")


def test_a_run_of_another_shape_is_refused(tmp_path: Path, target: Path, corpus: Path) -> None:
    tiny_trainer(target, corpus, tmp_path, steps=1, eval_every=1).run()
    with pytest.raises(InvalidRequest, match="begun with gru_hidden_dim 16, now 24"):
        tiny_trainer(target, corpus, tmp_path, steps=2, gru_hidden_dim=24)


def grown(folder: Path, corpus: Path, first: Trainer) -> Path:
    """The corpus with as many sequences behind it, of tokens that a run on it neither drafts nor leaves unused."""
    held, drafted = read_corpus(corpus), first.cache.draft_tokens
    sequences = [(t[: s.prompt_length], t[s.prompt_length :]) for s in held.samples for t in [held.read(s).tolist()]]
    mask = first.model.config.mask_token_id
    rare = [mask, *(token for token in range(4, VOCAB) if token not in drafted and token != mask)]
    write_corpus(folder, [*sequences, *[([5, 6], rare * 3)] * len(sequences)])
    return folder


def test_a_run_keeps_its_vocabulary_its_mask_and_what_it_holds_out_when_the_corpus_grows(
    tmp_path: Path, target: Path, corpus: Path
) -> None:
    first = tiny_trainer(target, corpus, tmp_path / "run", steps=4, eval_every=2)
    first.run()
    more = grown(tmp_path / "more", corpus, first)
    fresh = tiny_trainer(target, more, tmp_path / "fresh", steps=1)
    assert not torch.equal(fresh.cache.draft_tokens, first.cache.draft_tokens)
    assert fresh.model.config.mask_token_id != first.model.config.mask_token_id
    again = tiny_trainer(target, more, tmp_path / "run", steps=6, eval_every=2)
    assert again.step == 4
    assert torch.equal(again.cache.draft_tokens, first.cache.draft_tokens)
    assert again.model.config == first.model.config
    assert again.cache.held_out_starts == first.cache.held_out_starts
    assert again.cache.ready == len(again.cache.order) == 2 * len(first.cache.order)
    again.run()
    assert torch.equal(draft_token_ids(read_checkpoint(tmp_path / "run/drafter")[1]), first.cache.draft_tokens)
    sharing = tiny_trainer(target, more, tmp_path / "sharing", steps=1, cache=tmp_path / "run/features")
    assert torch.equal(sharing.cache.draft_tokens, first.cache.draft_tokens)
    with pytest.raises(CorpusError, match="draft_tokens"):
        tiny_trainer(target, more, tmp_path / "other", draft_vocab_size=48, cache=tmp_path / "run/features")
    shutil.rmtree(tmp_path / "run/features")
    with pytest.raises(CorpusError, match="holds out other sequences"):
        tiny_trainer(target, more, tmp_path / "run", steps=6, eval_every=2)


def test_another_targets_features_are_not_trained_on(tmp_path: Path, target: Path, corpus: Path) -> None:
    tiny_trainer(target, corpus, tmp_path / "run", steps=1, eval_every=1).run()
    tuned = write_target(tmp_path / "tuned", seed=1)
    with pytest.raises(CorpusError, match="was made with target"):
        tiny_trainer(tuned, corpus, tmp_path / "other", cache=tmp_path / "run/features")
    with pytest.raises(InvalidRequest, match="begun with target_fingerprint"):
        tiny_trainer(tuned, corpus, tmp_path / "run", cache=tmp_path / "fresh")


def test_a_run_that_does_not_say_its_vocabulary_is_refused(tmp_path: Path, target: Path, corpus: Path) -> None:
    tiny_trainer(target, corpus, tmp_path, steps=1, eval_every=1).run()
    state = torch.load(tmp_path / "state.pt")
    del state["draft_tokens"]
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(InvalidRequest, match="--init-from"):
        tiny_trainer(target, corpus, tmp_path, steps=2)


def test_a_shape_that_does_not_fit_the_target_is_refused_before_its_features_are_read(
    tmp_path: Path, target: Path, corpus: Path
) -> None:
    for changes, named in (({"target_layer_ids": [1, 4]}, "layers 0 to 3"), ({"mask_token_id": 96}, "mask_token_id")):
        with pytest.raises(InvalidCheckpoint, match=named):
            tiny_trainer(target, corpus, tmp_path, **changes)
    assert not (tmp_path / "features").exists()


def test_training_goes_on_from_a_given_drafter(tmp_path: Path, target: Path, corpus: Path) -> None:
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
    again.run()
    resumed = tiny_trainer(target, corpus, tmp_path / "two", steps=2)
    assert (resumed.step, resumed.started_from) == (1, str(tmp_path / "one/drafter"))


def test_a_plain_drafter_starts_from_the_backbone_of_a_domino_one(tmp_path: Path, target: Path, corpus: Path) -> None:
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
    with pytest.raises(InvalidRequest, match="is plain DFlash"):
        prepare(
            target,
            corpus,
            tmp_path / "three",
            settings,
            DrafterShape(projector="domino"),
            init_from=tmp_path / "none/drafter",
            bf16=False,
            held_out=4,
        )


def test_patience_ends_a_run_that_does_not_improve(tmp_path: Path, target: Path, corpus: Path) -> None:
    trainer = tiny_trainer(target, corpus, tmp_path, steps=50, eval_every=2, muon_lr=0.0, adamw_lr=0.0, patience=3)
    trainer.run()
    assert trainer.step == 8  # the first evaluation is the best, three more are not better
    kept = (tmp_path / "state.pt").read_bytes()
    again = tiny_trainer(target, corpus, tmp_path, steps=50, eval_every=2, muon_lr=0.0, adamw_lr=0.0, patience=3)
    again.run()
    assert again.step == 8
    assert (tmp_path / "state.pt").read_bytes() == kept


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
    ("cls", "values", "named"),
    [
        (FitSettings, {"epochs": 3}, "'epochs' does not exist"),
        (FitSettings, {"steps": "many"}, "steps is 'many', expected a whole number of at least 1"),
        (FitSettings, {"packs": True}, "packs is True"),
        (FitSettings, {"sequences": 0}, "sequences is 0"),
        (FitSettings, {"eval_every": 0}, "eval_every is 0"),
        (FitSettings, {"warmup": 2.0}, "warmup is 2.0"),
        (FitSettings, {"clip": "1"}, "clip is '1', expected a number"),
        (FitSettings, {"gamma": 0}, "gamma is 0"),
        (FitSettings, {"muon_lr": float("nan")}, "muon_lr is nan"),
        (FitSettings, {"soft_share": 1.5}, "soft_share is 1.5, expected a number from 0 to 1"),
        (FitSettings, {"weighting": "loud"}, "weighting is 'loud', expected exponential or acceptance"),
        (FitSettings, {"compile": 1}, "compile is 1, expected true or false"),
        (DrafterShape, {"depth": 3}, "'depth' does not exist"),
        (DrafterShape, {"layers": "3"}, "layers is '3'"),
        (DrafterShape, {"pure_draft_prefix_len": True}, "pure_draft_prefix_len is True"),
        (DrafterShape, {"target_layer_ids": 5}, "target_layer_ids is 5, expected a list"),
        (DrafterShape, {"target_layer_ids": []}, "target_layer_ids is []"),
        (DrafterShape, {"draft_vocab_size": "8k"}, "draft_vocab_size is '8k'"),
        (DrafterShape, {"draft_vocab_size": 31}, "draft_vocab_size is 31, expected a whole number of at least 32"),
        (DrafterShape, {"projector": "foo"}, "projector is 'foo', expected domino or none"),
        (DrafterShape, {"mask_token_id": -1}, "mask_token_id is -1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(cls: type[Settings], values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(named)) as refusal:
        cls.from_dict(values)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("cls", [FitSettings, DrafterShape])
def test_every_setting_has_its_check_and_the_page_tells_its_default(cls: type[Settings]) -> None:
    page = (Path(__file__).parents[2] / "docs/train.md").read_text(encoding="utf-8")
    block = re.search(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    assert block is not None
    told = tomllib.loads(re.sub(r"^# (\w+ =)", r"\1", block[1], flags=re.MULTILINE))
    table = told["fit" if cls is FitSettings else "drafter"]
    defaults = asdict(cls())
    assert table.keys() == defaults.keys() == cls.checks.keys()
    assert {name: table[name] for name, value in defaults.items() if value is not None} == {
        name: value for name, value in defaults.items() if value is not None
    }
    cls.from_dict(table)


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


def test_steps_that_are_made_again_replace_those_on_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            self.seen: list[Any] = [purge_step]
            writers.append(self)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.seen.append((name, value, step))

        def flush(self) -> None:
            pass

    writers: list[Writer] = []
    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, board.__name__, board)
    monkeypatch.setattr(preparing.importlib.util, "find_spec", lambda name: True)
    write = preparing.tensorboard_writer("board")
    assert not writers
    write({"step": 5, "loss": 2.0, "tau": ""})
    write({"step": 6, "loss": 1.5})
    assert [writer.seen for writer in writers] == [[5, ("loss", 2.0, 5), ("loss", 1.5, 6)]]
