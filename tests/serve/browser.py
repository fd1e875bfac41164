"""A headless Chromium, where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
)


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser; skips the tests where playwright or Chromium is not installed."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(QUIET), headless=True)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def tab(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page of its own at `url`; what goes wrong in it, or what it loads from elsewhere, fails the test."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    page, wrong = context.new_page(), []
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda message: wrong.append(message.text) if "Security" in message.text else None)
    origin = url.partition("?")[0].rstrip("/")
    page.on("request", lambda request: None if request.url.startswith(origin) else wrong.append(request.url))
    try:
        page.goto(url)
        yield page
        assert wrong == []
    finally:
        context.close()
