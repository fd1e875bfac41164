"""Finds what otherwise fails silently: a drafter misread or misplaced, a machine misused."""

from dominotree.doctor.examine import examine
from dominotree.doctor.findings import Finding, Report

__all__ = ["Finding", "Report", "examine"]
