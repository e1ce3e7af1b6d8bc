"""Conversion of the engine core's outputs to user-visible outputs: text, stop strings and times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shotcast.engine.detokenizer import IncrementalDetokenizer, StopStrings
from shotcast.engine.outputs import EngineCoreOutput, RequestOutput
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.tokenizer import Tokenizer


class OutputProcessor:
    """Builds the output of one request as its tokens arrive.

    Args:
        tokenizer: None for an output without text.
        end_tokens: the model's end tokens, which have no text.
        detokenize_at_end: the text is not read before the output ends, so it is produced then, unless there are stop
            strings to look for.
    """

    def __init__(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        end_tokens: tuple[int, ...],
        detokenize_at_end: bool = False,
    ):
        self._output = RequestOutput(request_id, prompt)
        if params.logprobs is not None:
            self._output.logprobs = []
        self._tokenizer = tokenizer
        self._at_end = detokenize_at_end and not params.stop
        self._skip_special = params.skip_special_tokens
        self._detokenizer = (
            None if tokenizer is None or self._at_end else IncrementalDetokenizer(tokenizer, self._skip_special)
        )
        self._has_stops = bool(params.stop)
        self._stops = StopStrings(params.stop)
        self._min_tokens = params.min_tokens
        self._end_tokens = frozenset(end_tokens)
        self._started = time.perf_counter()

    def copy(self) -> RequestOutput:
        output = self._output
        logprobs = output.logprobs and list(output.logprobs)
        return replace(output, tokens=list(output.tokens), times_s=list(output.times_s), logprobs=logprobs)

    def update(self, step: EngineCoreOutput, arrived: float) -> RequestOutput:
        """Add the output of a step, and return the request's output, which later updates change.

        If a stop string ends the output, the engine core does not know it yet; the output ends with the token that
        completes the string, even if the step has more.

        Args:
            arrived: when the step arrived, by :func:`time.perf_counter`.
        """
        output = self._output
        delta = ""
        for part in _single_tokens(step) if self._has_stops and len(step.tokens) > 1 else (step,):
            self._add(part, arrived)
            delta += output.delta
            if output.finished:
                break
        output.delta = delta
        return output

    def _add(self, step: EngineCoreOutput, arrived: float) -> None:
        output = self._output
        output.time_s = arrived - self._started
        if not output.tokens:
            output.cached_tokens = step.cached_tokens
        if step.prompt_logprobs is not None:
            output.prompt_logprobs = (None, *step.prompt_logprobs)
        output.tokens += step.tokens
        output.times_s += [output.time_s] * len(step.tokens)
        if output.logprobs is not None:
            output.logprobs += step.logprobs or ()
        output.delta = ""
        stop_string = self._detokenize(step)
        output.text += output.delta
        if stop_string is not None:
            output.finish_reason, output.stop_reason = "stop", stop_string
        elif step.finish_reason is not None:
            output.finish_reason, output.error = step.finish_reason, step.error
            if step.stop_token not in self._end_tokens:
                output.stop_reason = step.stop_token

    def _detokenize(self, step: EngineCoreOutput) -> str | None:
        """Convert new tokens to text, and return the stop string that they complete."""
        last = step.finish_reason is not None
        if self._tokenizer is None or (self._at_end and not last):
            return None
        tokens: Sequence[int] = self._output.tokens if self._at_end else step.tokens
        if step.stop_token is not None:  # it is the last one, and no part of the text
            tokens = tokens[:-1]
        early = ""  # the text of the first min_tokens, which no stop string ends
        if self._detokenizer is None:
            text = self._tokenizer.decode_continuation(tokens, self._skip_special)
        else:
            count = max(0, self._min_tokens - (len(self._output.tokens) - len(step.tokens)))
            early = "".join(map(self._detokenizer.push, tokens[:count]))
            text = "".join(map(self._detokenizer.push, tokens[count:]))
            if last:
                text += self._detokenizer.flush()
        released, stop_string = self._stops.push(text, last)
        self._output.delta = early + released
        return stop_string


def _single_tokens(step: EngineCoreOutput) -> Iterator[EngineCoreOutput]:
    """Split the output of a step into outputs of one token each; the last one keeps the step's end."""
    last = len(step.tokens) - 1
    for place in range(last + 1):
        some = slice(place, place + 1)
        part = step._replace(tokens=step.tokens[some], logprobs=step.logprobs and step.logprobs[some])
        yield part if place == last else part._replace(finish_reason=None, stop_token=None)
