"""The documentation says what is so: commands parse, links lead somewhere, Python runs, lists are complete."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

import dominotree as dt
from dominotree.cli import app
from dominotree.tree.tree import Tree
from serve.conftest import tiny_pair

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "dominotree"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
RUN = ("README.md", "docs/index.md", "docs/lossless.md", "docs/api.md")  # pages whose Python needs no more than a pair
OTHERS_OPTIONS = ("docs/vllm.md",)  # pages that name options of other programs


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced block and where it begins."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    language: str | None = None
    lines: list[str] = []
    start = 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"\s*```\s*(\w*)", line)
        if fence is None:
            lines.append(line)
        elif language is None:
            language, lines, start = fence[1], [], number
        else:
            yield Block(page, start, language, "\n".join(lines))
            language = None
    assert language is None, f"{name_of(page)}:{start} opens a block and does not close it"


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^\s*```.*?^\s*```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def commands(text: str, program: str) -> Iterator[list[str]]:
    """The arguments of each call of `program` in lines of shell, comments and pipes left out."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars="|;&>")
        words.whitespace_split, words.commenters = True, "#"
        call: list[str] | None = None
        for word in [*words, ";"]:
            if set(word) <= set("|;&>"):
                if call is not None:
                    yield call
                call = None
            elif call is not None:
                call.append(word)
            elif re.fullmatch(rf"(.*/)?{program}", word):
                call = []


def shell_blocks(program: str) -> list[Any]:
    return [
        pytest.param(call, id=f"{block}: {' '.join(call)}")
        for block in BLOCKS
        if block.language in ("", "bash", "sh", "console")
        for call in commands(block.text, program)
    ]


def spans(program: str) -> list[Any]:
    """The same for code within the text."""
    return [
        pytest.param(call, id=f"{name_of(page)}: {' '.join(call)}")
        for page in PAGES
        for span in re.findall(rf"(?<!`)`({program} [^`]+)`(?!`)", prose(page))
        for call in commands(span.replace("\n", " "), program)
    ]


@cache
def root_command() -> Any:
    return typer.main.get_command(app)


def parse(call: list[str], *, whole: bool) -> None:
    """Parses as the command would, and runs nothing; unless `whole`, arguments may be missing."""
    command = root_command()
    arguments = list(call)
    while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
        name = arguments.pop(0)
        assert name in command.commands, f"dominotree has no command {name}"
        command = command.commands[name]
    asks_for_help = {"-h", "--help", "--version"} & set(arguments)
    command.make_context("dominotree", arguments, resilient_parsing=bool(asks_for_help) or not whole)


@cache
def all_options() -> set[str]:
    found: set[str] = set()
    waiting = [root_command()]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        found |= {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return found | {"--help"}


@pytest.mark.parametrize("call", shell_blocks("dominotree"))
def test_commands_parse(call: list[str]) -> None:
    parse(call, whole=True)


@pytest.mark.parametrize("call", spans("dominotree"))
def test_commands_in_the_text_exist(call: list[str]) -> None:
    parse(call, whole=False)


@pytest.mark.parametrize("call", [["generate", "Hi", "--no-such-option"], ["no-such-command"], ["report"]])
def test_what_does_not_parse_is_found(call: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|no command|missing"):
        parse(call, whole=True)


@pytest.mark.parametrize("page", [p for p in PAGES if name_of(p) not in OTHERS_OPTIONS], ids=name_of)
def test_options_in_the_text_exist(page: Path) -> None:
    named = set(re.findall(r"(?<!`)`(--[a-z][a-z0-9-]*)", prose(page)))
    assert named <= all_options(), f"no command has {sorted(named - all_options())}"


@pytest.mark.parametrize("call", [*shell_blocks("make"), *spans("make")])
def test_make_has_the_targets(call: list[str]) -> None:
    rules = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {word for word in call if re.fullmatch(r"[a-z][a-z-]*", word)} <= rules


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec", dont_inherit=True)


@pytest.mark.parametrize("block", [b for b in PYTHON if name_of(b.page) in RUN], ids=str)
def test_python_runs(block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pair = tiny_pair()
    monkeypatch.setattr(dt, "load", lambda *_, **__: pair)
    exec(compile(block.text, str(block), "exec", dont_inherit=True), {})
    assert capsys.readouterr().out


def test_the_api_page_has_every_public_name() -> None:
    listed = set(re.findall(r"\bdominotree\.(\w+)", (ROOT / "docs/api.md").read_text()))
    assert set(dt.__all__) - {"__version__"} <= listed


def test_the_methods_page_has_every_method() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/methods.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(dt.METHODS)


def test_files_named_in_the_architecture_exist() -> None:
    text = prose(ROOT / "docs/architecture.md")
    files = set(re.findall(r"`([\w/]+(?:\.(?:py|c)|/))`", text))
    assert len(files) > 40
    inside = [SOURCE, *(SOURCE / folder for folder in ("bench", "train", "serve")), ROOT]
    missing = [file for file in sorted(files) if not any((place / file).exists() for place in inside)]
    assert not missing


LAYERS = (
    ("errors", "machine", "files", "hub", "native"),
    ("targets",),
    ("sampling", "text", "lookup"),
    ("drafters",),
    ("tree",),
    ("methods", "calibration", "costs", "adaptive"),
    ("generation", "decode"),
)


def imported(file: Path) -> set[str]:
    """The modules of ours that a file imports, wherever in it, by the first part of their names."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "dominotree":
            found |= {alias.name for alias in node.names if alias.name != "__version__"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dominotree."):
            found.add(str(node.module).split(".")[1])
    return found


@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_layers_point_one_way(layer: int) -> None:
    allowed = {name for names in LAYERS[: layer + 1] for name in names}
    for name in LAYERS[layer]:
        files = [SOURCE / f"{name}.py"] if (SOURCE / f"{name}.py").exists() else list((SOURCE / name).glob("*.py"))
        assert files
        for file in files:
            assert imported(file) <= allowed, f"{file.name} imports {sorted(imported(file) - allowed)}"


def test_the_figure_of_a_growing_tree_shows_every_node() -> None:
    figure = runpy.run_path(str(ROOT / "docs/figures/tree_growth.py"), run_name="figure")
    tree = Tree([5, 6, 7, 8], [-1, -1, 0, 1], [0, 0, 1, 1], [-0.5, -1.0, -1.5, -2.0], [0.6, 0.4, 0.4, 0.4])
    svg = figure["draw"](tree, [1, 3], ["one", "two", "three", "<4>"], "root", "added")
    texts = [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert [texts.count(text) for text in ("root", "one", "two", "three", "<4>", "added")] == [4, 4, 3, 3, 2, 1]
    assert ElementTree.parse(ROOT / "docs/figures/tree_growth.svg").getroot().tag.endswith("svg")
