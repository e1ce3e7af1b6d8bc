"""Rotary position embedding (RoPE; Su et al., arXiv 2104.09864), and methods of stretching it to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args

from shotcast.errors import ConfigError

if TYPE_CHECKING:
    import torch

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE_TYPES: tuple[RopeType, ...] = get_args(RopeType)

_LEAST = 1e-18
"""The smallest number whose square and inverse square fit float32."""


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a model: angles ``position * frequency``, and a factor of both sine and cosine.

    The frequency of pair i of a head is ``theta ** (-2 i / head_dim)``, changed according to ``rope_type``:

    - ``default``: unchanged;
    - ``linear``: divided by ``factor``;
    - ``dynamic``: computed with a larger theta, depending on how far the served length exceeds
      ``original_max_position``; unchanged up to that length (NTK-aware scaling, as Transformers computes it for a
      sequence of the served length);
    - ``llama3``: divided by ``factor`` where the wavelength is above ``original_max_position / low_freq_factor``,
      unchanged below ``original_max_position / high_freq_factor``, and blended in between (model card of Llama 3.1);
    - ``yarn``: blended between the two, by how often a pair turns within ``original_max_position``, from ``beta_fast``
      turns (kept) to ``beta_slow`` (divided); sine and cosine are multiplied by ``attention_factor`` (Peng et al.,
      arXiv 2309.00071).

    ``divisors``, if given, replace all this: each pair's frequency is divided by its number; with ``longrope``, by its
    number in ``short_divisors`` if the served length is at most ``original_max_position`` (Ding et al., arXiv
    2402.13753).

    Raises ConfigError if a number is implausibly small or large, or float32 might not hold the results; or if theta is
    1 with ``yarn``, which divides by its logarithm.
    """

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    divisors: tuple[float, ...] | None = None
    short_divisors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        named = [field.name for field in fields(self) if field.type in ("float", "float | None", "int")]
        numbers = [(name, getattr(self, name)) for name in named]
        divisors = [("a divisor", divisor) for divisor in (self.divisors or ()) + (self.short_divisors or ())]
        for name, value in numbers + divisors:
            if value is not None and not _LEAST <= value <= 1 / _LEAST:
                raise ConfigError(
                    f"{name} of rotary embedding must be from {_LEAST:g} to {1 / _LEAST:g}, not {value:g}"
                )
        if self.rope_type == "yarn" and self.theta == 1:
            raise ConfigError("theta of rotary embedding with yarn must not be 1")

    def context_length(self, max_position: int) -> int:
        """Return the number of tokens that a model supports.

        For ``linear`` and ``dynamic``, ``max_position`` is the length before stretching, which ``factor`` multiplies;
        for ``yarn``, ``original_max_position`` is. For other types it includes the stretching.
        """
        if self.divisors is not None or self.rope_type in ("default", "llama3"):
            return max_position
        return round((self.original_max_position if self.rope_type == "yarn" else max_position) * self.factor)

    def frequencies(self, head_dim: int, positions: int) -> torch.Tensor:
        """Return float32 [head_dim / 2], radians per position, for sequences of at most ``positions`` tokens."""
        import torch  # here, as clients of the engine read configurations without it

        theta = self.theta
        if self.rope_type == "dynamic":
            stretched = max(positions / self.original_max_position, 1.0)
            theta *= (1 + self.factor * (stretched - 1)) ** (head_dim / (head_dim - 2))
        wavelengths = theta ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
        if self.short_divisors is not None:
            each = self.short_divisors if positions <= self.original_max_position else self.divisors
            return 1.0 / (torch.tensor(each, device="cpu") * wavelengths)
        base = 1.0 / wavelengths
        if self.divisors is not None:
            return base / torch.tensor(self.divisors, device="cpu")
        if self.rope_type == "linear":
            return base / self.factor
        if self.rope_type == "llama3":
            rotations = self.original_max_position * base / (2 * math.pi)
            unscaled = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            unscaled = unscaled.clamp(0, 1)
            return unscaled * base + (1 - unscaled) * base / self.factor
        if self.rope_type == "yarn":

            def pair_of(rotations: float) -> float:
                span = math.log(self.original_max_position / (rotations * 2 * math.pi))
                return head_dim * span / (2 * math.log(self.theta))

            low = max(math.floor(pair_of(self.beta_fast)), 0)
            high = min(math.ceil(pair_of(self.beta_slow)), head_dim - 1)
            ramp = (torch.arange(head_dim // 2, device="cpu").float() - low) / max(high - low, 0.001)
            unscaled = 1 - ramp.clamp(0, 1)
            return unscaled * base + (1 - unscaled) * base / self.factor
        return base

    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.rope_type == "yarn" and self.factor > 1 else 1.0

    def tables(self, head_dim: int, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of positions from 0: two float32 tensors [positions, head_dim / 2].

        Computed entirely in float32, as in training and in other implementations.
        """
        import torch

        angles = torch.arange(positions, device="cpu").float()[:, None] * self.frequencies(head_dim, positions)
        magnitude = self.magnitude()
        return (angles.cos() * magnitude).to(device), (angles.sin() * magnitude).to(device)
