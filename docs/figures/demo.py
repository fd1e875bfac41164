"""Draws docs/figures/demo.svg: what `dominotree demo` printed on this machine, as a terminal shows it.

python docs/figures/demo.py
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 92
FILE = Path(__file__).with_suffix(".svg")
_WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def main() -> None:
    """Run the demo, which must find the answers identical, and draw its output."""
    program = Path(sys.executable).with_name("dominotree")
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([program, "demo"], env=environment, text=True, check=True, **both)
    if not re.search(r"\byes\b", done.stdout):
        raise SystemExit("the demo did not find the answers identical")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ make demo", style="bold"))
    console.print(Text.from_ansi(done.stdout.strip()))
    drawn = console.export_svg(title="dominotree", unique_id="demo")
    FILE.write_text(_WEB_FONTS.sub("", drawn), encoding="utf-8")  # nothing is loaded from elsewhere
    print(FILE)


if __name__ == "__main__":
    main()
