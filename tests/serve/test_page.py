"""The page's files as they are served, who may call the server by which name, and what it can do."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from dominotree.methods import METHODS
from dominotree.serve.app import Settings
from dominotree.serve.engine import Limits
from dominotree.serve.static import PAGE
from serve.conftest import Served, serving, tiny_pair

FILES = sorted(file.name for file in PAGE.iterdir() if not file.name.startswith("trace.") and file.suffix != ".html")


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    settings = Settings(api_key="open sesame", grace_s=0, hosts=("Models.example",))
    with serving(tiny_pair(), Limits(context=512), settings) as made:
        yield made


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
def test_files_come_whole_under_a_strict_policy_and_without_a_key(locked: Served, path: str) -> None:
    reply = locked.get(path)
    assert reply.status_code == 200
    assert reply.content == (PAGE / (path.rpartition("/")[2] or "index.html")).read_bytes()
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["content-type"].partition(";")[0] in (
        "text/html",
        "text/css",
        "text/javascript",
        "image/svg+xml",
    )
    assert locked.get("/methods").status_code == 401


def test_a_file_that_has_not_changed_is_not_sent_again(served: Served) -> None:
    first = served.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}', "*"):
        again = served.get("/page/main.js", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
    assert served.get("/page/main.js", headers={"if-none-match": '"other"'}).status_code == 200
    head = httpx.head(f"{served.url}/page/main.js")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", first.headers["etag"])


def test_the_page_loads_nothing_but_its_own_files(served: Served) -> None:
    texts = {name: served.get(f"/page/{name}").text for name in FILES}
    texts["index.html"] = served.get("/").text
    for name, text in texts.items():
        for wanted in re.findall(r'(?:from|src|href)[ =]"([^"]+)"', text):
            assert wanted.removeprefix("./").removeprefix("page/") in FILES, f"{name} wants {wanted}"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert "url(" not in text and "@import" not in text
    preloaded = set(re.findall(r'modulepreload" href="page/([^"]+)"', texts["index.html"]))
    assert preloaded == {name for name in FILES if name.endswith(".js")} - {"main.js"}


@pytest.mark.parametrize("path", ["/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/trace.html", "/page/x.js"])
def test_nothing_else_is_served(served: Served, path: str) -> None:
    assert served.get(path).status_code == 404


def test_a_server_can_go_without_the_page() -> None:
    with serving(tiny_pair(), settings=Settings(page=False, grace_s=0)) as bare:
        assert bare.get("/").status_code == bare.get("/page/main.js").status_code == 404
        assert bare.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:9",
        "127.0.0.1:8000",
        "127.8.8.8",
        "[::1]:8000",
        "192.168.1.5",
        "a.localhost",
        "localhost.",
    ],
)
def test_names_of_this_machine_and_addresses_are_answered(served: Served, host: str) -> None:
    assert served.get("/v1/models", headers={"host": host}).status_code == 200
    assert served.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
)
def test_a_name_that_is_not_ours_is_refused_everywhere(served: Served, host: str) -> None:
    """Whoever has that name resolve to this machine must not have visitors' browsers use the server."""
    for path in ("/", "/v1/models", "/health", "/metrics", "/page/main.js"):
        refused = served.get(path, headers={"host": host})
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "unknown_host"
    body = {"messages": [{"role": "user", "content": "hello"}]}
    assert served.post("/v1/chat/completions", body, headers={"host": host}).status_code == 403


def test_names_can_be_added(locked: Served) -> None:
    assert locked.get("/", headers={"host": "models.EXAMPLE:8000"}).status_code == 200
    assert locked.get("/", headers={"host": "other.example"}).status_code == 403
    with serving(tiny_pair(), settings=Settings(hosts=("*",), grace_s=0)) as open_to_all:
        assert open_to_all.get("/", headers={"host": "other.example"}).status_code == 200


def test_methods_lists_what_can_run_here(served: Served) -> None:
    found = served.get("/methods").json()
    offered = {method["name"]: method for method in found["methods"]}
    default = served.engine.drafting.most_nodes
    assert (found["method"], found["budget"], found["max_budget"]) == ("lookuptree", default, 64)
    assert offered["lookuptree"]["budget"] == default
    assert set(offered) == {name for name, method in METHODS.items() if method.rule == "fixed"}  # no cost profile here
    assert offered["ar"]["shape"] == "none" and offered["domino"]["budget"] is None
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    for name in offered:
        assert served.post("/v1/chat/completions", {**body, "method": name}).status_code == 200
