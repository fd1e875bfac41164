"""`dominotree chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dominotree.cli import common
from dominotree.cli.common import (
    ModelOptions,
    given,
    load_pair,
    one_line,
    sampling_params,
    screen,
    statistics,
)
from dominotree.errors import DominoTreeError, InvalidRequest

if TYPE_CHECKING:
    from dominotree.pair import Output, Pair
    from dominotree.sampling import SamplingParams

DEFAULT_NEW_TOKENS = 1024

_HELP = """\
/reset  forget the conversation
/stats  what the last answer cost
/help   this list
/quit   leave (so does Ctrl-D)
Ctrl-C stops an answer; what was said of it stays in the conversation."""


def chat(
    target: common.Target = None,
    drafter: common.DrafterName = None,
    dflash_drafter: common.DFlashDrafter = None,
    method: common.MethodName = None,
    budget: common.Budget = None,
    candidates: common.Candidates = None,
    node_topk: common.NodeTopk = None,
    noise_aware: common.NoiseAware = False,
    temperature: common.Temperature = None,
    top_p: common.TopP = None,
    top_k: common.TopK = None,
    min_p: common.MinP = None,
    repetition_penalty: common.RepetitionPenalty = None,
    presence_penalty: common.PresencePenalty = None,
    frequency_penalty: common.FrequencyPenalty = None,
    logit_bias: common.LogitBias = None,
    stop: common.Stop = None,
    ignore_eos: common.IgnoreEos = False,
    seed: common.Seed = None,
    max_new_tokens: common.ChatTokens = DEFAULT_NEW_TOKENS,
    context: common.ChatContext = None,
    system: common.System = None,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    threads: common.Threads = None,
    exact: common.Exact = None,
) -> None:
    """Talk with the model, one line a turn. What a turn shares with the one before is not encoded again."""
    if system is not None:
        common.check_text("--system", system)
    sampling = sampling_params(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        stop=stop,
        ignore_eos=ignore_eos,
        seed=seed,
        max_new_tokens=max_new_tokens,
    )
    model = ModelOptions(target, drafter, dflash_drafter, dtype, device, threads, context, exact)
    drafting = given(method=method, budget=budget, candidates=candidates, node_topk=node_topk, noise_aware=noise_aware)
    pair, drafting = load_pair(model, drafting)
    common.note_idle_noise(noise_aware, sampling)
    Conversation(pair, system, sampling, drafting).run()


class Conversation:
    """Reads turns, shows answers, obeys the commands that begin with a slash."""

    def __init__(self, pair: Pair, system: str | None, sampling: SamplingParams, drafting: dict[str, Any]) -> None:
        self._pair, self._sampling = pair, sampling
        self._begin = partial(pair.chat, system=system, sampling=sampling, **drafting)
        self._chat = self._begin()
        self._last: Output | None = None
        self._commands: dict[str, Callable[[], None]] = {
            "/reset": self._reset,
            "/stats": self._stats,
            "/help": lambda: screen.note(_HELP),
        }

    def run(self) -> None:
        """Goes on until /quit or the end of the input."""
        if _is_terminal():
            with suppress(ImportError):  # editing and history, where Python was built with them
                import_module("readline")
            screen.note(f"{self._pair.name}; /help lists the commands, Ctrl-D leaves")
        while (line := _read_line()) is not None:
            said = line.strip()
            if said == "/quit":
                return
            if said in self._commands:
                self._commands[said]()
            elif said.startswith("/") and " " not in said:
                screen.note(f"{said} is no command; /help lists them")
            elif said:
                self._turn(said)

    def _turn(self, said: str) -> None:
        shown, before, answer = "", list(self._chat.messages), None
        try:
            common.check_text("that line", said)
            with _interruptible() as interrupted:
                answer = self._chat.send(said)
                for piece in answer:
                    shown += piece
                    screen.write(piece)
                    if interrupted():
                        answer.close()
                        break
                else:
                    self._last = answer.output
                    screen.end_line()
                    return
        except KeyboardInterrupt:  # pressed twice: before the answer's next piece
            if answer is not None:
                answer.close()
        except InvalidRequest as error:
            screen.note(f"Error: {one_line(str(error))} (/reset begins anew)")
            return
        except DominoTreeError as error:
            screen.note(f"Error: {one_line(str(error))}")
            return
        screen.note("(stopped)")
        turn = [{"role": "user", "content": said}, {"role": "assistant", "content": shown}]
        self._chat.messages = [*before, *turn] if shown else before

    def _reset(self) -> None:
        self._chat = self._begin()
        screen.note("(the conversation begins anew)")

    def _stats(self) -> None:
        if self._last is None:
            screen.note("there is no answer yet")
            return
        for line in statistics(self._last, self._pair, sampled=self._sampling.temperature > 0):
            screen.note(line)
        stats = self._last.stats
        screen.note(f"{stats.prompt_tokens} prompt tokens, {stats.reused_tokens} kept from the turn before")


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def _read_line() -> str | None:
    """The next line; None at the end of the input."""
    while True:
        try:
            if sys.stdin is None:
                return None
            if not _is_terminal():
                return sys.stdin.buffer.readline().decode() or None
            return input("> ")
        except EOFError:
            screen.note()
            return None
        except UnicodeDecodeError:
            screen.note("Error: that line is not UTF-8 text")
        except KeyboardInterrupt:
            if not _is_terminal():
                raise
            screen.note("\n(Ctrl-D or /quit leaves)")


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is remembered rather than raised, so that no pass is torn apart; a second one is raised."""
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
