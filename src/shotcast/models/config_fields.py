"""Checked access to the fields of a ``config.json``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from shotcast.errors import ConfigError, UnsupportedError, shorten

Fields = Mapping[str, Any]
"""The object of a ``config.json``, or one within it."""

MAX_COUNT = (1 << 31) - 1
"""The largest valid count in a model."""


def _given(config: Fields, key: str, default: Any) -> Any:
    value = config.get(key, default)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config.json has no {key}")
    return value


def count(config: Fields, key: str, default: int | None = None, least: int = 1) -> int:
    """Return an integer of at least ``least``. Raises ConfigError for anything else."""
    value = _given(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_COUNT:
        raise ConfigError(
            f"{key} in config.json must be a whole number from {least} to {MAX_COUNT}, not {shorten(value)}"
        )
    return value


def number(config: Fields, key: str, default: float | None = None) -> float:
    """Return a finite positive number. Raises ConfigError for anything else."""
    value = _given(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{key} in config.json must be a number above 0, not {shorten(value)}")
    return float(value)


def numbers(config: Fields, key: str) -> tuple[float, ...]:
    """Return a list of finite positive numbers. Raises ConfigError for anything else, or if it is missing."""
    values = _given(config, key, None)
    if not isinstance(values, list):
        raise ConfigError(f"{key} in config.json must be a list of numbers, not {shorten(values)}")
    return tuple(number({key: value}, key) for value in values)


def strings(config: Fields, key: str) -> list[str]:
    """Return a list of strings, empty if the field is missing. Raises ConfigError for anything else."""
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{key} in config.json must be a list of names, not {shorten(value)}")
    return value


def full_layers(config: Fields, layers: int, default: Callable[[int], bool]) -> tuple[int, ...]:
    """Return the layers with ``full_attention`` in ``layer_types``; the others must be ``sliding_attention``. Raises
    ConfigError if the number of types differs from the number of layers. Raises UnsupportedError for other types.

    Args:
        default: whether a layer is one of these if config.json has no ``layer_types``.
    """
    kinds = strings(config, "layer_types")
    if not kinds:
        return tuple(layer for layer in range(layers) if default(layer))
    if others := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise UnsupportedError(
            f"layer_types {', '.join(others)} is not supported; accepted: full_attention, sliding_attention"
        )
    if len(kinds) != layers:
        raise ConfigError(f"layer_types in config.json has {len(kinds)} layers, not {layers}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def token_ids(config: Fields, key: str) -> tuple[int, ...]:
    """Return token ids: none, one or a list. Raises ConfigError for anything else."""
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if wrong := [token for token in ids if isinstance(token, bool) or not isinstance(token, int)]:
        raise ConfigError(f"{key} in config.json must be a token id or a list of them, not {wrong[0]!r}")
    # some checkpoints write -1 for "none"
    return tuple(token for token in ids if token >= 0)
