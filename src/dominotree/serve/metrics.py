"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from dominotree.serve.engine import Answer

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
_RATES = (1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_LENGTHS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"dominotree_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"dominotree_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"dominotree_{name}", text, buckets=buckets, registry=registry)

        self.requests = counter("http_requests", "HTTP requests by route and status.", ("route", "status"))
        self.answers = counter(
            "answers", "Answers by outcome: stop, length, cancelled, timeout, error, shutdown.", ("outcome", "method")
        )
        self.queue = histogram("queue_seconds", "From arrival until a slot was free.", _SECONDS)
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self.per_token = histogram(
            "time_per_output_token_seconds", "Mean time between tokens of an answer.", _TOKEN_SECONDS
        )
        self.duration = histogram("request_seconds", "From arrival to the end of an answer.", _SECONDS)
        self.speed = histogram("tokens_per_second", "Decoding speed of an answer, prefill not counted.", _RATES)
        self.tau = histogram("acceptance_length", "Tokens committed per round of an answer (tau).", _LENGTHS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished answers.")
        self.cached_tokens = counter("cached_prompt_tokens", "Prompt tokens taken from the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Answers whose prompt began with something cached.")
        self.prefix_queries = counter("prefix_cache_queries", "Answers that looked into the prefix cache.")
        self.new_tokens = counter("generated_tokens", "Tokens generated.")
        self.rounds = counter("rounds", "Verification rounds, counted once per sequence.")
        self.round_tokens = counter("round_tokens", "Tokens committed by rounds; over rounds it is tau.")
        self.nodes = counter("draft_nodes", "Nodes of trees verified.")
        self.accepted_at = counter("accepted_drafts_at_depth", "Rounds that accepted at this depth.", ("depth",))
        self.slots = gauge("slots", "Sequences that can be decoded at once.")
        self.running = gauge("running", "Sequences in a slot.")
        self.waiting = gauge("waiting", "Sequences in the queue.")
        self.kv_used = gauge("kv_tokens", "Tokens of sequences in a slot.")
        self.kv_capacity = gauge("kv_capacity_tokens", "Tokens that all slots can hold.")
        self.up = gauge("engine_up", "1 while the engine runs.")

    def progress(self, *, tokens: int, accepted: Sequence[int], nodes: int) -> None:
        """Counts what a round gave one sequence; `accepted` are the tokens that its new rounds committed."""
        if tokens:
            self.new_tokens.inc(tokens)
        for committed in accepted:
            self.rounds.inc()
            self.round_tokens.inc(committed)
            for depth in range(1, committed):
                self.accepted_at.labels(str(depth)).inc()
        if nodes:
            self.nodes.inc(nodes)

    def finished(self, answer: Answer) -> None:
        """Counts an answer that has ended, however it did."""
        stats, arrived = answer.stats, answer.submitted
        self.answers.labels(answer.outcome, answer.request.drafting.method).inc()
        if answer.started is not None:
            self.queue.observe(answer.started - arrived)
            self.prompt_tokens.inc(stats.prompt_tokens)
            if answer.request.reuse:
                self.prefix_queries.inc()
                self.cached_tokens.inc(stats.reused_tokens)
                self.prefix_hits.inc(stats.reused_tokens > 0)
        if answer.first_token is not None:
            self.first_token.observe(answer.first_token - arrived)
        if answer.finished is not None and answer.outcome in ("stop", "length"):
            self.duration.observe(answer.finished - arrived)
            if answer.first_token is not None and stats.new_tokens > 1:
                self.per_token.observe((answer.finished - answer.first_token) / (stats.new_tokens - 1))
            if stats.rounds:
                self.speed.observe(stats.tokens_per_s)
                self.tau.observe(stats.mean_accepted)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
