"""Whether the drafter is this target's at all."""

from __future__ import annotations

from pathlib import Path

from dominotree.doctor.findings import Finding
from dominotree.doctor.foresight import Foresight
from dominotree.drafters.config import DrafterConfig
from dominotree.errors import DominoTreeError, InvalidCheckpoint
from dominotree.pair import NIL_ACCEPTANCE
from dominotree.targets.fingerprint import fingerprint, levels_per_block

FOUR_BITS = 16
_VOCABULARY_FIELDS = ("vocab_size", "mask_token_id", "d2t")


def misfit_finding(error: DominoTreeError) -> Finding:
    """A drafter that cannot be loaded for this target."""
    field = error.field if isinstance(error, InvalidCheckpoint) else None
    if field in _VOCABULARY_FIELDS:
        name, what = "vocabulary", "the drafter was made for another vocabulary"
    elif field is not None:
        name, what = "another-target", "the drafter was made for another target"
    else:
        name, what = "unusable-drafter", "the drafter cannot be used"
    return Finding(name, "error", what, str(error), "use a drafter that was trained for this target", {"field": field})


def weights_finding(config: DrafterConfig, target_folder: Path) -> Finding | None:
    """A drafter that was trained on other weights, or that does not say on which and meets quantised ones."""
    held, levels = config.target_fingerprint, levels_per_block(target_folder)
    kind = f"a block of 32 weights takes {levels} different values here" + (
        ", so they were once quantised to 4 bits" if levels <= FOUR_BITS else ""
    )
    remedy = "use the target it was trained on, or train it further on this one (dominotree train fit --init-from)"
    if held is None:
        if levels > FOUR_BITS:
            return None
        return Finding(
            "quantised-target",
            "warning",
            "the target's weights are a quantised copy, and the drafter does not say that it was trained on that",
            f"{kind}; the drafter's config has no target_fingerprint",
            remedy,
            {"levels": levels},
        )
    ours = fingerprint(target_folder)
    if held == ours:
        return None
    return Finding(
        "another-target",
        "warning",
        "the drafter was trained on other weights: another model, another fine-tune or another quantisation",
        f"target_fingerprint is {held} in the drafter's config, and this target's is {ours}; {kind}",
        remedy,
        {"drafter": held, "target": ours, "levels": levels},
    )


def acceptance_finding(configured: Foresight, best: Foresight, tried: int) -> Finding | None:
    """A drafter that is hardly ever right, however its config is read."""
    if best.tau >= NIL_ACCEPTANCE:
        return None
    return Finding(
        "tau-near-1",
        "error",
        "the drafter is hardly ever right: what is generated is correct, and drafting only costs time",
        f"over {len(best.accepted)} drafts along the target's own answers tau is {configured.tau:.2f}, and "
        f"{best.tau:.2f} with the best of {tried} other settings; 1.00 is no help at all",
        "check that the drafter was made for this target and these prompts, or decode with --method ar",
        {"tau": configured.tau, "best_tau": best.tau, "tried": tried},
    )
