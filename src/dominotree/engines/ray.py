"""A fleet behind one endpoint: every replica is a whole server, Ray Serve spreads requests over them.

`serve run dominotree.ray:application target=FOLDER replicas=2` starts it. Ray Serve restarts replicas whose engine has
failed, moves those of a lost node, and lets a replica that it ends finish what it has begun.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from ray import serve

from dominotree.errors import InvalidRequest
from dominotree.methods import Drafting
from dominotree.pair import load
from dominotree.serve.app import Settings, create_app
from dominotree.serve.engine import Limits

_MARGIN_S = 5.0
_STARTS = 3


def _listed(value: Any) -> Any:
    """A list from a text with commas, which is all that a command line can pass on."""
    return value.split(",") if isinstance(value, str) else value


class Options(BaseModel):
    """What can be set; names as the flags of `dominotree serve` have them.

    Above `replicas`, up to `max_replicas`, their number follows the load. `cpus` and `gpus` are what Ray counts for a
    replica, `grace` the seconds that a replica which is ended has for what it has begun.
    """

    model_config = ConfigDict(extra="forbid")

    target: str | None = None
    drafter: str | None = None
    dflash_drafter: str | None = None
    method: str | None = None
    budget: int | None = None
    candidates: int | None = None
    node_topk: int | None = None
    noise_aware: bool = False
    context: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    exact: bool | None = None
    max_batch: int = 8
    max_queue: int = 64
    max_rows: int | None = None
    timeout: float | None = None
    grace: float = 60.0
    api_key: str | None = Field(default_factory=lambda: os.environ.get("DOMINOTREE_API_KEY"))
    model_name: str | None = None
    allowed_hosts: Annotated[list[str], BeforeValidator(_listed)] = []
    replicas: int = Field(default=1, ge=1)
    max_replicas: int | None = None
    cpus: float = Field(default=1.0, ge=0)
    gpus: float = Field(default=0.0, ge=0)

    @property
    def drafting(self) -> dict[str, Any]:
        """The options of drafting that were given, but for the method."""
        values = {name: getattr(self, name) for name in ("budget", "candidates", "node_topk", "noise_aware")}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    @property
    def limits(self) -> Limits:
        """What one replica takes at once."""
        return Limits(
            max_batch=self.max_batch,
            max_queue=self.max_queue,
            context=self.context,
            max_rows=self.max_rows,
            timeout_s=self.timeout,
        )

    @property
    def settings(self) -> Settings:
        """How a replica presents itself."""
        return Settings(
            model_name=self.model_name, api_key=self.api_key, grace_s=self.grace, hosts=tuple(self.allowed_hosts)
        )


class Replica:
    """One server of the fleet, with a model and an engine of its own."""

    def __init__(self, options: Options) -> None:
        pair = load(
            target=options.target,
            drafter=options.drafter,
            dflash_drafter=options.dflash_drafter,
            dtype=options.dtype,
            device=options.device,
            threads=options.threads,
            context=options.context,
            exact=options.exact,
        )
        drafting = pair.drafting(options.method, **options.drafting)
        drafting.kind.refuse_idle(options.drafting)
        self._server = create_app(pair, drafting, options.limits, options.settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._server

    def check_health(self) -> None:
        """Called by Ray Serve now and then; a replica for which it raises is replaced."""
        if not self._server.state.engine.live:
            raise RuntimeError("the engine has ended; this replica has to be replaced")


def application(args: Mapping[str, Any] | Options) -> serve.Application:
    """The fleet as an application for `serve.run` or `serve run`; `args` are `Options`, as texts or as values.

    Raises `InvalidRequest` for options that are unknown or out of range.
    """
    try:
        options = Options.model_validate(args)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    limits = options.limits
    options.settings  # noqa: B018 - raises here rather than in a replica
    drafting = Drafting(options.method or "ar", **options.drafting)
    if options.method is not None:
        drafting.kind.refuse_idle(options.drafting)
    if options.max_replicas is not None and options.max_replicas < options.replicas:
        raise InvalidRequest(
            f"max_replicas is {options.max_replicas}; at least replicas, {options.replicas}, is expected"
        )
    size: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        size = {
            "autoscaling_config": {
                "min_replicas": options.replicas,
                "max_replicas": options.max_replicas,
                "target_ongoing_requests": limits.max_batch,
            }
        }
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="dominotree",
        max_ongoing_requests=limits.max_batch + limits.max_queue,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        graceful_shutdown_timeout_s=options.grace + _MARGIN_S,
        max_constructor_retry_count=_STARTS,
        **size,
    )
    return deployment.bind(options)
