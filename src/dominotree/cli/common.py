"""What the commands share: their options, loading a pair, writing to the two streams, errors in one line."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from dominotree.errors import DominoTreeError, InvalidRequest

if TYPE_CHECKING:
    from rich.table import Table

    from dominotree.pair import Output, Pair
    from dominotree.sampling import SamplingParams

Value = TypeVar("Value")

WARM_UP_TOKENS = 8
"""Decoded before anything is timed: the first passes of a process are slow, whoever makes them."""

# Options. None means "not given": the library owns the defaults, and what was not given is not passed on.

Target = Annotated[
    str | None,
    typer.Option("--target", help="Model folder, hub id or named pair.  [default: the pair smollm2-135m]"),
]
DrafterName = Annotated[
    str | None,
    typer.Option("--drafter", help="Drafter folder, hub id, name, or none.  [default: the pair's]"),
]
DFlashDrafter = Annotated[
    str | None, typer.Option("--dflash-drafter", help="DFlash drafter for the methods dflash, ddtree and caddtree.")
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="See `dominotree methods`.  [default: lookuptree; with a DFlash drafter ddtree, without one ar]",
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(
        "--budget",
        help="Most nodes of a tree, without the root.  "
        "[default: 16; on a CPU 8, in fp32 5, with AVX2 alone 4; 64 for methods that choose]",
    ),
]
Candidates = Annotated[int | None, typer.Option("--candidates", help="Tokens scored per depth; 0: all.  [default: 64]")]
NodeTopk = Annotated[int | None, typer.Option("--node-topk", help="Most children of a node.  [default: no cap]")]
NoiseAware = Annotated[bool, typer.Option("--noise-aware", help="Draft with the noise that the target will draw with.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="0: always the likeliest token.  [default: 0]")
]
TopP = Annotated[float | None, typer.Option("--top-p", help="Only the likeliest tokens with this much mass.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Only the k likeliest tokens; 0: all.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="Only tokens this likely, the likeliest being 1.")]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="Above 1: tokens of prompt and answer recur less."),
]
PresencePenalty = Annotated[
    float | None, typer.Option("--presence-penalty", help="Subtracted from tokens that the answer has.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option("--frequency-penalty", help="The same, once for each time it occurs.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=BIAS", help="Added to a token's logit; may be repeated."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="Text that ends the answer, cut off; may be repeated."),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's own stop tokens.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same tokens.  [default: a fresh one]")]
MaxNewTokens = Annotated[int | None, typer.Option("--max-new-tokens", help="Most tokens of an answer.  [default: 256]")]
Context = Annotated[
    int | None, typer.Option("--context", help="Most tokens of prompt and answer.  [default: the model's]")
]
ChatTokens = Annotated[int, typer.Option("--max-new-tokens", help="Most tokens of an answer.")]
ChatContext = Annotated[
    int | None,
    typer.Option("--context", help="Most tokens of a conversation.  [default: 4096, or the model's]"),
]
System = Annotated[str | None, typer.Option("--system", help="System message that opens the conversation.")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", help="auto, float32, bfloat16, float16 or int8 (rounded weights); auto: bfloat16 where it is fast."
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads.  [default: the usable processors]")]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact/--no-exact",
        help="Insist on the row-invariant forward, or do without.  [default: where it is free]",
    ),
]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None and value is not False}


def flag(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")


def comma_list(name: str, text: str, kind: Callable[[str], Value]) -> list[Value]:
    """The values of an option that takes a list with commas; raises `InvalidRequest` naming its flag."""
    parts = [part.strip() for part in text.split(",")]
    try:
        if not all(parts):
            raise ValueError
        return [kind(part) for part in parts]
    except ValueError:
        noun = "integers" if kind is int else "numbers" if kind is float else "names"
        raise InvalidRequest(f"{flag(name)} is {text!r}; {noun} with commas between are expected") from None


def note_idle_noise(noise_aware: bool, sampling: SamplingParams) -> None:
    """Says that there are no draws to look at, where that is so."""
    if noise_aware and sampling.temperature == 0:
        screen.note("Note: --noise-aware cannot change anything at temperature 0")


@contextmanager
def needs_extra(name: str, who: str) -> Iterator[None]:
    """Around imports of what an extra of the package brings; raises `InvalidRequest` where it is not installed."""
    try:
        yield
    except ImportError as error:
        if error.name is None or error.name.startswith("dominotree"):
            raise
        raise InvalidRequest(
            f"{who} needs the package {error.name}; install it with pip install 'dominotree[{name}]', "
            f"in a checkout pip install -c constraints.txt -e '.[{name}]'"
        ) from error


# Streams


class Screen:
    """Answers on stdout, everything else on stderr, neither in the middle of the other's line."""

    def __init__(self) -> None:
        self._inside_line = False

    def write(self, piece: str) -> None:
        """Puts text on stdout at once."""
        sys.stdout.write(piece)
        sys.stdout.flush()
        self._inside_line = not piece.endswith("\n") if piece else self._inside_line

    def end_line(self) -> None:
        """Ends the line that stdout is in, if it is in one."""
        if self._inside_line:
            self._inside_line = False
            self.write("\n")

    def note(self, text: str = "") -> None:
        """Puts one line on stderr."""
        self.end_line()
        print(text, file=sys.stderr, flush=True)

    def table(self, table: Table, *, error: bool = False) -> None:
        """Prints a table; it is never cut when it does not go to a terminal."""
        from rich.console import Console

        self.end_line()
        out = sys.stderr if error else sys.stdout
        Console(file=out, width=None if out.isatty() else 160, highlight=False).print(table)
        out.flush()


