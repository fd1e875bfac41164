"""A target with its drafter, ready to generate: what most users need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, overload

import torch

from dominotree import hub
from dominotree.adaptive import AdaptiveBudget
from dominotree.calibration import Calibration
from dominotree.costs import calibration_path, find_profile
from dominotree.decode import Decoder
from dominotree.drafters.checkpoint import check_fits_target, draft_token_ids, read_checkpoint
from dominotree.drafters.dflash import Drafter
from dominotree.errors import InvalidRequest
from dominotree.generation import FinishReason, Generation, Request, Stats
from dominotree.machine import cpu_has_bf16, parse_device, parse_dtype, set_threads, vector_registers
from dominotree.methods import DEFAULT_BUDGET, METHODS, Drafting
from dominotree.sampling import SamplingParams, TokenLogprobs
from dominotree.targets.base import Lender, Target
from dominotree.targets.load import load_target
from dominotree.text import Message, Prompt, TextCodec, is_token_ids

log = logging.getLogger("dominotree")

CPU_BUDGET = 8
FP32_CPU_BUDGET = 5
AVX2_BUDGET = 4
CHAT_CONTEXT = 4096
NIL_ACCEPTANCE = 1.1
_ROUNDS_TO_JUDGE = 20


@dataclass(frozen=True)
class Output:
    """An answer. `token_ids` include the token that stopped it, `text` does not."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    method: str
    budget: int
    seed: int
    logprobs: list[TokenLogprobs] | None = None

    @classmethod
    def of(cls, generation: Generation) -> Output:
        """The output of a finished generation."""
        assert generation.finish_reason is not None
        request = generation.request
        return cls(
            text=generation.text,
            token_ids=generation.new_tokens,
            finish_reason=generation.finish_reason,
            stats=generation.stats,
            method=request.drafting.method,
            budget=request.drafting.most_nodes,
            seed=generation.sampler.seed,
            logprobs=generation.logprobs if request.sampling.logprobs is not None else None,
        )


class TextIterator:
    """Pieces of an answer's text as they come; `output` is the whole answer once they have been read."""

    def __init__(self, generations: Iterator[Generation], pair: Pair) -> None:
        self._generations, self._pair = generations, pair
        self._output: Output | None = None
        self._pieces: Iterator[str] | None = None

    def __iter__(self) -> Iterator[str]:
        last = None
        try:
            for last in self._generations:
                piece = last.take_text()
                if piece:
                    yield piece
        finally:
            self.close()
        if last is not None and last.finished:
            self._output = Output.of(last)
            self._pair._judge(self._output)

    def __next__(self) -> str:
        if self._pieces is None:
            self._pieces = iter(self)
        return next(self._pieces)

    def close(self) -> None:
        """Ends an answer that is not to be read further, so that its slot is free at once."""
        if isinstance(self._generations, Generator):
            self._generations.close()

    @property
    def output(self) -> Output:
        """The finished answer; read the pieces first."""
        if self._output is None:
            raise InvalidRequest("the answer is not finished; read all pieces before asking for the output")
        return self._output


