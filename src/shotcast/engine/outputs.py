"""Outputs of the engine: per step from the engine core, and per request to the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position of the output or the prompt.

    They refer to the model's distribution, before temperature and the other sampling parameters.

    Attributes:
        token: the sampled token, or the prompt's token.
        logprob: its log-probability.
        rank: its rank among all tokens, 1 for the likeliest.
        top: as many of the likeliest tokens as were requested, with their log-probabilities, likeliest first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The tokens that a step sampled."""

    number: int  # the number of the plan
    # one token, or INVALID_TOKEN, for each sequence that samples, in their order, and for each of its proposals the
    # token after it
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]  # log-probabilities for each of them, or None where they are not wanted
    # those of all :class:`~shotcast.engine.step_plan.PromptTargets` of the plan, in order
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    # which of ``tokens`` should not have been sampled, by their index, and why
    failures: tuple[tuple[int, str], ...] = ()
    # the draft model's proposals for each of the first sequences that sample, in their order; the others have none
    proposals: tuple[tuple[int, ...], ...] = ()


class EngineCoreOutput(NamedTuple):
    """The output of one step for one request, sent by the engine core."""

    request_id: str
    tokens: tuple[int, ...]  # tokens sampled since the previous output, an end token included
    logprobs: tuple[TokenLogprob, ...] | None = None  # one entry per token, if the request wants log-probabilities
    finish_reason: FinishReason | None = None  # why the request has ended; None while it runs
    stop_token: int | None = None  # with "stop", the token that ended the request
    cached_tokens: int = 0  # prompt tokens that were found in the prefix cache, known from the first token on
    error: str = ""  # with "error", what happened
    # with the first token, if the request wants them, one entry per prompt token after the first
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(slots=True)
class RequestOutput:
    """The output of a request so far.

    Attributes:
        request_id: the name of the request.
        prompt_tokens: token ids of the prompt.
        text: the output without end tokens, up to a stop string.
        delta: what the last update added to ``text``.
        tokens: token ids of the output, an end token included.
        logprobs: one entry per output token, if the request wants log-probabilities.
        prompt_logprobs: one entry per prompt token, if the request wants them, from the first update on; None for the
            first token, which follows nothing.
        finish_reason: "stop" (an end token or a stop string), "length", "abort" or "error"; None while it runs.
        stop_reason: the stop string or stop token that ended the output; None for the model's end token.
        error: the error message if ``finish_reason`` is "error".
        cached_tokens: prompt tokens found in the prefix cache.
        times_s: for each output token, the seconds from the request to its arrival.
        time_s: seconds from the request to its last update.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    text: str = ""
    delta: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str = ""
    cached_tokens: int = 0
    times_s: list[float] = field(default_factory=list)
    time_s: float = 0.0

    @property
    def finished(self) -> bool:
        """Return whether the output is complete or has failed."""
        return self.finish_reason is not None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token in seconds; None before it."""
        return self.times_s[0] if self.times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, in seconds; None with fewer than two tokens."""
        if len(self.times_s) < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)


OutputCallback = Callable[[RequestOutput | Exception], None]
"""Called each time the output has grown, always with the same object, or with the error that ended the request."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of the engine, and its counters since it started.

    Attributes:
        running, waiting: requests being computed, and requests in the queue.
        kv_blocks, kv_blocks_used: blocks of the paged cache, and the blocks that running requests hold.
        prompt_tokens, cached_tokens, output_tokens: sums over all requests; ``cached_tokens`` are prompt tokens that
            were found in the prefix cache.
        preemptions: how often a request lost its blocks to others and was computed again.
        proposed_tokens, accepted_tokens: speculative proposals that were verified, and that were accepted.
        steps: steps of the engine.
        step_s, communication_s: time of steps on rank 0, and the part of it in collectives; on CUDA over stamped steps
            only (``EngineConfig.stamp_every``).
    """

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    step_s: float = 0.0
    communication_s: float = 0.0
