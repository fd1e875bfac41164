"""The README.md beside a trained drafter: what it is, what it was trained on, how well it drafts."""

from __future__ import annotations

import csv
import platform
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from dominotree import __version__
from dominotree.drafters.config import DrafterConfig
from dominotree.files import write_whole
from dominotree.train.data import Corpus

__all__ = ["write_model_card"]


def write_model_card(
    folder: str | Path,
    *,
    target: str,
    run: Mapping[str, Any],
    corpus: Corpus,
    log: str | Path,
    licences: Mapping[str, str],
) -> None:
    """Write `folder/README.md`: shape, data, settings, learning curve and tau from `log`.

    `run` is what `fit.read_state` gives, `licences` has those of the sources in the corpus. One that is not given is
    told to be unknown: a source's name says nothing sure about whose it is.
    """
    config = DrafterConfig.from_dict(run["config"])
    kind, answers = "Domino" if config.is_domino else "DFlash", "held-out" if run["held_out"] else "trained-on"
    text = f"""# {kind} drafter for {target}

Proposes tokens for speculative decoding of `{target}`; of no use without it, which lends embedding and head.
Trained by `dominotree train fit` (dominotree {__version__}, torch {torch.__version__}, {platform.machine()}),
started from {run["started_from"] or "random weights"}.

## Shape

{_table(("field", "value"), config.to_dict() | config.to_dict()["dflash_config"], skip={"dflash_config"})}

## Data

The target's own answers to prompts of these sources; only they were trained on, not the sources' reference
answers. A drafter inherits what its prompts allow.

{_data_table(corpus, licences)}

{_skipped(corpus)}

## Training

{_table(("setting", "value"), run["settings"])}

## {answers.capitalize()} acceptance

Tokens a round, the target's own one included, when the drafter's greedy chain follows {answers} answers
(teacher forcing; for greedy answers this is what decoding a chain at temperature 0 gives). `tau` with the
correction, `base tau` without; trees accept more.

{_curve(Path(log))}
"""
    write_whole(Path(folder) / "README.md", text)


def _table(head: tuple[str, str], rows: dict[str, object], skip: Collection[str] = ()) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows.items() if name not in skip])


def _data_table(corpus: Corpus, licences: Mapping[str, str]) -> str:
    answers, tokens = Counter[str](), Counter[str]()
    for sample in corpus.samples:
        answers[sample.source] += 1
        tokens[sample.source] += sample.answer_length
    lines = ["| source | licence of the prompts | answers | answer tokens |", "|---|---|---|---|"]
    for source, count in answers.most_common():
        lines.append(f"| {source} | {licences.get(source, 'not known')} | {count} | {tokens[source]} |")
    return "\n".join(lines)


def _skipped(corpus: Corpus) -> str:
    if not corpus.skipped:
        return "No sequence was skipped."
    return "Skipped: " + ", ".join(f"{count} x {reason}" for reason, count in corpus.skipped.items()) + "."


def _curve(log: Path) -> str:
    lines = ["| step | anchors | lr | lambda | loss | tau | base tau |", "|---|---|---|---|---|---|---|"]
    if log.exists():
        with log.open(newline="", encoding="utf-8") as rows:
            for row in csv.DictReader(rows):
                if row["tau"]:
                    shown = ("step", "anchors", "lr", "lambda", "loss", "tau", "base_tau")
                    lines.append("| " + " | ".join(row[name] for name in shown) + " |")
    return "\n".join(lines)
