"""A request as the engine core receives it."""

from __future__ import annotations

from dataclasses import dataclass

from shotcast.engine.sampling_params import SamplingParams
from shotcast.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """Token ids that :meth:`AsyncLLM.check_prompt` has checked, so that they are not checked again."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as token ids, with its sampling parameters."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams


def max_output_tokens(prompt_tokens: int, max_model_len: int) -> int:
    """Return the maximum number of output tokens. Raises ConfigError if the prompt is empty or too long."""
    if not prompt_tokens:
        raise ConfigError("the prompt is empty; it needs at least one token")
    if prompt_tokens >= max_model_len:
        raise ConfigError(
            f"the prompt has {prompt_tokens} tokens; prompt and output together have at most {max_model_len}, so a "
            f"prompt has at most {max_model_len - 1}"
        )
    return max_model_len - prompt_tokens