screen = Screen()


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Gives a function that shows on stderr what is done at the moment: on a terminal one line that changes, elsewhere
    a line whenever a stage (what stands before a colon) begins.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.markup import escape

        with Console(stderr=True).status("") as status:
            yield lambda doing: status.update(escape(doing))
        return
    stage = ""

    def tell(doing: str) -> None:
        nonlocal stage
        if doing.partition(":")[0] != stage:
            stage = doing.partition(":")[0]
            screen.note(f"{stage} ...")

    yield tell


class _Notices(logging.Handler):
    """Shows what the library has to say, one plain line each."""

    def emit(self, record: logging.LogRecord) -> None:
        screen.note("Note: " + one_line(record.getMessage()))


_notices = _Notices(logging.WARNING)


def show_notices() -> None:
    """From now on notices of the library appear on stderr."""
    logging.getLogger("dominotree").addHandler(_notices)


def one_line(text: str) -> str:
    """The text with all white space, line ends too, made single spaces."""
    return " ".join(text.split())


# Errors


class OneLineErrors(TyperGroup):
    """A command whose every failure is one line on stderr: exit 2 for wrong use, 130 for Ctrl-C, else 1."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs the command and leaves the process with its exit code."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
            sys.stdout.flush()
        except (KeyboardInterrupt, typer.Abort):
            code = 130
        except BrokenPipeError:
            code = _closed_pipe()
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                code = _closed_pipe()
            elif os.environ.get("DOMINOTREE_TRACEBACK"):
                raise
            else:
                code = _explain(error)
        if code == 130:
            screen.note("Interrupted.")
        sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Exception) -> int:
    code, hint = 1, ""
    if isinstance(error, DominoTreeError):
        text, code = str(error), 2 if isinstance(error, InvalidRequest) else 1
    elif hasattr(error, "format_message"):  # an error of the command line's own parser
        text, code = error.format_message(), getattr(error, "exit_code", 2)
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
    else:
        text = f"{type(error).__name__}: {error}"
        hint = " (set DOMINOTREE_TRACEBACK=1 to see where)"
    screen.note("Error: " + one_line(text) + hint)
    return code


def _closed_pipe() -> int:
    """Whoever read our output has gone: leave quietly, and let nothing be written when Python ends."""
    screen.__init__()  # type: ignore[misc]
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123
    return 1


# Text that comes in


def read_prompt(prompt: str | None, *, raw: bool) -> str:
    """The prompt, from standard input when it is `-` or absent; the line end that closes it is dropped."""
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InvalidRequest("there is no prompt; give one, or - to read it from standard input")
    if prompt is None or prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise InvalidRequest("standard input is not UTF-8 text; convert it first") from error
    check_text("the prompt", prompt)
    if not raw and not prompt.strip():
        raise InvalidRequest("the prompt is empty; give some text")
    return prompt


def check_text(what: str, text: str) -> None:
    """Raises `InvalidRequest` for text that cannot be encoded: an argument in another encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} is not UTF-8 text; convert it first") from error


def prompt_form(*, raw: bool, system: str | None) -> dict[str, Any]:
    """What `Pair.generate` takes of the two; raises `InvalidRequest` for both and for what is no text."""
    if system is None:
        return {"raw": True} if raw else {}
    check_text("--system", system)
    if raw:
        raise InvalidRequest("--system has no effect with --raw; leave one of them out")
    return {"system": system}


def check_compare(compare: bool, method: str | None) -> None:
    """Raises `InvalidRequest` where plain decoding would be compared with itself."""
    if compare and method == "ar":
        raise InvalidRequest(
            "--compare has nothing to compare with method ar; name a drafter (--drafter) or another method, as lookup"
        )


