"""What an examination comes to: findings, each with how it is known and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """Something that nothing else tells.

    `name` is for programs, `what` says it in one sentence, `known` how it was found, with the figures that `figures`
    holds again by name, `remedy` what to do. An error makes drafting useless or the text wrong, a warning costs speed,
    a note costs nothing here.
    """

    name: str
    severity: Severity
    what: str
    known: str
    remedy: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """Findings about a pair on this machine, the worst first, and what was measured on the way."""

    target: str
    drafter: str | None
    findings: list[Finding] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)

    def add(self, *found: Finding | None) -> None:
        """Adds what was found; None is nothing."""
        self.findings += [finding for finding in found if finding is not None]
        self.findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))

    def count(self, severity: Severity) -> int:
        """Findings of that severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)