class Pair:
    """A target, its tokenizer, and the drafters at hand for it."""

    def __init__(
        self,
        target: Target,
        codec: TextCodec | None,
        drafter: Drafter | None = None,
        dflash_drafter: Drafter | Callable[[], Drafter | None] | None = None,
        *,
        context: int | None = None,
        max_batch: int = 8,
        name: str = "",
    ) -> None:
        """`dflash_drafter` may be a function that loads it when a method first needs it.

        `context` bounds prompt and answer together; None: what the target was made for.
        """
        _check_sizes(context, max_batch)
        if context is not None and context > target.max_positions:
            raise InvalidRequest(
                f"context is {context}; this target was made for at most {target.max_positions} tokens"
            )
        self.target, self.codec, self.name = target, codec, name
        self.drafter, self._dflash = drafter, dflash_drafter
        self.context = target.max_positions if context is None else context
        self._whole_context = context is not None
        self.max_batch = max_batch
        self._decoders: dict[tuple[int, bool], Decoder] = {}
        self._budgets: dict[Path, AdaptiveBudget] = {}
        self._said: set[str] = set()

    @property
    def dflash_drafter(self) -> Drafter | None:
        """The plain DFlash drafter, loaded at first use; None where there is none."""
        if self._dflash is not None and not isinstance(self._dflash, Drafter):
            self._dflash = self._dflash()
        return self._dflash

    @property
    def default_method(self) -> str:
        """What decodes where no method is named: what the drafter at hand is for, `ar` without one."""
        if self.drafter is not None and self.drafter.head is not None:
            return "lookuptree"
        return "ar" if self.drafter is None and self._dflash is None else "ddtree"

    @property
    def profiled(self) -> bool:
        """Whether this machine's costs are known for the drafter, so that it can be used by `adaptive`."""
        return self.drafter is not None and self._adaptive(self.drafter) is not None

    @property
    def default_budget(self) -> int:
        """The budget of a tree where none is named: smaller on a CPU, where each row of a pass costs arithmetic.

        Of 4, 8, 16 and 32 nodes 8 were fastest for the default pair in bf16 where AMX multiplies it. In fp32 a row
        costs more, and with 16 registers (AVX2) only passes of up to five rows are cheap: 4 nodes slow down no set of
        prompts (results/report.md). `dominotree profile` tells what rows cost on a machine, `dominotree tune` what is
        best there.
        """
        if self.target.device.type != "cpu":
            return DEFAULT_BUDGET
        if self.target.dtype == torch.bfloat16 and cpu_has_bf16():
            return CPU_BUDGET
        return FP32_CPU_BUDGET if vector_registers() == 32 else AVX2_BUDGET

    def drafting(self, method: str | None = None, budget: int | None = None, **options: Any) -> Drafting:
        """How to draft, with this pair's defaults where nothing is named; `options` are fields of `Drafting`."""
        drafting = Drafting(self.default_method if method is None else method, budget, **options)
        if budget is None and drafting.kind.rule == "fixed":
            return replace(drafting, budget=self.default_budget)
        return drafting

    @overload
    def generate(self, prompt: str | Sequence[Message] | Sequence[int], **options: Any) -> Output: ...
    @overload
    def generate(
        self, prompt: Sequence[str] | Sequence[Sequence[Message]] | Sequence[Sequence[int]], **options: Any
    ) -> list[Output]: ...

    def generate(self, prompt: Any, **options: Any) -> Output | list[Output]:
        """The answer to a prompt, or the answers to a list of prompts decoded together.

        A str is one chat turn (plain text with `raw=True`), a list of dicts a conversation, a list of ints
        token ids, a list of any of these a batch. Options: `method`, `budget`, `candidates`, `node_topk`,
        `noise_aware`; `sampling` (a `SamplingParams`) or its fields by name; `system`, `raw`. Raises
        `InvalidRequest` for what cannot be served.
        """
        batch = is_batch(prompt)
        prompts = list(prompt) if batch else [prompt]
        sampling, drafting, form = self._options(options)
        requests = [Request(self.prompt_ids(p, **form), sampling, drafting) for p in prompts]
        outputs = [Output.of(generation) for generation in self.decoder(requests).run(requests)]
        for output in outputs:
            self._judge(output)
        return outputs if batch else outputs[0]

    def stream(self, prompt: Prompt, **options: Any) -> TextIterator:
        """The answer to one prompt, piece by piece; options as for `generate`."""
        if is_batch(prompt):
            raise InvalidRequest("stream takes one prompt; use generate for a list of them")
        sampling, drafting, form = self._options(options)
        request = Request(self.prompt_ids(prompt, **form), sampling, drafting)
        return TextIterator(self.decoder([request]).stream(request), self)

    def chat(self, *, system: str | None = None, **options: Any) -> Chat:
        """A conversation that keeps what it has encoded; options as for `generate`, but for `raw`."""
        _, _, form = self._options(options)
        if form:
            raise InvalidRequest(f"{next(iter(form))} has no effect in a chat; leave it out")
        return Chat(self, system, options)

    def prompt_ids(self, prompt: Prompt, *, raw: bool = False, system: str | None = None) -> list[int]:
        """Token ids of a prompt of any kind."""
        if self.codec is not None:
            return self.codec.prompt_ids(prompt, raw=raw, system=system)
        if not is_token_ids(prompt):
            raise InvalidRequest("this pair has no tokenizer; give the prompt as token ids")
        return list(cast("Sequence[int]", prompt))

    def drafter_for(self, method: str) -> Drafter | None:
        """The drafter a method runs with; says so once where it is not the kind it was published with."""
        kind = METHODS[method].drafter
        if kind == "none":
            return None
        if kind == "dflash" and self.dflash_drafter is not None:
            return self.dflash_drafter
        if kind == "dflash" and self.drafter is not None and self.drafter.head is not None:
            self._say(f"{method} runs on the Domino drafter's uncorrected backbone; no DFlash drafter is at hand")
        return self.drafter if self.drafter is not None else self.dflash_drafter

    @property
    def chat_context(self) -> int:
        """Tokens of a conversation: all of it is set aside at once, so no more than was asked for, or 4096."""
        return self.context if self._whole_context else min(self.context, CHAT_CONTEXT)

    def decoder(self, requests: Sequence[Request], *, context: int | None = None) -> Decoder:
        """A decoder with room for `requests`, kept for the next ones; those of a fixed `context` are kept apart."""
        methods = {request.drafting.method for request in requests}
        drafters = {id(d): d for d in (self.drafter_for(m) for m in sorted(methods)) if d is not None}
        if len(drafters) > 1:
            raise InvalidRequest(
                f"methods {', '.join(sorted(methods))} use different drafters; run them one after another"
            )
        drafter = next(iter(drafters.values()), None)
        length = drafter.draft_length if drafter else 0
        nodes = max(request.drafting.nodes(length) for request in requests)
        longest = max(len(request.prompt) + request.sampling.max_new_tokens for request in requests)
        wanted = context or min(self.context, (longest + 511) // 512 * 512)
        slots = min(len(requests), self.max_batch)
        key = id(drafter), context is not None
        held = self._decoders.get(key)
        if (
            held is not None
            and held.context >= wanted
            and held.slots >= slots
            and held.max_nodes >= nodes
            and not held.busy
        ):
            if held.adaptive is None and drafter is not None and any(METHODS[m].rule != "fixed" for m in methods):
                held.adaptive = self._adaptive(drafter)  # the machine may have been profiled since
            return held
        if held is not None:
            wanted, slots, nodes = (
                max(wanted, held.context),
                max(slots, held.slots),
                max(nodes, held.max_nodes),
            )
            del self._decoders[key], held  # before its successor takes its memory
        made = Decoder(
            self.target,
            drafter,
            self.codec,
            slots=slots,
            context=wanted,
            max_nodes=nodes,
            adaptive=self._adaptive(drafter) if drafter is not None else None,
        )
        self._decoders[key] = made
        return made

    def _adaptive(self, drafter: Drafter) -> AdaptiveBudget | None:
        """The cost-aware budget of a drafter, where this machine has been profiled; one for all of its decoders."""
        learned = None
        try:  # most methods need neither file
            costs = find_profile(self.name, self.target, drafter)
        except InvalidRequest as error:
            self._say(str(error))
            return None
        if costs is None:
            return None
        path = calibration_path(costs.key)
        held = self._budgets.get(path)
        if held is not None and held.costs == costs:
            return held
        try:
            learned = Calibration.load(path, drafter.draft_length) if path.exists() else None
        except InvalidRequest as error:
            self._say(str(error))
        made = AdaptiveBudget(costs, learned or Calibration.fresh(drafter.draft_length))
        self._budgets[path] = made
        return made

    def _options(self, options: dict[str, Any]) -> tuple[SamplingParams, Drafting, dict[str, Any]]:
        options = dict(options)
        form: dict[str, Any] = {name: options.pop(name) for name in ("raw", "system") if name in options}
        chosen = {name: options.pop(name) for name in Drafting.__dataclass_fields__ if name in options}
        drafting = self.drafting(**chosen)
        sampling = options.pop("sampling", None) or SamplingParams()
        if not isinstance(sampling, SamplingParams):
            raise InvalidRequest(f"sampling is a {type(sampling).__name__}; a SamplingParams is expected")
        unknown = sorted(set(options) - set(SamplingParams.__dataclass_fields__))
        if unknown:
            raise InvalidRequest(
                f"option {unknown[0]!r} is unknown; sampling, system, raw, a field of Drafting "
                f"({', '.join(Drafting.__dataclass_fields__)}) or one of SamplingParams "
                f"({', '.join(SamplingParams.__dataclass_fields__)}) is expected"
            )
        return replace(sampling, **options), drafting, form

    def _judge(self, output: Output) -> None:
        """Keeps what was learned from a finished answer, and says when drafting was of no use."""
        drafter = self.drafter_for(output.method)
        if METHODS[output.method].rule == "calibrated" and drafter is not None:
            self.keep_learned(self._adaptive(drafter))
        useless = of_no_use(output.method, output.stats)
        if useless is not None:
            self._say(useless, once="acceptance")

    def keep_learned(self, adaptive: AdaptiveBudget | None) -> None:
        """Keeps what a budget has learned for the next process; where that cannot be written, says so once."""
        if adaptive is None:
            return
        try:
            adaptive.calibration.save(calibration_path(adaptive.costs.key))
        except OSError as error:
            self._say(f"what adaptive has learned could not be kept ({error})", once="calibration")

    def _say(self, text: str, *, once: str = "") -> None:
        """Warns, once for each text, or for each `once` where texts of a kind differ."""
        if (once or text) not in self._said:
            self._said.add(once or text)
            log.warning(text)


def of_no_use(method: str, stats: Stats) -> str | None:
    """What to say of an answer in which the drafter was hardly ever right."""
    drafted = METHODS[method].drafts and sum(stats.nodes) >= stats.rounds - 1 >= _ROUNDS_TO_JUDGE
    if not drafted or stats.mean_accepted >= NIL_ACCEPTANCE:
        return None
    return (
        f"the drafter is hardly ever right ({stats.mean_accepted:.2f} tokens a round): the output is correct but "
        "drafting only costs time; check that it was made for this target, or use method ar"
    )


class Chat:
    """A conversation; every turn re-uses the keys and values of what it has in common with the one before."""

    def __init__(self, pair: Pair, system: str | None, options: dict[str, Any]) -> None:
        self.pair = pair
        self.options = dict(options)
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def send(self, text: str) -> TextIterator:
        """The answer to the next user turn, piece by piece; it joins the conversation once all were read."""
        sampling, drafting, _ = self.pair._options(self.options)
        turn = [*self.messages, {"role": "user", "content": text}]
        request = Request(self.pair.prompt_ids(turn), sampling, drafting, reuse=True)
        decoder = self.pair.decoder([request], context=self.pair.chat_context)
        return TextIterator(self._remember(decoder.stream(request), turn), self.pair)

    def _remember(self, generations: Generator[Generation, None, None], turn: list[Message]) -> Iterator[Generation]:
        with closing(generations):
            for generation in generations:
                if generation.finished:
                    self.messages = [*turn, {"role": "assistant", "content": generation.text}]
                yield generation


def is_batch(prompt: Any) -> bool:
    """Whether `prompt` is a list of prompts. Raises `InvalidRequest` for what is no kind of prompt."""
    if isinstance(prompt, str) or (isinstance(prompt, (list, tuple)) and prompt and is_token_ids(prompt)):
        return False
    if not isinstance(prompt, (list, tuple)):
        raise InvalidRequest(
            f"the prompt is a {type(prompt).__name__}; a str, a list of messages, a list of token ids or a "
            "list of those is expected"
        )
    if not prompt:
        raise InvalidRequest("the list of prompts is empty; give at least one prompt")
    if all(isinstance(part, dict) for part in prompt):
        return False
    if all(isinstance(part, (str, list, tuple)) for part in prompt):
        return True
    raise InvalidRequest(
        "the list mixes kinds of prompts; give str, conversations or token ids, not numbers beside text"
    )


def _check_sizes(context: int | None, max_batch: int) -> None:
    for field, value in (("context", context), ("max_batch", max_batch)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise InvalidRequest(f"{field} is {value!r}; an integer is expected")
    if context is not None and context < 2:
        raise InvalidRequest(f"context is {context}; at least 2 tokens are expected")
    if max_batch < 1:
        raise InvalidRequest(f"max_batch is {max_batch}; a positive integer is expected")


def load(
    name: str | None = None,
    *,
    target: str | None = None,
    drafter: str | None = None,
    dflash_drafter: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    exact: bool | None = None,
    threads: int | None = None,
    context: int | None = None,
    max_batch: int = 8,
    progress: bool = True,
) -> Pair:
    """A target with its drafter.

    `name` is a named pair of ours, or use `target` and `drafter`: local folders, hub ids or names of pairs;
    drafter "none" leaves it out. Without either it is the default pair. `dtype` "auto" takes bf16 where the
    hardware has it. `exact`: see `DecoderTarget`. A target that our own decoder does not know is run by transformers,
    where it has full attention; a notice says so. Raises `ModelNotFound`, `UnsupportedModel`,
    `InvalidCheckpoint` with one line each.
    """
    set_threads(threads)
    for option, given in (("name", name), ("target", target), ("drafter", drafter), ("dflash_drafter", dflash_drafter)):
        if given is not None and not given.strip():
            raise InvalidRequest(f"{option} is empty; a name, a folder or a hub id is expected, or leave it out")
    if target is not None and name is not None:
        raise InvalidRequest("give a pair's name or a target, not both")
    chosen = target or name or hub.DEFAULT_PAIR
    on = parse_device(device)
    kind = parse_dtype(dtype, on)
    _check_sizes(context, max_batch)
    folder = hub.resolve_target(chosen, progress=progress)
    model = load_target(folder, dtype=kind, device=on, exact=exact, context=context)
    codec = TextCodec.from_folder(folder)
    if drafter is None and chosen in hub.PAIRS and hub.PAIRS[chosen].drafter is not None:
        drafter = f"{chosen}-domino"
    if dflash_drafter is None and drafter != "none" and chosen in hub.PAIRS and hub.has_drafter(f"{chosen}-dflash"):
        dflash_drafter = f"{chosen}-dflash"

    def read(wanted: str | None) -> Drafter | None:
        return load_drafter(wanted, model, codec, progress=progress)

    later = None if dflash_drafter in (None, "none") else lambda: read(dflash_drafter)
    return Pair(model, codec, read(drafter), later, context=context, max_batch=max_batch, name=chosen)


def load_drafter(name: str | None, target: Lender, codec: TextCodec | None, *, progress: bool = True) -> Drafter | None:
    """The drafter called `name` (a folder, hub id or name of ours), fitted to `target`; None for none."""
    if name is None or name == "none":
        return None
    folder: Path = hub.resolve_drafter(name, progress=progress)
    config, tensors = read_checkpoint(folder)
    stored = tensors["fc.weight"].dtype
    if stored != target.dtype:
        log.info(f"the drafter's {stored} weights are used in the target's {target.dtype}")
    check_fits_target(
        config,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        stop_token_ids=target.eos_token_ids,
        tokenizer_size=None if codec is None else codec.vocab_size,
        draft_tokens=draft_token_ids(tensors),
    )
    return Drafter(config, tensors, target)
