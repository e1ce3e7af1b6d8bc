"""Reader for the fields of a cluster description, which checks figures and explains errors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shotcast.errors import ConfigError, shorten

Figures = Mapping[str, tuple[str, float, float]]
"""The unit and range of each figure. The ranges are wide: a value outside one has the wrong unit."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The mapping in a description, its origin, and the figures that it may have."""

    values: Mapping[str, Any]
    origin: str
    figures: Figures

    def only(self, others: Collection[str]) -> None:
        """Raise ConfigError if there is a field that is neither a figure nor one of ``others``."""
        known = {*self.figures, *others}
        if unknown := [str(name) for name in self.values if name not in known]:
            raise ConfigError(f"{self.origin}: unknown field {unknown[0]!r}; accepted: {', '.join(sorted(known))}")

    def part(self, name: str, figures: Figures, others: Collection[str]) -> Fields:
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.origin}: {name} must be a mapping of figures, not {shorten(value)}")
        part = Fields(value, f"{self.origin}: {name}", figures)
        part.only(others)
        return part

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{self.origin}: {name} must be text, not {shorten(value)}")
        return value

    def number(self, name: str) -> float:
        value = self.value(name)  # YAML 1.1 reads 1e12 as text
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        unit, least, most = self.figures[name]
        if not 0 < number < math.inf:
            raise ConfigError(f"{self.origin}: {name} must be a number above 0, not {shorten(value)}")
        if not least <= number <= most:
            unit = f" {unit}" * bool(unit)
            raise ConfigError(f"{self.origin}: {name} must be from {least:g} to {most:g}{unit}, not {number:g}")
        return number

    def count(self, name: str) -> int:
        number = self.number(name)
        if number != int(number):
            raise ConfigError(f"{self.origin}: {name} must be a whole number, not {number}")
        return int(number)

    def value(self, name: str) -> Any:
        if name not in self.values:
            raise ConfigError(f"{self.origin} lacks {name}")
        return self.values[name]


def read_yaml(text: str, origin: str, wanted: str) -> Mapping[str, Any]:
    """Parse a YAML mapping. Raises ConfigError if it is not ``wanted``, or has a duplicate field."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Rejects duplicate fields, of which YAML's loader would take the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise ConfigError(f"{origin}, line {key.start_mark.line + 1}: {shorten(key.value)} is there twice")
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    try:
        value = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{origin} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"{origin} is not {wanted}")
    return value
