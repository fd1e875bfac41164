"""One answer's trace as one HTML file, drawn by the modules of the page; it needs no server and no network."""

from __future__ import annotations

import html
import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).parent / "page"
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([a-z]+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:class|function\*?|const) (\w+))", re.MULTILINE)


def trace_file(trace: dict[str, Any]) -> str:
    """The file. `trace`: `prompt`, `about`, `method`, `text`, `rounds`, and `plain` (the rounds of plain decoding)."""
    style, script = _read("style.css"), bundle("trace")
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    parts = {
        "policy": policy,
        "title": html.escape(" ".join(trace["prompt"].split())[:60]),
        "style": style,
        "icon": _read("icon.svg").strip(),
        "data": json.dumps(trace, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        "script": script,
    }
    return re.sub(r"\{([a-z]+)\}", lambda found: parts[found[1]], _read("trace.html"))


def bundle(name: str) -> str:
    """A module and all that it imports as one script, each once, in a scope of its own, behind what it needs."""
    seen: set[str] = set()
    parts: list[str] = []

    def take(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        text = _read(f"{name}.js")
        for _, wanted in _IMPORT.findall(text):
            take(wanted)
        exports = ", ".join(_EXPORT.findall(text))
        body = _EXPORT.sub("", _IMPORT.sub(r"const \1 = module_\2;", text))
        parts.append(f"const module_{name} = (() => {{\n{body}return {{ {exports} }};\n}})();\n")

    take(name)
    return "".join(parts)


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
