"""The page in a browser, from a typed word to what the decoder did."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dominotree as dt
from cli.conftest import byte_tokenizer
from dominotree.methods import Drafting
from dominotree.serve.app import Settings
from dominotree.serve.engine import Limits
from dominotree.serve.trace_file import trace_file
from oracle import OracleDrafter
from serve.browser import chromium, tab
from serve.conftest import END, Brake, Served, say, serving, tiny_pair, until

TEXT = """Here is **bold** and `code`:

```python
def fox():
    return 42
```

- one 🦊
- two

<img src=x onerror=alert(1)> [bad](javascript:alert(1)) [good](https://example.org/a)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server whose drafter is often right that the answer to "hello" is TEXT."""
    pair = tiny_pair()
    script = [*pair.prompt_ids("hello"), *byte_tokenizer().encode(TEXT).ids, END]
    drafter = OracleDrafter(pair.target, [script] * 8, right=0.6, sibling=0.2, wrong=0.2)
    with serving(tiny_pair(drafter=drafter), drafting=Drafting("dominotree", 16)) as made:
        yield made


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return say(monkeypatch, TEXT)


def set_(page: Any, **fields: object) -> None:
    """Fills in settings."""
    page.click("#settings-open")
    for name, value in fields.items():
        field = page.locator(f"[name={name}]")
        if name in ("method", "theme"):
            field.select_option(str(value))
        else:
            field.fill(str(value))
    page.click("text=Done")
    page.wait_for_load_state("networkidle")  # it asks the server anew


def ask(page: Any, words: str) -> None:
    """Types a message, sends it with the keyboard, and waits for the end of the answer."""
    answers = page.locator(".foot button").count()
    page.fill("#text", words)
    page.press("#text", "Enter")
    page.locator(".foot button").nth(answers).wait_for()


def number(page: Any, name: str) -> float:
    return float(
        page.locator("#panel .figures dd").nth(("tau", "tokens/s", "tokens", "rounds").index(name)).inner_text()
    )


def test_an_answer_with_its_rounds(served: Served, browser: Any, said: list[int]) -> None:
    with tab(browser, served.url) as page:
        set_(page, temperature=1, seed=3, max_tokens=400)
        ask(page, "hello")
        answer = page.locator(".assistant .markdown")
        assert answer.locator("strong").inner_text() == "bold"
        assert answer.locator("pre").inner_text() == "def fox():\n    return 42"
        assert answer.locator("li").all_inner_texts() == ["one 🦊", "two"]
        tokens = page.locator("#panel .token").all_text_contents()
        assert "".join(tokens).replace("↵\n", "\n") == TEXT
        rounds = int(number(page, "rounds"))
        assert number(page, "tokens") == len(said)
        assert page.locator("#panel .round").count() == page.locator(".scrubber rect").count() == rounds + 1
        assert number(page, "tau") == pytest.approx((len(said) - 1) / rounds, abs=0.01)
        assert number(page, "tau") > 1.5
        assert number(page, "tokens/s") > 0
        assert f"{len(said)} tokens" in page.locator(".foot").inner_text()


def test_what_the_model_writes_stays_text(served: Served, browser: Any, said: list[int]) -> None:
    with tab(browser, served.url) as page:
        set_(page, temperature=1, max_tokens=400)
        ask(page, "hello")
        answer = page.locator(".assistant .markdown")
        assert answer.locator("img, script").count() == 0
        assert "<img src=x onerror=alert(1)>" in answer.inner_text()
        assert [link.get_attribute("href") for link in answer.locator("a").all()] == ["https://example.org/a"]
        page.fill("#text", "<b>hello</b>")
        page.press("#text", "Enter")
        page.locator(".user .bubble", has_text="<b>hello</b>").wait_for()


MARKDOWN = """# Title
Some *emph*, **strong `code` in**, snake_case_name, 2 * 3 * 4
next

1. first
   - inner
2. second

| a | b |
|---|---|
| 1 | 2 |

> quoted ~~gone~~ [a](https://example.org) [b](data:text/html,hi) ![c](https://example.org/c.png)

~~~
open fence"""
RENDER = """
async (text) => {
  const { Markdown } = await import("/page/markdown.js");
  const [once, grown] = [document.createElement("div"), document.createElement("div")];
  new Markdown(once).update(text);
  const growing = new Markdown(grown);
  for (let end = 1; end <= text.length; end++) growing.update(text.slice(0, end));
  return [once.innerHTML, grown.innerHTML];
}
"""


def test_markdown_that_grows_ends_as_markdown_at_once(served: Served, browser: Any) -> None:
    with tab(browser, served.url) as page:
        once, grown = page.evaluate(RENDER, MARKDOWN)
    assert grown == once
    for part in (
        "<h3>Title</h3>",
        "<em>emph</em>, <strong>strong <code>code</code> in</strong>, snake_case_name, 2 * 3 * 4<br>next",
        '<ol start="1"><li>first<ul><li>inner</li></ul></li><li>second</li></ol>',
        "<th>a</th><th>b</th>",
        "<td>1</td><td>2</td>",
        "<del>gone</del>",
        "[b](data:text/html,hi)",
        ">open fence</code></pre>",
    ):
        assert part in once
    assert once.count("<a ") == 2 and "<img" not in once


SCRUB = """
() => {
  const slider = document.querySelector(".scrubber input");
  const texts = (selector) => [...document.querySelectorAll(selector)].map((found) => found.textContent);
  return Array.from({ length: Number(slider.max) + 1 }, (_, index) => {
    slider.value = index;
    slider.dispatchEvent(new Event("input"));
    return {
      caption: texts(".caption")[0],
      spoken: slider.getAttribute("aria-valuetext"),
      named: texts(".caption .accepted"),
      accepted: texts(".drawing .node.accepted .label"),
      rejected: texts(".drawing .node.rejected .label"),
      own: texts(".drawing .node.own .label"),
      drafted_end: texts(".drawing .node.own .share").length,
      tokens: texts(".round.current .token").join(""),
    };
  });
}
"""


def test_every_round_can_be_looked_at(served: Served, browser: Any, said: list[int]) -> None:
    with tab(browser, served.url) as page:
        set_(page, temperature=1, seed=3, max_tokens=400)
        ask(page, "hello")
        last = int(number(page, "rounds"))
        first, *rounds = page.evaluate(SCRUB)
        assert "prompt" in first["caption"] and len(first["own"]) == 1 and first["accepted"] == []
        for index, shown in enumerate(rounds, 1):
            assert shown["caption"].startswith(f"Round {index}:") and shown["spoken"].startswith(f"Round {index}:")
            assert shown["named"] == shown["accepted"] and len(shown["own"]) == 1
            drafted = re.search(r"(\d+) drafted", shown["caption"])
            assert shown["drafted_end"] == 0 or index == last  # the answer may end with a token of the tree
            drawn = len(shown["accepted"]) + len(shown["rejected"]) + shown["drafted_end"]
            assert drawn == (int(drafted[1]) if drafted else 0)
        assert sum(len(shown["accepted"]) for shown in rounds) == len(said) - 1 - last
        assert "".join(shown["tokens"] for shown in [first, *rounds]) == TEXT.replace("\n", "↵\n")


def test_rounds_are_reached_by_keyboard_and_pointer(served: Served, browser: Any, said: list[int]) -> None:
    with tab(browser, served.url) as page:
        set_(page, temperature=1, seed=3, max_tokens=400)
        ask(page, "hello")
        last = int(number(page, "rounds"))
        page.locator(".scrubber input").focus()
        page.keyboard.press("Home")
        assert number(page, "tokens") == 1
        page.keyboard.press("ArrowRight")
        assert number(page, "rounds") == 1
        page.keyboard.press("End")
        assert number(page, "rounds") == last
        page.click("[aria-label='Previous round']")
        assert number(page, "rounds") == last - 1
        page.locator("#panel .round").nth(2).click()
        assert number(page, "rounds") == 2
        box = page.locator(".scrubber").bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 10)
        assert number(page, "rounds") == pytest.approx(last / 2, abs=2)
        page.click("[aria-label='To the latest round']")
        page.click("[aria-label='Play the rounds']")
        page.locator(".caption", has_text="Round 1:").wait_for()
        page.click("[aria-label='Pause']")


