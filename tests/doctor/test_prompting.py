"""A target without a chat template, or one that thinks although it should not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cli.conftest import TEMPLATE, byte_tokenizer
from dominotree.doctor import examine
from dominotree.doctor.prompting import draft_vocabulary_finding, template_finding, thinking_finding
from dominotree.text import TextCodec


def copied(folder: Path, target: Path, template: str | None) -> Path:
    shutil.copytree(target, folder)
    if template is None:
        (folder / "chat_template.jinja").unlink()
    else:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_missing_chat_template_is_found_and_raw_text_used(tmp_path: Path, target: Path, domino: Path) -> None:
    report = examine(str(copied(tmp_path / "t", target, None)), str(domino), dtype="float32", max_new_tokens=24)
    (finding,) = (finding for finding in report.findings if finding.name == "no-chat-template")
    assert finding.severity == "warning"
    assert "chat_template.jinja" in finding.known
    assert report.measured["drafts"] > 32


HONOURS = "{% if enable_thinking %}<think>{% else %}<think>\n\n</think>\n\n{% endif %}"


@pytest.mark.parametrize(
    ("ending", "thinks"), [("<think>\n", True), (HONOURS, False), ("", False), ("<reasoning>", True)]
)
def test_a_template_that_opens_thinking_whatever_it_is_told(
    tmp_path: Path, target: Path, domino: Path, ending: str, thinks: bool
) -> None:
    folder = copied(tmp_path / "t", target, TEMPLATE + ending)
    report = examine(str(folder), str(domino), dtype="float32", max_new_tokens=8)
    assert any(finding.name == "thinking" for finding in report.findings) == thinks


def test_thinking_is_told_by_how_answers_begin() -> None:
    codec = TextCodec(byte_tokenizer(), TEMPLATE)
    thought, plain = codec.encode("<think>\nWell"), codec.encode("Well, <think> is a tag")
    assert thinking_finding(codec, [plain, plain]) is None
    finding = thinking_finding(codec, [plain, thought, thought])
    assert finding is not None
    assert finding.figures == {"template_opens": None, "answers": 3, "answers_that_think": 2}
    assert "2 of 3 answers" in finding.known


def test_a_tag_in_an_earlier_turn_of_the_template_is_not_thinking() -> None:
    codec = TextCodec(byte_tokenizer(), "<think>example</think>" + TEMPLATE)
    assert thinking_finding(codec, []) is None
    assert template_finding(codec) is None


@pytest.mark.parametrize(("share", "found"), [(0.95, False), (0.9, False), (0.89, True), (0.0, True)])
def test_a_draft_vocabulary_may_lack_a_tenth(share: float, found: bool) -> None:
    assert (draft_vocabulary_finding(share, 100) is not None) == found
