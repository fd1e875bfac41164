"""Fitting a drafter to a target: the resumable training loop.

The recipe follows DFlash (arXiv 2602.06036) and Domino (arXiv 2605.29707): many blocks a sequence, a loss
anchored at the base logits at first, weights that fall with depth; optimised by Muon.
"""

from __future__ import annotations

import csv
import math
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dominotree.drafters.checkpoint import write_checkpoint
from dominotree.drafters.config import DrafterConfig
from dominotree.errors import InvalidRequest, NumericalError
from dominotree.train.batches import Deck, make_batch, pick_anchors
from dominotree.train.evaluate import FrozenTarget, HeldOut, block_inputs, evaluate
from dominotree.train.features import FeatureCache
from dominotree.train.loss import Weighting, acceptance_weights, draft_loss, exponential_weights
from dominotree.train.model import DrafterModel
from dominotree.train.settings import Check, Settings, number, one_of, whole

__all__ = ["FitSettings", "Trainer", "read_state", "write_drafter"]

_COLUMNS = (
    "step", "anchors", "epoch", "sequences", "lr", "lambda", "loss", "nll", "base_nll", "grad_norm",
    "anchors_per_s", "tau", "base_tau", "accuracy", "minutes",
)  # fmt: skip


_SEEN = 60


@dataclass(frozen=True)
class FitSettings(Settings):
    """How to train. Learning rates are for Muon (matrices) and AdamW (the rest), both warmed up and decayed
    alike.

    A step is `packs` times `sequences` sequences with up to `anchors` blocks each. `base_share` is the weight
    lambda of the base logits' loss at the start, falling linearly to 0 at `base_until` of the steps.
    `weighting` is "exponential" (with `gamma`) or "acceptance" (with `alpha`). The state is saved at every
    evaluation and every `save_minutes`. `patience` evaluations without a better tau end the run; 0: never.
    """

    steps: int = 2000
    packs: int = 2
    sequences: int = 4
    anchors: int = 48
    muon_lr: float = 2.5e-3
    adamw_lr: float = 2.5e-3
    weight_decay: float = 0.1
    warmup: int = 40
    final_lr: float = 0.02
    clip: float = 1.0
    base_share: float = 1.0
    base_until: float = 0.5
    weighting: str = "exponential"
    gamma: float = 4.0
    alpha: float = 0.5
    soft_share: float = 0.7
    ema: float = 0.998
    eval_every: int = 100
    patience: int = 0
    save_minutes: float = 4.0
    seed: int = 0
    compile: bool = False

    noun = "Training"
    checks: ClassVar[Mapping[str, Check]] = {
        **dict.fromkeys(("steps", "packs", "sequences", "anchors", "eval_every"), whole(1)),
        **dict.fromkeys(("warmup", "patience", "seed"), whole(0)),
        **dict.fromkeys(("muon_lr", "adamw_lr", "weight_decay", "base_until", "alpha", "save_minutes"), number(0)),
        **dict.fromkeys(("final_lr", "base_share", "soft_share", "ema"), number(0, 1)),
        **dict.fromkeys(("clip", "gamma"), number(1e-6)),
        "weighting": one_of("exponential", "acceptance"),
        "compile": one_of(True, False),
    }

    def weigh(self) -> Weighting:
        """The weights of draft depths that these settings name."""
        return exponential_weights(self.gamma) if self.weighting == "exponential" else acceptance_weights(self.alpha)

    def lr_share(self, step: int) -> float:
        """The learning rate at `step` as a share of its peak: linear warm-up, then cosine to `final_lr`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * done))

    def base_share_at(self, step: int) -> float:
        """Lambda at `step`."""
        return self.base_share * max(0.0, 1 - step / max(1.0, self.base_until * self.steps))


def read_state(folder: str | Path) -> dict[str, Any]:
    """What the run in `folder` saved last, tensors memory-mapped; empty where there is none.

    Raises `InvalidRequest` for a run that does not say which tokens it drafts.
    """
    file = Path(folder) / "state.pt"
    if not file.exists():
        return {}
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidRequest(f"{file} is damaged ({reason:.80}): restore it, or begin another run.") from error
    if "draft_tokens" not in state:
        raise InvalidRequest(
            f"The run in {folder} is of an earlier version, expected one whose {file.name} has its draft tokens: begin "
            f"another with --init-from {file.parent / 'drafter'}."
        )
    return state


def write_drafter(
    folder: str | Path, config: DrafterConfig, draft_tokens: Tensor, weights: Mapping[str, Tensor]
) -> None:
    """Write a drafter in the released form, bf16; `draft_tokens` int64 `[draft_vocab]`."""
    tensors = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    if config.draft_vocab_size is not None:
        tensors["d2t"] = draft_tokens - torch.arange(len(draft_tokens))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, draft_tokens, True)
    write_checkpoint(folder, config, tensors)


class Trainer:
    """One training run in `folder`: `state.pt` to resume from, `log.csv`, and the best drafter in `drafter/`.

    A run found in `folder` (see `prepare`) is gone on with, to the same steps and losses. Sequences from the cache's
    `held_out` on are trained on as they become ready.
    """

    def __init__(
        self,
        folder: str | Path,
        model: DrafterModel,
        frozen: FrozenTarget,
        cache: FeatureCache,
        settings: FitSettings,
        *,
        started_from: str | None = None,
        on_log: Callable[[dict[str, Any]], None] = lambda row: None,
    ) -> None:
        self.folder, self.model, self.frozen, self.cache = Path(folder), model, frozen, cache
        self.settings, self.started_from, self.on_log = settings, started_from, on_log
        self.device = frozen.lm_head.device
        self.model.to(self.device)
        self.step, self.anchors, self.best_tau, self.stale, self.seconds = 0, 0, 0.0, 0, 0.0
        self.optimizers = _optimizers(model, settings)
        self.ema = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        self.deck = Deck([cache.sample(i).length for i in range(len(cache.order))], settings.sequences, settings.seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / "state.pt").exists():
            self._resume()
        self._cut_log()
        if settings.compile:
            for layer in model.layers:
                layer.compile(dynamic=True)

    # One step

    def _batch_loss(self, generator: torch.Generator, base_share: float) -> tuple[Any, int]:
        config, settings = self.model.config, self.settings
        pack = [self.cache.load(place) for place in self.deck.draw(self.cache.held_out, self.cache.ready)]
        anchors = [pick_anchors(sample, settings.anchors, generator) for sample in pack]
        scoring = self.frozen.scoring([sample.tokens for sample in pack])
        batch = make_batch(pack, anchors, config, scoring.draft_ids, soft_share=settings.soft_share).to(self.device)
        blocks, path = block_inputs(self.frozen, batch, config.block_size, config.mask_token_id)
        dtype, last = scoring.head.dtype, self.model.last_correction
        with torch.autocast(self.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            context = self.model.context(batch.features.to(dtype))
            hidden = self.model(blocks, batch.anchors, context)
            inner = self.model.correction(hidden, path).flatten(0, 1) if config.is_domino else None
        loss = draft_loss(
            hidden.flatten(0, 1),
            inner,
            None if last is None else F.pad(last, (0, 0, 0, len(scoring.words))),  # words are not corrected
            scoring.head,
            batch.labels,
            base_share=base_share,
            weighting=settings.weigh(),
        )
        return loss, sum(len(places) for places in anchors)

    def train_step(self) -> dict[str, Any]:
        """One optimiser step; returns what the log keeps of it. Raises `NumericalError` before a NaN reaches
        a weight.
        """
        settings, begun = self.settings, time.monotonic()
        share, base_share = settings.lr_share(self.step), settings.base_share_at(self.step)
        generator = torch.Generator().manual_seed(settings.seed * 7_368_787 + self.step)
        for optimizer, peak in zip(self.optimizers, (settings.muon_lr, settings.adamw_lr), strict=True):
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        sums, anchors = torch.zeros(3), 0
        for _ in range(settings.packs):
            loss, count = self._batch_loss(generator, base_share)
            (loss.total / settings.packs).backward()
            sums += torch.stack([loss.total.detach(), loss.corrected, loss.base]).cpu() / settings.packs
            anchors += count
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip))
        if not math.isfinite(norm + float(sums.sum())):
            raise NumericalError(f"Training loss is {float(sums[0])} at step {self.step}: lower muon_lr and adamw_lr.")
        for optimizer in self.optimizers:
            optimizer.step()
        # a young average would be mostly the start
        decay = min(settings.ema, (1 + self.step) / (10 + self.step))
        for name, weight in self.model.named_parameters():
            self.ema[name].lerp_(weight.detach(), 1 - decay)
        self.step += 1
        self.anchors += anchors
        elapsed = time.monotonic() - begun
        self.seconds += elapsed
        return {
            "step": self.step,
            "anchors": self.anchors,
            "epoch": self.deck.state["epoch"],
            "sequences": self.deck.state["ready"] - self.deck.state["first"],
            "lr": settings.muon_lr * share,
            "lambda": base_share,
            "loss": float(sums[0]),
            "nll": float(sums[1]),
            "base_nll": float(sums[2]) if base_share > 0 and self.model.config.is_domino else "",
            "grad_norm": norm,
            "anchors_per_s": anchors / elapsed,
            "minutes": self.seconds / 60,
        }

    # The run

    def run(self) -> HeldOut:
        """Train to the end of the schedule, or until patience runs out; returns the last evaluation."""
        settings, result, saved = self.settings, None, time.monotonic()
        while self.step < settings.steps and not 0 < settings.patience <= self.stale:
            row = self.train_step()
            evaluated = self.step % settings.eval_every == 0 or self.step == settings.steps
            if evaluated:
                result = self.evaluate()
                row |= {
                    "tau": result.tau,
                    "base_tau": result.base_tau,
                    "accuracy": " ".join(f"{share:.3f}" for share in result.accuracy),
                }
                self._keep_if_best(result)
            self._log(row)
            if evaluated or time.monotonic() - saved > 60 * settings.save_minutes:
                self.save()
                saved = time.monotonic()
        return result or self.evaluate()

    def evaluate(self) -> HeldOut:
        """Acceptance of the averaged weights on the held-out sequences; with none held out, on the first
        ones.
        """
        places = range(self.cache.held_out or min(self.cache.ready, _SEEN))
        samples = [self.cache.load(place) for place in places]
        trained = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self._put(self.ema)
        try:
            return evaluate(self.model, self.frozen, samples)
        finally:
            self._put(trained)

    def _put(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(weights[name])

    def _keep_if_best(self, result: HeldOut) -> None:
        self.stale = 0 if result.tau > self.best_tau else self.stale + 1
        if result.tau > self.best_tau:
            self.best_tau = result.tau
            write_drafter(self.folder / "drafter", self.model.config, self.cache.draft_tokens, self.ema)

    # What is kept

    def save(self) -> None:
        """Write `state.pt`, whole or not at all."""
        state = {
            "settings": asdict(self.settings),
            "config": self.model.config.to_dict(),
            "draft_tokens": self.cache.draft_tokens,
            "held_out": self.cache.held_out_starts,
            "started_from": self.started_from,
            "step": self.step,
            "anchors": self.anchors,
            "best_tau": self.best_tau,
            "stale": self.stale,
            "seconds": self.seconds,
            "deck": self.deck.state,
            "model": dict(self.model.named_parameters()),
            "ema": self.ema,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        scratch = self.folder / "state.pt.tmp"
        torch.save(state, scratch)
        scratch.replace(self.folder / "state.pt")

    def _resume(self) -> None:
        state = torch.load(self.folder / "state.pt", map_location=self.device, weights_only=True)
        self._put(state["model"])
        self.ema = state["ema"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.anchors, self.best_tau = state["step"], state["anchors"], state["best_tau"]
        self.stale, self.seconds, self.started_from = state["stale"], state["seconds"], state["started_from"]
        self.deck.resume(state["deck"])

    def _cut_log(self) -> None:
        """Drop rows of steps after the state: they will be made again."""
        file = self.folder / "log.csv"
        if not file.exists():
            return
        with file.open(newline="", encoding="utf-8") as lines:
            rows = [row for row in csv.DictReader(lines) if row["step"].isdigit() and int(row["step"]) <= self.step]
        scratch = file.with_suffix(".tmp")
        with scratch.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, _COLUMNS)
            writer.writeheader()
            writer.writerows({name: row.get(name) or "" for name in _COLUMNS} for row in rows)
        scratch.replace(file)

    def _log(self, row: dict[str, Any]) -> None:
        file = self.folder / "log.csv"
        fresh = not file.exists()
        with file.open("a", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, _COLUMNS)
            if fresh:
                writer.writeheader()
            told = {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}
            writer.writerow(told)
        self.on_log(row)


def _optimizers(model: DrafterModel, settings: FitSettings) -> list[torch.optim.Optimizer]:
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if weight.dim() != 2]
    return [
        torch.optim.Muon(
            matrices, lr=settings.muon_lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=settings.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
