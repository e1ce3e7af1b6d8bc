"""Sampling parameters: how a request samples tokens, and when its output stops."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any

from shotcast.engine.grammar import Grammar
from shotcast.errors import ConfigError

MAX_LOGIT_BIAS = 1024
"""The largest number of tokens whose logits a request changes."""

MAX_LOGPROBS = 20
"""The largest number of alternatives per token that a request may ask for."""

MAX_STOP_TOKEN_IDS = 1024
"""The largest number of stop tokens of a request."""

_NUMBER = int, float


def checked_token_ids(tokens: Iterable[object], name: str) -> tuple[int, ...]:
    """Convert token ids of any integer type, such as NumPy's and PyTorch's, to a tuple of int.

    Args:
        tokens: the token ids.
        name: their name in error messages.

    Raises:
        ConfigError: they are not non-negative integers.
    """
    if not isinstance(tokens, Iterable) or isinstance(tokens, str | bytes):
        raise ConfigError(f"{name} must hold token ids, not {tokens!r}")
    ids = tuple(token if type(token) is int else _as_int(token, name) for token in tokens)
    if ids and min(ids) < 0:
        raise ConfigError(f"{name} holds {min(ids)}; token ids must be whole numbers of at least 0")
    return ids


def _as_int(token: object, name: str) -> int:
    try:
        if not isinstance(token, bool):
            return index(token)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ConfigError(f"{name} holds {token!r}; token ids must be whole numbers of at least 0")


def _stop_token_set(tokens: Iterable[object]) -> frozenset[int]:
    limited = list(islice(tokens, MAX_STOP_TOKEN_IDS + 1)) if isinstance(tokens, Iterable) else tokens
    ids = checked_token_ids(tokens if isinstance(tokens, str | bytes) else limited, "stop_token_ids")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise ConfigError(f"stop_token_ids must hold at most {MAX_STOP_TOKEN_IDS} token ids")
    return frozenset(ids)


def _checked_bias(bias: object) -> tuple[tuple[int, float], ...]:
    """Check the bias of each token, and return the pairs of token and bias."""
    pairs = tuple(bias.items()) if isinstance(bias, Mapping) else bias
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ConfigError(f"logit_bias must map token ids to numbers, not {bias!r}")
    if len(pairs) > MAX_LOGIT_BIAS:
        raise ConfigError(f"logit_bias must hold at most {MAX_LOGIT_BIAS} tokens, not {len(pairs)}")
    tokens = checked_token_ids((token for token, _ in pairs), "logit_bias")
    for _, value in pairs:
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise ConfigError(f"logit_bias must hold numbers from -100 to 100, not {value!r}")
    return tuple(sorted(dict(zip(tokens, (float(value) for _, value in pairs), strict=True)).items()))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling, and conditions that end the output.

    They apply in the usual order: logit_bias and penalties first, then temperature, then top_k, top_p and min_p on the
    allowed tokens.

    Args:
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: keep this many of the likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens until their probabilities add up to this, in (0, 1].
        min_p: drop tokens whose probability is less than this times that of the likeliest, in [0, 1].
        presence_penalty: subtracted from the logit of each token that the output contains, in [-2, 2].
        frequency_penalty: the same, multiplied by how often the output contains the token.
        repetition_penalty: divides the positive logits, and multiplies the others, of each token that the prompt or the
            output contains, from 0.001 to 10; it applies before the other penalties.
        logit_bias: numbers from -100 to 100 that are added to the logits of at most MAX_LOGIT_BIAS tokens, by token;
            kept as a tuple of pairs.
        allowed_token_ids: the only tokens that are sampled, an end token among them or not; None allows all. Kept as a
            tuple.
        grammar: the language of the output, in which end tokens are allowed where the output may end.
        min_tokens: no end token and none of ``stop_token_ids`` is sampled before this many tokens, and no stop string
            is looked for in their text.
        seed: makes sampling repeatable; None samples differently each time.
        max_tokens: the largest number of output tokens; 0 computes only the prompt.
        stop: a string or several that end the output, which then ends before them; kept as a tuple.
        stop_token_ids: at most MAX_STOP_TOKEN_IDS tokens that end the output, besides the model's end tokens; kept as a
            frozen set.
        ignore_eos: the model's end tokens do not end the output.
        skip_special_tokens: leave special tokens out of the text; False shows them by name.
        logprobs: None, or how many of the likeliest tokens to report at each position, besides the sampled one.
        prompt_logprobs: the same for the tokens of the prompt, each given the preceding ones. The prompt is then
            computed as a whole, even if other requests have computed parts of it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: Sequence[int] | None = None
    grammar: Grammar | None = None
    min_tokens: int = 0
    seed: int | None = None
    max_tokens: int = 256
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] | Set[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        def require(name: str, kind: Any, low: float, high: float, accepted: str) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
                raise ConfigError(f"{name} must be {accepted}, not {value!r}")

        require("temperature", _NUMBER, 0.0, 1e6, "a number of at least 0")
        require("top_k", int, 0, math.inf, "a whole number of at least 0 (all tokens)")
        require("top_p", _NUMBER, 0.0, 1.0, "a number above 0, at most 1")
        if self.top_p == 0:
            raise ConfigError("top_p must be a number above 0, at most 1, not 0; for the likeliest token use top_k=1")
        require("min_p", _NUMBER, 0.0, 1.0, "a number from 0 to 1")
        require("presence_penalty", _NUMBER, -2.0, 2.0, "a number from -2 to 2")
        require("frequency_penalty", _NUMBER, -2.0, 2.0, "a number from -2 to 2")
        require("repetition_penalty", _NUMBER, 1e-3, 10.0, "a number from 0.001 to 10")
        if self.seed is not None:
            require("seed", int, -(2**63), 2**63 - 1, "None or a whole number of 64 bits")
        require("max_tokens", int, 0, math.inf, "a whole number of at least 0")
        require("min_tokens", int, 0, math.inf, "a whole number of at least 0")
        if self.logit_bias != ():
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = tuple(dict.fromkeys(checked_token_ids(self.allowed_token_ids, "allowed_token_ids")))
            if not allowed:
                raise ConfigError("allowed_token_ids must hold at least one token id")
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ConfigError(f"grammar must be a Grammar, not {self.grammar!r}")
        if self.grammar is not None and self.ignore_eos:
            raise ConfigError("ignore_eos cannot be combined with a grammar, whose outputs end")
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, list | tuple) or not all(isinstance(text, str) and text for text in stops):
            raise ConfigError(f"stop must be a string or several, none of them empty, not {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stops))
        object.__setattr__(self, "stop_token_ids", _stop_token_set(self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                require(name, int, 0, MAX_LOGPROBS, f"None or a whole number from 0 to {MAX_LOGPROBS}")

    def for_choice(self, max_tokens: int, seed: int | None) -> SamplingParams:
        """Return these parameters with another limit and seed, which must be valid and are not checked."""
        choice = copy.copy(self)
        object.__setattr__(choice, "max_tokens", max_tokens)
        object.__setattr__(choice, "seed", seed)
        return choice

    @property
    def greedy(self) -> bool:
        """Return whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Return whether a presence, frequency or repetition penalty applies."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def is_constrained(self) -> bool:
        """Return whether tokens are excluded, or their logits changed by more than penalties."""
        return bool(self.logit_bias or self.allowed_token_ids or self.grammar or self.min_tokens)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The tokens of ``logit_bias``, each with the value added to its logit."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def named_tokens(self) -> Iterable[tuple[str, int]]:
        """The largest token of each parameter that names tokens to sample, all of which must be in the vocabulary."""
        if self.logit_bias:
            yield "logit_bias", max(token for token, _ in self.biases)
        if self.allowed_token_ids:
            yield "allowed_token_ids", max(self.allowed_token_ids)

    @property
    def has_top_k_or_top_p(self) -> bool:
        """Return whether sampling needs the tokens in order of probability."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def min_p_logit(self) -> float:
        """The smallest logit that min_p keeps, relative to the largest logit of the row."""
        return math.log(self.min_p) if self.min_p else -math.inf