def test_text_and_tree_come_while_it_decodes_and_it_can_be_stopped(
    served: Served, browser: Any, said: list[int]
) -> None:
    with tab(browser, served.url) as page:
        set_(page, temperature=1, max_tokens=400)
        with Brake(served) as brake:
            page.fill("#text", "hello")
            page.click("#send")
            brake.let(3)
            page.locator("#panel .round").nth(3).wait_for(state="attached")
            assert TEXT.startswith(page.locator(".assistant .markdown").inner_text().strip()[:4])
            assert page.locator(".drawing svg .node.own").count() == 1
            assert page.locator(".assistant").get_attribute("aria-busy") == "true"
            page.click("[aria-label='Previous round']")  # the reader looks back, the answer goes on
            brake.let(2)
            page.locator("#panel .round").nth(5).wait_for(state="attached")
            assert number(page, "rounds") == 2
            assert page.inner_text("#send") == "Stop"
            page.click("#send")
            page.locator(".foot", has_text="stopped").wait_for()
            brake.release()
            served.wait_until_idle()
        assert served.metric("answers_total", outcome="cancelled", method="dominotree") >= 1
        ask(page, "hello")
        assert page.locator(".assistant").last.locator("strong").inner_text() == "bold"
        page.click("#new")
        assert page.locator(".message").count() == 0
        assert page.locator("#welcome").is_visible()


