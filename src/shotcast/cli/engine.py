"""``shotcast generate``, ``shotcast chat``, ``shotcast serve``."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from shotcast.cli.options import Device, DeviceOption
from shotcast.errors import ConfigError

if TYPE_CHECKING:
    from shotcast.engine.llm import LLM
    from shotcast.engine.requests import RequestOutput, SamplingParams

Model = Annotated[
    str,
    typer.Option(
        "-m", "--model", help="A folder of Hugging Face, a GGUF file, smollm2, or random:PRESET, random:PRESET:LAYERS."
    ),
]
TensorParallel = Annotated[int, typer.Option("-t", "--tensor-parallel", help="Ranks that share each layer.")]
PipelineParallel = Annotated[int, typer.Option("-p", "--pipeline-parallel", help="Stages of layers.")]
Dtype = Annotated[str, typer.Option("-d", "--dtype", help="Default: float32 on the CPU, bfloat16 on CUDA.")]
Quantization = Annotated[str, typer.Option("--quantization", help="fp8: layers' weights as e4m3, on CUDA.")]
MaxModelLen = Annotated[int, typer.Option("--max-model-len", help="Tokens of prompt and output. Default: the model's.")]
MaxSequences = Annotated[int, typer.Option("--max-sequences", help="Sequences computed together.")]
MaxBatchTokens = Annotated[int, typer.Option("--max-batch-tokens", help="Tokens of a step.")]
KvCache = Annotated[str, typer.Option("--kv-cache", help="Bytes of a rank for keys and values, such as 512M.")]
Algorithm = Annotated[str, typer.Option("--algorithm", help="Of all-reduces: auto, one_shot, two_shot, ring, vendor.")]
SequenceParallel = Annotated[bool, typer.Option("--sequence-parallel", help="Divide the residual of long steps.")]
StampEvery = Annotated[
    int, typer.Option("--stamp-every", min=0, help="CUDA: of so many steps, one is timed for /metrics. 0: none.")
]
RankTimeout = Annotated[float, typer.Option("--rank-timeout", help="Seconds that a rank waits for another.")]
MaxTokens = Annotated[int, typer.Option("-n", "--max-tokens", help="Tokens of the answer, at most.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token, always.")]
TopP = Annotated[float, typer.Option("--top-p", help="Of the likeliest tokens, those that reach this probability.")]
TopK = Annotated[int, typer.Option("--top-k", help="Of the likeliest tokens, so many; 0 for all.")]
MinP = Annotated[float, typer.Option("--min-p", help="Tokens at least this likely, the likeliest being 1.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Makes the draws repeatable.")]


def _options(
    model: str,
    device: Device,
    tensor_parallel: int,
    pipeline_parallel: int,
    dtype: str,
    quantization: str,
    max_model_len: int,
    **others: Any,
) -> dict[str, Any]:
    return {
        "model": model,
        "device": device.value,
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
        "dtype": dtype,
        "quantization": quantization,
        "max_model_len": max_model_len,
        "progress": sys.stderr.isatty(),
        **others,
    }


def generate(
    prompt: Annotated[str, typer.Argument(help="What to complete; with --chat, what to answer.")],
    model: Model = "smollm2",
    chat: Annotated[bool, typer.Option("--chat", help="Ask by the model's chat template.")] = False,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    device: DeviceOption = Device.AUTO,
    dtype: Dtype = "",
    quantization: Quantization = "",
    max_model_len: MaxModelLen = 0,
    algorithm: Algorithm = "auto",
    sequence_parallel: SequenceParallel = False,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
) -> None:
    """Complete a prompt, and say what it took."""
    from shotcast.engine.llm import LLM
    from shotcast.engine.requests import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
    )
    options = _options(
        model,
        device,
        tensor_parallel,
        pipeline_parallel,
        dtype,
        quantization,
        max_model_len,
        algorithm=algorithm,
        sequence_parallel=sequence_parallel,
        max_sequences=1,
    )
    with LLM(**options) as llm:
        tokens = llm.tokenizer.chat([{"role": "user", "content": prompt}]) if chat else prompt
        output = _show(llm.stream(tokens, params))
        if output is None:
            raise KeyboardInterrupt
        _say(_summary(llm, output))


def chat(
    model: Model = "smollm2",
    system: Annotated[str, typer.Option("--system", help="What the model is told first.")] = "",
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    device: DeviceOption = Device.AUTO,
    dtype: Dtype = "",
    quantization: Quantization = "",
    max_model_len: MaxModelLen = 0,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
) -> None:
    """Talk with a model. An empty line or Ctrl-D ends it; Ctrl-C ends an answer."""
    from shotcast.engine.llm import LLM
    from shotcast.engine.requests import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
    )
    options = _options(
        model, device, tensor_parallel, pipeline_parallel, dtype, quantization, max_model_len, max_sequences=1
    )
    messages = [{"role": "system", "content": system}] if system else []
    with LLM(**options) as llm:
        while (line := _ask()) != "":
            messages.append({"role": "user", "content": line})
            _converse(llm, messages, params)


def _converse(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> None:
    """Answer the last of ``messages``, and add the answer; or take it back where there is none, or no room for one."""
    answer = None
    try:
        answer = _show(llm.stream(llm.tokenizer.chat(messages), params))
    except ConfigError as error:
        _say(f"{error}")
    if answer is None:
        messages.pop()
    else:
        messages.append({"role": "assistant", "content": answer.text})


def serve(
    model: Model = "smollm2",
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str, typer.Option("--api-key", envvar="SHOTCAST_API_KEY", help="What clients have to show; none by default.")
    ] = "",
    served_model_name: Annotated[str, typer.Option("--served-model-name", help="Default: the model's name.")] = "",
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    device: DeviceOption = Device.AUTO,
    dtype: Dtype = "",
    quantization: Quantization = "",
    max_model_len: MaxModelLen = 0,
    max_sequences: MaxSequences = 64,
    max_batch_tokens: MaxBatchTokens = 2048,
    kv_cache: KvCache = "0",
    algorithm: Algorithm = "auto",
    sequence_parallel: SequenceParallel = False,
    rank_timeout: RankTimeout = 60.0,
    stamp_every: StampEvery = 128,
    max_queue: Annotated[int, typer.Option("--max-queue", help="Requests at once; more get 429.")] = 256,
    max_prompt_tokens: Annotated[int, typer.Option("--max-prompt-tokens", help="0: as the model allows.")] = 0,
    max_output_tokens: Annotated[int, typer.Option("--max-output-tokens", help="0: as the model allows.")] = 0,
    max_body: Annotated[str, typer.Option("--max-body", help="Bytes of a request.")] = "1M",
    drain: Annotated[float, typer.Option("--drain", help="Seconds that running requests have at the end.")] = 10.0,
    restart: Annotated[bool, typer.Option("--restart", help="Start the ranks again when one dies.")] = False,
) -> None:
    """Serve a model by OpenAI's HTTP interface: /v1/completions, /v1/chat/completions, /metrics."""
    from shotcast.server.main import ServerConfig, reserve, run
    from shotcast.server.restart import run_again
    from shotcast.units import parse_size

    options = _options(
        model,
        device,
        tensor_parallel,
        pipeline_parallel,
        dtype,
        quantization,
        max_model_len,
        max_sequences=max_sequences,
        max_batch_tokens=max_batch_tokens,
        kv_cache_bytes=parse_size(kv_cache),
        algorithm=algorithm,
        sequence_parallel=sequence_parallel,
        timeout_s=rank_timeout,
        stamp_every=stamp_every,
    )
    config = ServerConfig(
        host=host,
        port=port,
        api_key=api_key or None,
        served_model_name=served_model_name or None,
        max_queue=max_queue,
        max_prompt_tokens=max_prompt_tokens or None,
        max_output_tokens=max_output_tokens or None,
        max_body_bytes=parse_size(max_body),
        drain_s=drain,
    )
    import logging

    from shotcast.engine.async_llm import AsyncLLM
    from shotcast.engine.tokenizer import Tokenizer

    Tokenizer.find(model)
    # while it does not listen, which has a way of its own to end: what was begun is ended in order
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def listening(bound: int) -> None:
        _say(f"serving {model} at http://{host}:{bound}/v1")

    def start() -> AsyncLLM:
        llm = AsyncLLM(**options)
        options["device"] = llm.config.device  # none after it is to find another
        return llm

    if restart:
        raise typer.Exit(run_again(start, config, listening))
    with reserve(config) as address:
        raise typer.Exit(run(start(), config, listening, address))


