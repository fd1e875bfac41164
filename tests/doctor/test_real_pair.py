"""The default pair: healthy as it comes, and found out when its packaged drafter is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from doctor.healthy import broken
from dominotree.doctor import examine
from dominotree.hub import DEFAULT_PAIR, resolve_drafter

pytestmark = [pytest.mark.pair, pytest.mark.slow]

MACHINE = {"busy-machine", "threads", "no-kernels", "slower-than-plain"}


def test_the_default_pair_has_no_fault() -> None:
    report = examine(dtype="float32")
    assert {finding.name for finding in report.findings} <= MACHINE, report.findings
    assert report.measured["tau"] > 1.7


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [
        ("shift_label", False, True),
        ("target_layer_ids", [2, 10, 19, 28], (1, 9, 18, 27)),
        ("target_layer_ids", [0, 8, 17, 26], (1, 9, 18, 27)),
        ("mask_token_id", 0, None),  # special tokens look alike to this target, so several fit
    ],
)
def test_a_wrong_setting_is_found(tmp_path: Path, field: str, wrong: Any, right: Any) -> None:
    report = examine(drafter=str(broken(tmp_path, resolve_drafter(DEFAULT_PAIR), **{field: wrong})), dtype="float32")
    (finding,) = (one for one in report.findings if one.name not in MACHINE)
    assert finding.name == field.replace("_", "-")
    if right is not None:
        assert finding.figures["value"] in (right, (1, 10, 18, 27))  # the spaced default is as good to within noise
    assert finding.figures["tau"] > 0.95 * finding.figures["tau_configured"]
