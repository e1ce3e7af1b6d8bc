"""From tokens to what the caller reads: text that grows, stop strings, times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from shotcast.engine.requests import Progress, RequestOutput, SamplingParams
from shotcast.engine.stopping import StopStrings
from shotcast.engine.tokenizer import IncrementalDecoder, Tokenizer


class OutputBuilder:
    """The output of one request, as its tokens come.

    Args:
        tokenizer: None for outputs without text.
        end_tokens: the model's own, which leave no text.
        late: nobody reads the text before the output ends, so it need not be made before.
    """

    def __init__(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        end_tokens: tuple[int, ...],
        late: bool = False,
    ):
        self._output = RequestOutput(request_id, prompt)
        if params.logprobs is not None:
            self._output.logprobs = []
        self._tokenizer = tokenizer
        self._late = late and not params.stop
        self._decoder = None if tokenizer is None or self._late else IncrementalDecoder(tokenizer)
        self._stops = StopStrings(params.stop)
        self._end_tokens = frozenset(end_tokens)
        self._started = time.perf_counter()

    def copy(self) -> RequestOutput:
        """The output as it is now."""
        output = self._output
        logprobs = output.logprobs and list(output.logprobs)
        return replace(output, tokens=list(output.tokens), times_s=list(output.times_s), logprobs=logprobs)

    def take(self, progress: Progress, arrived: float) -> RequestOutput:
        """The output, grown by ``progress``, which came at ``arrived`` by :func:`time.perf_counter`; it grows on.

        When a stop string ended it, the engine does not know that yet.
        """
        output = self._output
        output.time_s = arrived - self._started
        if progress.tokens and not output.tokens:
            output.cached_tokens = progress.cached
        output.tokens += progress.tokens
        output.times_s += [output.time_s] * len(progress.tokens)
        if output.logprobs is not None:
            output.logprobs += progress.logprobs or ()
        output.delta = ""
        found = self._read(progress)
        output.text += output.delta
        if found is not None:
            output.finish_reason, output.stop_reason = "stop", found
        elif progress.finish is not None:
            output.finish_reason, output.error = progress.finish, progress.error
            if progress.stop_token not in self._end_tokens:
                output.stop_reason = progress.stop_token
        return output

    def _read(self, progress: Progress) -> str | None:
        """Turn new tokens into text; the stop string that they complete."""
        last = progress.finish is not None
        if self._tokenizer is None or (self._late and not last):
            return None
        tokens: Sequence[int] = self._output.tokens if self._late else progress.tokens
        if progress.stop_token is not None:  # the last one
            tokens = tokens[:-1]
        if self._decoder is None:
            text = self._tokenizer.continuation(tokens)
        else:
            text = "".join(map(self._decoder.push, tokens))
            if last:
                text += self._decoder.flush()
        self._output.delta, found = self._stops.push(text, last)
        return found
