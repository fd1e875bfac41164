"""`dominotree chat`: turns, commands, interruption."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from cli.conftest import Run
from cli.test_errors import start
from dominotree.pair import Pair, TextIterator

SHORT = ("--max-new-tokens", 6, "--ignore-eos")


def test_each_line_is_a_turn_and_keeps_what_it_shares_with_the_last(run: Run) -> None:
    result = run("chat", *SHORT, input="hello\n/stats\nand now?\n/stats\n/quit\nnever said\n")
    assert result.exit_code == 0
    kept = [line for line in result.stderr.splitlines() if "kept from the turn before" in line]
    first, second = (int(line.split(", ")[1].split()[0]) for line in kept)
    assert first == 0 and second > 20


def test_a_chat_says_what_generate_says_to_the_first_turn(run: Run) -> None:
    said = run("chat", *SHORT, "--system", "be brief", input="hello\n").stdout
    assert said == run("generate", "hello", *SHORT, "--system", "be brief").stdout


def test_reset_forgets_and_the_end_of_input_leaves(run: Run) -> None:
    result = run("chat", *SHORT, input="hello\n/reset\nhello")
    first, second = result.stdout[: len(result.stdout) // 2], result.stdout[len(result.stdout) // 2 :]
    assert result.exit_code == 0 and first == second


def test_commands_that_are_none_and_blank_lines_are_no_turns(run: Run) -> None:
    result = run("chat", input="/frobnicate\n\n   \n/help\n/stats\n")
    assert result.stdout == ""
    assert "/frobnicate is no command" in result.stderr and "/reset" in result.stderr
    assert "there is no answer yet" in result.stderr


def test_a_conversation_that_is_too_long_says_so_and_goes_on(run: Run) -> None:
    result = run("chat", *SHORT, "--context", 120, input="x" * 200 + "\n/reset\nhello\n")
    assert result.exit_code == 0 and result.stdout.strip()
    assert "the context is 120" in result.stderr and "/reset begins anew" in result.stderr


def test_wrong_flags_are_refused_as_in_generate(run: Run) -> None:
    result = run("chat", "--top-p", "3", input="hello\n")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1


def test_ctrl_c_stops_the_answer_and_not_the_chat(model: Path, drafter: Path) -> None:
    process = start(model, drafter, "chat", "--ignore-eos", "--max-new-tokens", "3000", "--dtype", "float32", bufsize=0)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"hello\n")
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(b"/help\n", timeout=60)
    assert process.returncode == 0
    assert errors.decode().startswith("(stopped)\n/reset")


def test_an_answer_that_was_stopped_stays_in_the_conversation(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[dict[str, str]]] = []
    real = Pair.prompt_ids

    def prompt_ids(self: Pair, prompt: list[dict[str, str]], **form: object) -> list[int]:
        seen.append(prompt)
        return real(self, prompt, **form)  # type: ignore[arg-type]

    class Once:
        pressed = False

    def iterate(self: TextIterator):  # type: ignore[no-untyped-def]
        if not Once.pressed:
            Once.pressed = True
            yield "Well"
            os.kill(os.getpid(), signal.SIGINT)
            yield ", then"
        yield from real_iterate(self)

    real_iterate = TextIterator.__iter__
    monkeypatch.setattr(Pair, "prompt_ids", prompt_ids)
    monkeypatch.setattr(TextIterator, "__iter__", iterate)
    result = run("chat", *SHORT, input="hello\ngo on\n")
    assert result.exit_code == 0
    assert [message["content"] for message in seen[-1]] == ["hello", "Well, then", "go on"]


def test_a_turn_that_is_stopped_with_its_last_piece_is_kept_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[dict[str, str]]] = []
    real, real_iterate = Pair.prompt_ids, TextIterator.__iter__

    def prompt_ids(self: Pair, prompt: list[dict[str, str]], **form: object) -> list[int]:
        seen.append(prompt)
        return real(self, prompt, **form)  # type: ignore[arg-type]

    def iterate(self: TextIterator):  # type: ignore[no-untyped-def]
        pieces = list(real_iterate(self))
        yield "".join(pieces[:-1])
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        yield pieces[-1]

    monkeypatch.setattr(Pair, "prompt_ids", prompt_ids)
    monkeypatch.setattr(TextIterator, "__iter__", iterate)
    assert run("chat", *SHORT, input="hello\ngo on\n").exit_code == 0
    assert [message["role"] for message in seen[-1]] == ["user", "assistant", "user"]


def test_a_line_that_is_no_text_costs_that_line_only(run: Run) -> None:
    result = run("chat", *SHORT, input=b"hello\n\xff\xfe\ngo on\n")
    assert result.exit_code == 0 and result.stderr.count("not UTF-8") == 1
    assert result.stdout.count("\n") >= 2


def test_a_terminal_gets_a_prompt_and_ctrl_d_leaves(model: Path, drafter: Path) -> None:
    pytest.importorskip("readline")
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    process = start(model, drafter, "chat", "--max-new-tokens", "4", stdin=theirs, stdout=theirs)
    os.close(theirs)

    def wait_for_prompt() -> None:
        seen = b""
        while b"> " not in seen:
            assert select.select([ours], [], [], 20)[0], f"no prompt in {seen!r}"
            seen += os.read(ours, 100)

    try:
        wait_for_prompt()
        for _ in range(10):  # one that comes before the line is being read is only seen with the next
            process.send_signal(signal.SIGINT)
            if select.select([ours], [], [], 2)[0]:
                break
        for typed in (b"hello\n", b"\x04"):
            wait_for_prompt()
            os.write(ours, typed)
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        errors = process.stderr.read()
        assert b"/help lists the commands" in errors and b"(Ctrl-D or /quit leaves)" in errors
    finally:
        process.kill()
        os.close(ours)
