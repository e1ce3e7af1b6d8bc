"""``shotcast serve``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from shotcast import extras
from shotcast.cli.engine_options import GenerationConfig, Model, engine, importing, say, sums
from shotcast.cli.options import with_groups


def _since_start() -> float:
    """Return the seconds since this process started, including the import of PyTorch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


@with_groups(engine, sums)
def serve(
    model: Model,
    *,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str, typer.Option(envvar="SHOTCAST_API_KEY", help="The key that clients must send; none by default.")
    ] = "",
    served_model_name: Annotated[str, typer.Option(help="The name in the API. Default: the model's name.")] = "",
    engine: dict[str, Any],
    target: Annotated[
        str,
        typer.Option(
            help="What --layout auto plans for: throughput, latency, or bounds in ms such as ttft=500,tpot=20."
        ),
    ] = "throughput",
    workload: Annotated[
        str, typer.Option(help="Tokens in and out that --layout auto plans for. Default: 2048+128, or what fits.")
    ] = "",
    max_num_seqs: Annotated[int, typer.Option(help="Sequences in one batch.")] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens in one step; twice as many on GPUs while no sequence decodes.")
    ] = 2048,
    kv_cache: Annotated[
        str, typer.Option(help="Bytes of the KV cache on each rank, such as 512M. Default: what memory allows.")
    ] = "0",
    generation_config: GenerationConfig = "auto",
    sums: dict[str, Any],
    rank_timeout: Annotated[float, typer.Option(help="Seconds that a rank waits for another.")] = 60.0,
    stamp_every: Annotated[
        int, typer.Option(min=0, help="CUDA: time one step in this many for /metrics; 0 times none.")
    ] = 128,
    max_queue: Annotated[int, typer.Option(help="Concurrent requests; further ones get status 429.")] = 256,
    max_prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt; 0 for the model's limit.")] = 0,
    max_output_tokens: Annotated[int, typer.Option(help="Tokens of an output; 0 for the model's limit.")] = 0,
    max_body: Annotated[str, typer.Option(help="Bytes of a request body.")] = "1M",
    ping: Annotated[float, typer.Option(help="Seconds after which a quiet stream sends a comment.")] = 15.0,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="An origin of web pages that may use the server, or *. Repeatable.")
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds that running requests have to finish at shutdown.")] = 10.0,
) -> None:
    """Serve a model with the OpenAI HTTP API: /v1/completions, /v1/chat/completions, /metrics."""
    extras.require("server", "shotcast serve")
    with importing():
        from shotcast.engine.async_llm import AsyncLLM
        from shotcast.engine.tokenizer import Tokenizer
        from shotcast.server.main import ServerConfig, bind, refuse_requests, run
        from shotcast.units import parse_size

    options: dict[str, Any] = {
        "model": model,
        "target": target,
        "workload": workload,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_bytes": parse_size(kv_cache),
        "generation_config": generation_config,
        "timeout_s": rank_timeout,
        "stamp_every": stamp_every,
        **engine,
        **sums,
    }
    config = ServerConfig(
        host=host,
        port=port,
        api_key=api_key or None,
        served_model_name=served_model_name or None,
        max_queue=max_queue,
        max_prompt_tokens=max_prompt_tokens or None,
        max_output_tokens=max_output_tokens or None,
        max_body_bytes=parse_size(max_body),
        ping_s=ping,
        allowed_origins=tuple(allowed_origin or ()),
        drain_s=drain,
    )
    import logging

    from shotcast import env

    Tokenizer.find(model)
    # until the server listens and handles these signals itself, exit in order
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # at INFO, it would say that a server shuts down whenever an engine has started
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

    def listening(bound: int) -> None:
        say(f"serving {model} at http://{host}:{bound}/v1, ready {_since_start():.1f} s after the command")

    job = env.job()
    if job is not None and job.rank != 0:
        AsyncLLM(**options)  # which serves rank 0, and does not return
    with bind(config) as address:
        say(f"loading {model}; requests are answered with status 503 until it is ready")
        with refuse_requests(address, config):
            llm = AsyncLLM(**options)
        raise typer.Exit(run(llm, config, listening, address))