def test_plain_and_tree_give_the_same_answer(served: Served, browser: Any) -> None:
    with tab(browser, served.url) as page:
        set_(page, max_tokens=40, temperature="0.9", seed=5)
        page.check("[value=plain]")
        ask(page, "hi")
        assert number(page, "tau") == 1
        assert page.locator(".drawing .node").count() == 2
        plain = page.locator("#panel .token").all_text_contents()
        page.click("#new")
        page.check("[value=tree]")
        ask(page, "hi")
        assert "".join(page.locator("#panel .token").all_text_contents()) == "".join(plain)


def test_settings_reach_the_server_and_are_kept(served: Served, browser: Any) -> None:
    asked: list[dict[str, Any]] = []
    with tab(browser, served.url) as page:
        page.on("request", lambda request: asked.append(request.post_data_json) if request.post_data else None)
        set_(page, budget=3, temperature="0.5", top_p="0.9", seed=7, max_tokens=12, system="Be brief.", theme="dark")
        ask(page, "hello")
        (body,) = asked
        assert body["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
        ]
        wanted = {"method": "dominotree", "budget": 3, "temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": 12}
        assert {name: body[name] for name in wanted} == wanted
        assert page.locator(".drawing .node.rejected, .drawing .node.accepted").count() <= 3
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.reload()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
        page.locator("#hint", has_text="budget 3, temperature 0.5").wait_for()
        set_(page, method="domino")
        ask(page, "hello")
        assert asked[1]["method"] == "domino" and "budget" not in asked[1]
        page.click("#settings-open")
        page.click("text=Reset")
        page.fill("[name=max_tokens]", "9")
        page.click("text=Done")
        ask(page, "again")
        assert asked[2]["method"] == "dominotree" and asked[2]["temperature"] == 0 and "seed" not in asked[2]
        assert [message["role"] for message in asked[2]["messages"]] == ["user", "assistant", "user"]


def test_a_race_is_recorded_and_replayed_on_one_clock(served: Served, browser: Any) -> None:
    with tab(browser, served.url) as page:
        set_(page, max_tokens=30)
        page.check("[value=race]")
        page.fill("#text", "hello")
        page.click("#send")
        page.locator(".result", has_text="the same 30 tokens").wait_for()
        page.locator(".lane.done").nth(1).wait_for()
        lanes = page.locator(".lane")
        texts = ["".join(lane.locator(".token").all_text_contents()) for lane in lanes.all()]
        assert texts[0] == texts[1] != ""
        ends = [float(re.search(r"[\d.]+", lane.locator(".state").inner_text())[0]) for lane in lanes.all()]  # type: ignore[index]
        clock = page.locator("[aria-label='Time']")
        clock.focus()
        page.keyboard.press("Home")
        counts = lambda: [int(lane.locator("dd").nth(2).inner_text()) for lane in lanes.all()]  # noqa: E731
        assert counts() == [1, 1]
        page.keyboard.press("End")
        assert counts() == [30, 30]
        assert page.inner_text(".clock") == f"{max(ends):.2f} s"
        page.select_option("[aria-label='Speed of the replay']", "0.1")
        page.click("[aria-label='Replay the race']")
        page.wait_for_selector("[aria-label='Pause']")
        page.keyboard.press("Enter")


def test_a_reader_who_wants_stillness_gets_the_end_of_the_race(served: Served, browser: Any) -> None:
    with tab(browser, served.url, reduced_motion="reduce", color_scheme="dark") as page:
        set_(page, max_tokens=8)
        page.check("[value=race]")
        page.fill("#text", "hello")
        page.press("#text", "Enter")
        page.locator(".result", has_text="8 tokens").wait_for()
        assert page.locator(".lane.done").count() == 2
        assert page.locator("[aria-label='Replay the race']").is_visible()


