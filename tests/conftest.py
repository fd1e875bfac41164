"""Paths and settings shared by all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(min(2, torch.get_num_threads()))
