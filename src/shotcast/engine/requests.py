"""What is asked of the engine, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Literal, NamedTuple

from shotcast.errors import ConfigError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
"""Alternatives that may be asked for at each token."""


def token_ids(tokens: Iterable[object], what: str) -> tuple[int, ...]:
    """Tokens of whatever integer type, as NumPy and PyTorch have their own.

    Raises:
        ConfigError: what is said to be ``what`` does not hold whole numbers from 0 up.
    """
    if not isinstance(tokens, Iterable) or isinstance(tokens, str | bytes):
        raise ConfigError(f"{what} holds token ids, not {tokens!r}")
    given = tuple(token if type(token) is int else _as_int(token, what) for token in tokens)
    if given and min(given) < 0:
        raise ConfigError(f"{what} holds {min(given)}; token ids are whole numbers from 0 up")
    return given


def _as_int(token: object, what: str) -> int:
    try:
        if not isinstance(token, bool):
            return index(token)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ConfigError(f"{what} holds {token!r}; token ids are whole numbers from 0 up")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn from the logits, and when to stop.

    The order is that of the field: penalties, then temperature, then top_k, top_p and min_p on what is left.

    Args:
        temperature: divides the logits; 0 takes the likeliest token, always.
        top_k: keep this many of the likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens until their probabilities reach this, in (0, 1].
        min_p: drop tokens less likely than this times the likeliest, in [0, 1].
        presence_penalty: subtracted from the logit of each token that the output holds, in [-2, 2].
        frequency_penalty: the same, for each time that it holds it.
        seed: makes the draws of a request repeatable; None for other draws each time.
        max_tokens: the output is not longer.
        stop: a string or several that end the output, which then ends before them; kept as a tuple.
        stop_token_ids: tokens that end the output, besides the model's own.
        ignore_eos: the model's own end tokens do not end the output.
        logprobs: None, or how many of the likeliest tokens to report at each place, besides the one that was drawn.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def between(name: str, low: float, high: float, accepted: str) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ConfigError(f"{name} is {accepted}, not {value!r}")

        def whole(name: str, low: int, high: float, accepted: str) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} is {accepted}, not {value!r}")

        between("temperature", 0.0, 1e6, "a number from 0 up")
        whole("top_k", 0, math.inf, "a whole number from 0 (all tokens) up")
        between("top_p", 0.0, 1.0, "a number above 0, at most 1")
        if self.top_p == 0:
            raise ConfigError("top_p is a number above 0, at most 1, not 0; for the likeliest token alone say top_k=1")
        between("min_p", 0.0, 1.0, "a number from 0 to 1")
        between("presence_penalty", -2.0, 2.0, "a number from -2 to 2")
        between("frequency_penalty", -2.0, 2.0, "a number from -2 to 2")
        if self.seed is not None:
            whole("seed", -(2**63), 2**63 - 1, "None or a whole number of 64 bits")
        whole("max_tokens", 1, math.inf, "a whole number from 1 up")
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, list | tuple) or not all(isinstance(text, str) and text for text in stops):
            raise ConfigError(f"stop is a string or several, none of them empty, not {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stops))
        object.__setattr__(self, "stop_token_ids", token_ids(self.stop_token_ids, "stop_token_ids"))
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos is True or False, not {self.ignore_eos!r}")
        if self.logprobs is not None:
            whole("logprobs", 0, MAX_LOGPROBS, f"None or a whole number from 0 to {MAX_LOGPROBS}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def cuts(self) -> bool:
        """Whether what is drawn depends on the order of the tokens."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def floor(self) -> float:
        """p >= min_p p_max, as logits whose largest is 0."""
        return math.log(self.min_p) if self.min_p else -math.inf


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as the engine's core sees it."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams


def output_room(prompt: int, max_model_len: int) -> int:
    """Tokens that the output of a prompt of so many may have.

    Raises:
        ConfigError: the prompt is empty, or leaves no room for a token of output.
    """
    if not prompt:
        raise ConfigError("the prompt is empty; it takes at least one token")
    if prompt >= max_model_len:
        raise ConfigError(
            f"the prompt has {prompt} tokens; prompt and output together have at most {max_model_len}, so a prompt "
            f"has at most {max_model_len - 1}"
        )
    return max_model_len - prompt


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one place of the output, of the model's own distribution (before temperature and the rest).

    Attributes:
        token: the token that was drawn.
        logprob: its log-probability.
        rank: its place among all tokens, 1 for the likeliest.
        top: the likeliest tokens with their log-probabilities, likeliest first, as many as were asked for.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Progress(NamedTuple):
    """What one step of the engine did for a request: from the core to whoever asked.

    Attributes:
        tokens: drawn since the last one. An end token is among them.
        finish: why it ended; None if it goes on. With "stop", ``stop_token`` is the token that ended it; with "error",
            ``error`` says what happened.
        cached: tokens of the prompt that were found computed, known from the first token on.
    """

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    cached: int = 0
    error: str = ""


@dataclass(slots=True)
class RequestOutput:
    """A request as it stands: all there is so far.

    Attributes:
        text: the output, without end tokens, up to a stop string.
        delta: what ``text`` grew by since the output before.
        tokens: of the output, an end token among them.
        finish_reason: "stop" (an end token, or a stop string), "length", "abort", "error"; None if it goes on.
        stop_reason: the stop string or stop token that ended it; None for the model's own end token.
        error: with "error", what happened.
        times_s: seconds from the request to each of its tokens.
        time_s: seconds from the request to the last news of it.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    text: str = ""
    delta: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str = ""
    cached_tokens: int = 0
    times_s: list[float] = field(default_factory=list)
    time_s: float = 0.0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request to its first token, None before."""
        return self.times_s[0] if self.times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds an output token after the first; None with fewer than two."""
        if len(self.times_s) < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands, and its counters since it started.

    Attributes:
        running, waiting: requests being computed, and in the queue.
        kv_blocks, kv_blocks_used: of the paged cache; used are those that running requests hold.
        prompt_tokens, cached_tokens, output_tokens: of all requests; ``cached`` were found computed.
        preemptions: times that a request lost its blocks to others and was computed again.
        steps: of the engine.
        step_s, communication_s: time of steps on rank 0, and of it that in collectives; on CUDA of stamped steps alone
            (``EngineConfig.stamp_every``).
    """

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    step_s: float = 0.0
    communication_s: float = 0.0


ListenToOutput = Callable[[RequestOutput | Exception], None]
"""Told an output each time that it has grown, always the same object, or the error that ended it."""
