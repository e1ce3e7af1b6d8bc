"""``shotcast generate`` and ``shotcast chat``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shotcast import extras
from shotcast.cli.engine_options import GenerationConfig, Model, engine, importing, sampling, say, sums
from shotcast.cli.options import with_groups
from shotcast.errors import ConfigError

if TYPE_CHECKING:
    from shotcast.engine.llm import LLM
    from shotcast.engine.outputs import RequestOutput
    from shotcast.engine.sampling_params import SamplingParams


_GENERATE_DEFAULTS = {"temperature": 0.0, "max_tokens": 128}
_CHAT_DEFAULTS = {"temperature": 0.7, "top_p": 0.95, "max_tokens": 512}


@with_groups(engine, sums, sampling)
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The text to complete, or with --chat the message to answer.")],
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    *,
    engine: dict[str, Any],
    sums: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Complete a prompt, and report how long it took.

    Without options, always takes the likeliest token, up to 128 of them.
    """
    extras.require("engine", "shotcast generate")
    with importing():
        from shotcast.engine.llm import LLM
        from shotcast.engine.sampling_params import SamplingParams

    params = SamplingParams(**{**_GENERATE_DEFAULTS, **sampling})
    with LLM(model, max_num_seqs=1, **engine, **sums) as llm:
        _say_layout(llm)
        tokens = llm.tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) if chat else prompt
        output = _print_answer(llm.stream(tokens, params))
        if output is None:
            raise KeyboardInterrupt
        say(_summary(llm, output))


@with_groups(engine, sampling)
def chat(
    model: Model,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    *,
    engine: dict[str, Any],
    generation_config: GenerationConfig = "auto",
    sampling: dict[str, Any],
) -> None:
    """Chat with a model. An empty line or Ctrl-D ends the chat; Ctrl-C ends an answer.

    Sampling options default to the model's generation_config.json, or else to a temperature of 0.7, a top-p of 0.95 and
    at most 512 tokens.
    """
    extras.require("engine", "shotcast chat")
    with importing():
        from shotcast.engine.llm import LLM
        from shotcast.engine.sampling_params import SamplingParams

    SamplingParams(**sampling)  # refused before the model is loaded
    messages = [{"role": "system", "content": system}] if system else []
    with LLM(model, max_num_seqs=1, generation_config=generation_config, **engine) as llm:
        _say_layout(llm)
        params = SamplingParams(**{**_CHAT_DEFAULTS, **llm.sampling_defaults, **sampling})
        while (line := _read_line()) != "":
            messages.append({"role": "user", "content": line})
            _answer(llm, messages, params)


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> None:
    """Answer the last of ``messages`` and append the answer.

    If there is no answer or no room for one, remove the last message.
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
    """Return the line that the user typed; empty at end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _print_answer(outputs: Iterator[RequestOutput]) -> RequestOutput | None:
    """Print an answer as it arrives; Ctrl-C ends it. Return None if nothing had arrived."""
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
    """Return a one-line summary of an answer's timing."""
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
