"""The README.md beside a trained drafter: what it is, what it was trained on, how well it drafts."""

from __future__ import annotations

import csv
import platform
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

import torch

from dominotree import __version__
from dominotree.drafters.config import DrafterConfig
from dominotree.train.data import Corpus
from dominotree.train.fit import FitSettings

__all__ = ["LICENCES", "write_model_card"]

LICENCES = {
    "gsm8k": ("GSM8K, train part", "MIT"),
    "mbpp": ("MBPP, train part", "CC BY 4.0"),
    "alpaca": ("Stanford Alpaca instructions", "CC BY-NC 4.0 (non-commercial)"),
    "code": ("Code Alpaca instructions", "CC BY-NC 4.0 (non-commercial)"),
    "seed": ("self-instruct seed tasks", "Apache-2.0"),
}
"""Where prompts of a corpus come from, by the source name in its index, and under which licence."""


def write_model_card(
    folder: str | Path,
    *,
    target: str,
    config: DrafterConfig,
    settings: FitSettings,
    corpus: Corpus,
    log: str | Path,
    started_from: str | None,
) -> None:
    """Write `folder/README.md`: shape, data with licences, settings, learning curve and tau from `log`."""
    kind = "Domino" if config.is_domino else "DFlash"
    text = f"""# {kind} drafter for {target}

Proposes tokens for speculative decoding of `{target}`; of no use without it, which lends embedding and head.
Trained by `dominotree train fit` (dominotree {__version__}, torch {torch.__version__}, {platform.machine()}),
started from {started_from or "random weights"}.

## Shape

{_table(("field", "value"), config.to_dict() | config.to_dict()["dflash_config"], skip={"dflash_config"})}

## Data

The target's own answers to prompts of these sources; only they were trained on, not the sources' reference
answers.

{_data_table(corpus)}

{_skipped(corpus)}

## Training

{_table(("setting", "value"), asdict(settings))}

## Held-out acceptance

Tokens a round, the target's own one included, when the drafter's greedy chain follows held-out answers
(teacher forcing; for greedy answers this is what decoding a chain at temperature 0 gives). `tau` with the
correction, `base tau` without; trees accept more.

{_curve(Path(log))}
"""
    scratch = Path(folder) / "README.md.tmp"
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(Path(folder) / "README.md")


def _table(head: tuple[str, str], rows: dict[str, object], skip: Collection[str] = ()) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows.items() if name not in skip])


def _data_table(corpus: Corpus) -> str:
    answers, tokens = Counter[str](), Counter[str]()
    for sample in corpus.samples:
        answers[sample.source] += 1
        tokens[sample.source] += sample.answer_length
    lines = ["| source | licence of the prompts | answers | answer tokens |", "|---|---|---|---|"]
    for source, count in answers.most_common():
        name, licence = LICENCES.get(source, (source, "not known to dominotree: see whoever made the corpus"))
        lines.append(f"| {name} | {licence} | {count} | {tokens[source]} |")
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
