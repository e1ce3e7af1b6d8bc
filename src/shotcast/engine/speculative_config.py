"""The speculative decoding configuration, with vLLM's option names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shotcast.errors import ConfigError, similar

METHODS = ("ngram", "draft_model")
MAX_SPECULATIVE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The source of proposals, and their number.

    Args:
        num_speculative_tokens: the most tokens proposed for a sequence in a step.
        method: ``ngram`` proposes the tokens that followed the last tokens earlier in the text; ``draft_model``
            proposes what a smaller model would sample, and is the default if ``model`` is given.
        model: the smaller model, with the same tokenizer.
        prompt_lookup_max, prompt_lookup_min: the most and the fewest tokens that ``ngram`` looks for; one of them
            stands for both, and 5 if neither is given.

    Raises:
        ConfigError: a value cannot be used.
    """

    num_speculative_tokens: int
    method: str = ""
    model: str = ""
    prompt_lookup_max: int = 0
    prompt_lookup_min: int = 0

    def __post_init__(self) -> None:
        for name, high in (
            ("num_speculative_tokens", MAX_SPECULATIVE_TOKENS),
            ("prompt_lookup_max", 64),
            ("prompt_lookup_min", 64),
        ):
            value, low = getattr(self, name), int(name == "num_speculative_tokens")
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"{name} of speculative_config must be from {low} to {high}, not {value!r}")
        for name in ("method", "model"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} of speculative_config must be a string, not {getattr(self, name)!r}")
        if not self.method and self.model:
            object.__setattr__(self, "method", "draft_model")
        if self.method not in METHODS:
            raise ConfigError(f"method of speculative_config must be {' or '.join(METHODS)}, not {self.method!r}")
        if (self.method == "draft_model") != bool(self.model):
            wanted = "needs the model that drafts" if not self.model else "has no model"
            raise ConfigError(f"method {self.method} of speculative_config {wanted}")
        longest = self.prompt_lookup_max or self.prompt_lookup_min or 5
        shortest = self.prompt_lookup_min or longest
        if self.model and (self.prompt_lookup_max or self.prompt_lookup_min):
            raise ConfigError("prompt_lookup_max and prompt_lookup_min of speculative_config are for method ngram")
        if shortest > longest:
            raise ConfigError(f"prompt_lookup_min ({shortest}) must not exceed prompt_lookup_max ({longest})")
        object.__setattr__(self, "prompt_lookup_max", longest if not self.model else 0)
        object.__setattr__(self, "prompt_lookup_min", shortest if not self.model else 0)

    @classmethod
    def read(cls, value: object) -> SpeculativeConfig:
        """Parse a mapping of options, or the same in JSON.

        Raises:
            ConfigError: the value has another type, or an option is unknown, missing or invalid.
        """
        if isinstance(value, SpeculativeConfig):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"speculative_config is not JSON: {error}") from error
        if not isinstance(value, Mapping):
            raise ConfigError(
                'speculative_config must be options such as {"method": "ngram", "num_speculative_tokens": 4}, '
                f"not {value!r}"
            )
        options: dict[str, Any] = {str(name): option for name, option in value.items()}
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                hint = similar("did you mean {}?", name, known) or f"it has {', '.join(known)}"
                raise ConfigError(f"speculative_config has no option {name!r}; {hint}")
        if "num_speculative_tokens" not in options:
            raise ConfigError("speculative_config needs num_speculative_tokens, such as 4")
        return cls(**options)
