"""Paths and settings shared by all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)  # tiny models gain nothing from more, and threads that wait spin
