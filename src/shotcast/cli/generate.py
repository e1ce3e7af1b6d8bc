"""``shotcast generate`` and ``shotcast chat``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shotcast.cli.engine_options import (
    Algorithm,
    Dtype,
    GenerationConfig,
    GpuMemoryUtilization,
    Layout,
    MaxModelLen,
    MaxTokens,
    MinP,
    Model,
    Overlap,
    PipelineParallel,
    Quantization,
    Seed,
    SequenceParallel,
    Temperature,
    TensorParallel,
    TopK,
    TopP,
    engine_options,
    say,
)
from shotcast.cli.options import Device, DeviceOption
from shotcast.errors import ConfigError

if TYPE_CHECKING:
    from shotcast.engine.llm import LLM
    from shotcast.engine.outputs import RequestOutput
    from shotcast.engine.sampling_params import SamplingParams


_GENERATE_DEFAULTS = {"temperature": 0.0, "max_tokens": 128}
_CHAT_DEFAULTS = {"temperature": 0.7, "top_p": 0.95, "max_tokens": 512}


def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The text to complete, or with --chat the message to answer.")],
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    tensor_parallel: TensorParallel = None,
    pipeline_parallel: PipelineParallel = None,
    layout: Layout = "",
    device: DeviceOption = Device.AUTO,
    dtype: Dtype = "",
    quantization: Quantization = "",
    max_model_len: MaxModelLen = 0,
    gpu_memory_utilization: GpuMemoryUtilization = 0.9,
    algorithm: Algorithm = "auto",
    sequence_parallel: SequenceParallel = False,
    overlap: Overlap = "auto",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
) -> None:
    """Complete a prompt, and report how long it took.

    Without options, always takes the likeliest token, up to 128 of them.
    """
    from shotcast.engine.llm import LLM
    from shotcast.engine.sampling_params import SamplingParams

    given = _given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    params = SamplingParams(**{**_GENERATE_DEFAULTS, **given})
    common = model, device, tensor_parallel, pipeline_parallel, layout, dtype, quantization, max_model_len
    modes: dict[str, Any] = {"algorithm": algorithm, "sequence_parallel": sequence_parallel, "overlap": overlap}
    options = engine_options(*common, gpu_memory_utilization, max_sequences=1, **modes)
    with LLM(**options) as llm:
        _say_layout(llm)
        tokens = llm.tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) if chat else prompt
        output = _print_answer(llm.stream(tokens, params))
        if output is None:
            raise KeyboardInterrupt
        say(_summary(llm, output))


def chat(
    model: Model,
    system: Annotated[str, typer.Option("--system", help="The system message.")] = "",
    tensor_parallel: TensorParallel = None,
    pipeline_parallel: PipelineParallel = None,
    layout: Layout = "",
    device: DeviceOption = Device.AUTO,
    dtype: Dtype = "",
    quantization: Quantization = "",
    max_model_len: MaxModelLen = 0,
    gpu_memory_utilization: GpuMemoryUtilization = 0.9,
    generation_config: GenerationConfig = "auto",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
) -> None:
    """Chat with a model. An empty line or Ctrl-D ends the chat; Ctrl-C ends an answer.

    Sampling options have the defaults of the model's generation_config.json, and else a temperature of 0.7, a top-p of
    0.95 and at most 512 tokens.
    """
    from shotcast.engine.llm import LLM
    from shotcast.engine.sampling_params import SamplingParams

    given = _given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    SamplingParams(**given)  # refused before the model is loaded
    common = model, device, tensor_parallel, pipeline_parallel, layout, dtype, quantization, max_model_len
    options = engine_options(*common, gpu_memory_utilization, max_sequences=1, generation_config=generation_config)
    messages = [{"role": "system", "content": system}] if system else []
    with LLM(**options) as llm:
        _say_layout(llm)
        params = SamplingParams(**{**_CHAT_DEFAULTS, **llm.sampling_defaults, **given})
        while (line := _read_line()) != "":
            messages.append({"role": "user", "content": line})
            _answer(llm, messages, params)


def _given(**options: float | None) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> None:
    """Answer the last of ``messages`` and append the answer.

    Without an answer, or without room for one, remove the last message again.
    """
    answer = None
    try:
        answer = _print_answer(llm.stream(llm.tokenizer.apply_chat_template(messages), params))
    except ConfigError as error:
        say(f"{error}")
    if answer is None:
        messages.pop()
    else:
        messages.append({"role": "assistant", "content": answer.text})


def _say_layout(llm: LLM) -> None:
    if llm.layout_choice is not None:
        say(f"{llm.layout_choice}")


def _read_line() -> str:
    """Return the line that the user typed; empty at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _print_answer(outputs: Iterator[RequestOutput]) -> RequestOutput | None:
    """Print an answer as it arrives; Ctrl-C ends it. Return None if none of it had arrived."""
    output = None
    with contextlib.suppress(KeyboardInterrupt):
        for output in outputs:
            typer.echo(output.delta, nl=False)
            sys.stdout.flush()
    typer.echo()
    if output is not None and output.error:
        say(f"the answer ended with an error: {output.error}")
    return output


def _summary(llm: LLM, output: RequestOutput) -> str:
    """Return a line about the time that an answer took."""
    stats, config = llm.stats(), llm.config
    ranks = (
        f"{config.tensor_parallel} x {config.pipeline_parallel}" if config.pipeline_parallel > 1 else f"{config.ranks}"
    )
    summary = (
        f"{len(output.prompt_tokens)} tokens in, {len(output.tokens)} out on {ranks} {config.device} rank"
        f"{'s' if config.ranks > 1 else ''}; first after {(output.ttft_s or 0.0) * 1e3:.0f} ms"
    )
    if output.tpot_s:
        summary += f", then {output.tpot_s * 1e3:.1f} ms each ({1 / output.tpot_s:.1f} tokens/s)"
    if config.ranks > 1 and stats.step_s:
        summary += f"; {stats.communication_s / stats.step_s:.1%} of the time in communication"
    return summary
