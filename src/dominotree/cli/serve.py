"""`dominotree serve`: an HTTP server that speaks the OpenAI API."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from dominotree.cli import common
from dominotree.cli.common import ModelOptions, given, load_pair, needs_extra
from dominotree.errors import InvalidRequest


def serve(
    target: common.Target = None,
    drafter: common.DrafterName = None,
    dflash_drafter: common.DFlashDrafter = None,
    method: common.MethodName = None,
    budget: common.Budget = None,
    candidates: common.Candidates = None,
    node_topk: common.NodeTopk = None,
    noise_aware: common.NoiseAware = False,
    context: Annotated[
        int | None, typer.Option("--context", help="Most tokens of prompt and answer.  [default: 4096, or the model's]")
    ] = None,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    threads: common.Threads = None,
    exact: common.Exact = None,
    max_batch: Annotated[int, typer.Option("--max-batch", help="Sequences decoded at once.")] = 8,
    max_queue: Annotated[int, typer.Option("--max-queue", help="Sequences that may wait; more get a 429.")] = 64,
    max_rows: Annotated[
        int | None,
        typer.Option(
            "--max-rows",
            help="Most rows of a pass that several share.  [default: by the profile, or 64; 16 without bf16, GPU 512]",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", help="Seconds an answer may take, waiting included.  [default: no end]"),
    ] = None,
    grace: Annotated[float, typer.Option("--grace", help="Seconds that answers may still take at shutdown.")] = 10.0,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="DOMINOTREE_API_KEY",
            show_envvar=True,
            help="Key that clients must send. The variable does not show in the list of processes.",
        ),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="What clients call the model.  [default: the target's name]")
    ] = None,
    max_body: Annotated[
        int | None, typer.Option("--max-body", help="Most bytes of a request.  [default: 4194304]")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="Host name that clients may call it by, beside localhost and --host; *: any. May be repeated.",
        ),
    ] = None,
    tool_format: Annotated[
        str,
        typer.Option("--tool-format", help="How the model writes calls of tools: auto, hermes, llama or none."),
    ] = "auto",
    page: Annotated[bool, typer.Option("--page/--no-page", help="Serve the page at /.")] = True,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Put prompts into the log.")] = False,
) -> None:
    """Serve a model to clients of the OpenAI API, many at once, until Ctrl-C."""
    with needs_extra("serve", "the server"):
        from dominotree.serve.app import Settings, create_app
        from dominotree.serve.engine import Limits
        from dominotree.serve.run import listen, log_to
        from dominotree.serve.run import serve as run

    if api_key is None and os.environ.get("DOMINOTREE_API_KEY") is not None:
        raise InvalidRequest("DOMINOTREE_API_KEY is set and empty; give it a text, or unset it to serve without a key")
    limits = Limits(max_batch=max_batch, max_queue=max_queue, context=context, max_rows=max_rows, timeout_s=timeout)
    settings = Settings(
        **given(model_name=model_name, api_key=api_key, max_body=max_body),
        grace_s=grace,
        log_prompts=log_prompts,
        page=page,
        hosts=(host, *(allowed_host or ())),
        tool_format=tool_format,
    )
    model = ModelOptions(target, drafter, dflash_drafter, dtype, device, threads, context, exact)
    drafting = given(method=method, budget=budget, candidates=candidates, node_topk=node_topk, noise_aware=noise_aware)
    with listen(host, port) as listener:  # before anything is loaded
        pair, drafting = load_pair(model, drafting, others_draft=True)
        app = create_app(pair, pair.drafting(**drafting), limits, settings)
        log_to()
        run(app, host=host, listener=listener)
