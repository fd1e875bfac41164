"""Serving the page: its files from memory, under a policy that lets nothing else run or load."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

PAGE = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # asked for anew each time, sent anew only when it has changed
}
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_ONLY_IN_TRACE_FILES = frozenset({"trace.html", "trace.js"})


def page_paths() -> dict[str, Path]:
    """The page's addresses, and the file at each."""
    files = [file for file in sorted(PAGE.iterdir()) if file.name not in _ONLY_IN_TRACE_FILES]
    return {"/" if file.name == "index.html" else f"/page/{file.name}": file for file in files}


def add_page(app: FastAPI) -> None:
    """Adds the page to a server's routes."""
    for path, file in page_paths().items():
        app.add_api_route(path, _sender(file), methods=["GET"], include_in_schema=False, response_model=None)


def _sender(file: Path) -> Callable[[Request], Awaitable[Response]]:
    body = file.read_bytes()
    kind = _KINDS[file.suffix]
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'

    async def send(request: Request) -> Response:
        known = [entry.strip().removeprefix("W/") for entry in request.headers.get("if-none-match", "").split(",")]
        headers = {**_HEADERS, "etag": tag}
        if tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    return send