def test_a_phone_has_room_for_all_of_it(served: Served, browser: Any, said: list[int]) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
    with tab(browser, served.url, **phone) as page:
        set_(page, temperature=1, max_tokens=400)
        ask(page, "hello")
        for part in ("#view", "#settings-open", ".drawing", ".scrubber", "#panel .tokens", "#log", "#text", "#send"):
            box = page.locator(part).bounding_box()
            assert box and box["x"] >= 0 and box["x"] + box["width"] <= 360, part
            assert box["y"] >= 0 and box["y"] + box["height"] <= 740, part
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.locator("#log").bounding_box()["height"] > 120
        box, last = page.locator(".scrubber").bounding_box(), number(page, "rounds")
        page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + 10)
        page.locator("[aria-label='Next round']:enabled").wait_for()
        assert number(page, "rounds") == pytest.approx(last / 2, abs=2)
        page.click("text=Less")
        assert not page.locator(".drawing").is_visible() and page.locator("#panel .figures").is_visible()
        page.click("text=More")
        assert page.locator(".drawing").is_visible()
        page.check("[value=race]")
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_key_is_asked_for_and_used(browser: Any) -> None:
    with (
        serving(tiny_pair(), Limits(context=256), Settings(api_key="sesame", grace_s=0)) as locked,
        tab(browser, locked.url) as page,
    ):
        page.locator("dialog[open]").wait_for()
        assert page.evaluate("document.activeElement.name") == "key"
        page.keyboard.press("Escape")
        page.locator("#hint", has_text="key").wait_for()
        set_(page, key="sesame", max_tokens=5)
        page.locator("#model", has_text="tiny").wait_for()
        ask(page, "hello")
        assert "5 tokens" in page.locator(".foot").inner_text()
        assert "sesame" not in json.dumps(page.evaluate("({...localStorage})"))


def test_what_goes_wrong_is_said_and_the_words_are_kept(browser: Any) -> None:
    with serving(tiny_pair(), Limits(context=64)) as served, tab(browser, served.url) as page:
        page.fill("#text", "long " * 50)
        page.press("#text", "Enter")
        page.locator("[role=alert]", has_text="context").wait_for()
        assert page.input_value("#text") == ("long " * 50).strip()
        ask(page, "ok")
        assert page.locator(".assistant").count() == 2
        served.server.should_exit = True
        until(lambda: not served.engine.live)
        page.fill("#text", "anyone?")
        page.press("#text", "Enter")
        page.locator("[role=alert]", has_text=re.compile("reached|shutting")).wait_for()


def test_a_trace_file_needs_no_server(served: Served, browser: Any, said: list[int], tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "return_trace": True, "seed": 3}
    replies = [served.post("/v1/chat/completions", {**body, "method": m}).json() for m in ("dominotree", "ar")]
    tree, plain = (reply["choices"][0]["trace"] for reply in replies)
    hostile = "</script><script>alert(1)</script>"
    made = {"prompt": hostile, "about": "tiny", "method": "dominotree", "text": TEXT, "rounds": tree, "plain": plain}
    file = tmp_path / "trace.html"
    file.write_text(trace_file(made), encoding="utf-8")
    with tab(browser, file.as_uri(), offline=True) as page:
        assert page.inner_text("#prompt") == hostile
        assert page.locator("#answer strong").inner_text() == "bold"
        assert page.locator("#panel .round").count() == len(tree)
        assert page.locator(".drawing svg .node").count() > 1
        page.locator(".scrubber input").focus()
        page.keyboard.press("End")
        assert number(page, "tokens") == len(said)
        assert f"the same {len(said)} tokens" in page.inner_text(".result")
        assert page.locator(".lane.done").count() == 2


@pytest.mark.pair
def test_the_default_pair_in_the_page(browser: Any) -> None:
    pair = dt.load(dtype="float32", progress=False)
    question = "Write a Python function that adds two numbers."
    plain = pair.generate(question, method="ar", max_new_tokens=40)
    with serving(pair, Limits(max_batch=1, context=512)) as served, tab(browser, served.url) as page:
        page.set_default_timeout(120_000)
        set_(page, max_tokens=40, budget=16)
        ask(page, question)
        tokens = "".join(page.locator("#panel .token").all_text_contents())
        assert tokens.replace("↵\n", "\n") == plain.text
        assert number(page, "tau") > 1.2
        assert page.locator(".drawing .node").count() > 10
        assert page.locator(".assistant pre").count() >= 1