def sampling_params(
    *, logit_bias: Sequence[str] | None = None, stop: Sequence[str] | None = None, **fields: Any
) -> SamplingParams:
    """The sampling options given; raises `InvalidRequest` for a wrong value, says which have no effect."""
    from dominotree.sampling import SamplingParams

    for text in stop or ():
        check_text("--stop", text)
    params = SamplingParams(**given(**fields), stop=tuple(stop or ()), logit_bias=_biases(logit_bias or ()))
    if params.temperature == 0:
        idle = [name for name in ("top_p", "top_k", "min_p") if fields.get(name) is not None]
        if idle:
            screen.note(f"Note: {', '.join(map(flag, idle))} cannot change anything at temperature 0")
    return params


def _biases(entries: Sequence[str]) -> dict[int, float]:
    biases = {}
    for entry in entries:
        token, _, bias = entry.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise InvalidRequest(f"--logit-bias is {entry!r}; ID=BIAS is expected, such as 42=-100") from None
    return biases


# Pairs


@dataclass(frozen=True)
class ModelOptions:
    """Which models to load and how to run them."""

    target: str | None = None
    drafter: str | None = None
    dflash_drafter: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    context: int | None = None
    exact: bool | None = None


def load_pair(
    model: ModelOptions, drafting: Mapping[str, Any], *, others_draft: bool = False
) -> tuple[Pair, dict[str, Any]]:
    """The pair, and the drafting options with the method filled in; says what a user might not expect.

    Wrong values are found before anything is loaded. A flag that the method would disregard is an error. With
    `others_draft` the method is a default beside which others are used, so the drafter is there in any case.
    """
    show_notices()
    from dominotree.methods import METHODS, Drafting
    from dominotree.pair import load

    method = drafting.get("method")
    drafter, dflash_drafter = model.drafter, model.dflash_drafter
    Drafting(**drafting)
    if model.context is not None and model.context < 2:
        raise InvalidRequest(f"context is {model.context}; at least 2 tokens are expected")
    if method is not None:
        _check_effect(method, drafting, model, others_draft)
        if METHODS[method].drafter == "none" and not others_draft:
            drafter = dflash_drafter = "none"
        elif METHODS[method].drafter == "dflash" and drafter is not None and dflash_drafter is None:
            dflash_drafter = "none"  # the one that was named shall be the one that drafts
    pair = load(
        target=model.target,
        drafter=drafter,
        dflash_drafter=dflash_drafter,
        dtype=model.dtype,
        device=model.device,
        threads=model.threads,
        context=model.context,
        exact=model.exact,
    )
    if method is None:
        method = pair.default_method
        _check_effect(method, drafting, model, others_draft)
        if method == "ar" and model.drafter != "none":
            screen.note(
                "Note: no drafter is at hand, so decoding is plain; name one with --drafter, or try --method lookup"
            )
    if model.dflash_drafter and METHODS[method].drafter == "domino" and pair.drafter is not None:
        raise InvalidRequest(
            f"--dflash-drafter has no effect with method {method}; leave it out, or use dflash, ddtree or caddtree"
        )
    return pair, {**drafting, "method": method}


def _check_effect(method: str, drafting: Mapping[str, Any], model: ModelOptions, others_draft: bool) -> None:
    from dominotree.methods import METHODS

    kind = METHODS[method]
    kind.refuse_idle(drafting, flag)
    drafters = {"drafter": model.drafter, "dflash_drafter": model.dflash_drafter}
    named = [name for name, value in drafters.items() if value not in (None, "none")]
    if named and not kind.drafts and not others_draft:
        raise InvalidRequest(f"{flag(named[0])} has no effect with method {method}; leave it out or use another method")


# What an answer cost


def statistics(output: Output, pair: Pair, *, sampled: bool) -> tuple[str, str]:
    """Two short lines about an answer; the seed is in them where it mattered."""
    from dominotree.methods import METHODS

    stats = output.stats
    parts = [f"{stats.new_tokens} tokens in {stats.decode_s:.2f} s", f"{stats.tokens_per_s:.1f} tokens/s"]
    parts.append(f"tau {stats.mean_accepted:.2f} over {stats.rounds} rounds" if stats.rounds else "0 rounds")
    parts.append(f"finish reason {output.finish_reason}")
    setting = [output.method]
    if METHODS[output.method].shape == "tree":
        setting.append(f"budget {output.budget}")
    if sampled:
        setting.append(f"seed {output.seed}")
    setting.append(f"{pair.target.precision} on {pair.target.device}")
    if stats.rounds:
        spent = " + ".join(f"{stage} {ms / stats.rounds:.1f}" for stage, ms in stats.stage_ms.items())
        setting.append(f"{spent} ms a round")
    return ", ".join(parts), ", ".join(setting)