def _ask() -> str:
    """What is typed; empty at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _show(outputs: Iterator[RequestOutput]) -> RequestOutput | None:
    """Print an answer while it is made; Ctrl-C ends it where it stands. None before there was any of it."""
    output = None
    with contextlib.suppress(KeyboardInterrupt):
        for output in outputs:
            typer.echo(output.delta, nl=False)
            sys.stdout.flush()
    typer.echo()
    if output is not None and output.error:
        _say(f"it ended with an error: {output.error}")
    return output


def _say(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(text, style="dim", markup=False, highlight=False)


def _summary(llm: LLM, output: RequestOutput) -> str:
    """What an answer took."""
    stats, config = llm.stats(), llm.config
    ranks = (
        f"{config.tensor_parallel} x {config.pipeline_parallel}" if config.pipeline_parallel > 1 else f"{config.ranks}"
    )
    told = (
        f"{len(output.prompt_tokens)} tokens in, {len(output.tokens)} out on {ranks} {config.device} rank"
        f"{'s' if config.ranks > 1 else ''}; first after {(output.ttft_s or 0.0) * 1e3:.0f} ms"
    )
    if output.tpot_s:
        told += f", then {output.tpot_s * 1e3:.1f} ms each ({1 / output.tpot_s:.1f} tokens/s)"
    if config.ranks > 1 and stats.step_s:
        told += f"; {stats.communication_s / stats.step_s:.1%} of the time in communication"
    return told
