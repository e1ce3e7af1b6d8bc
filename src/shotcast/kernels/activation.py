"""The activations of gates."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
"""SiLU, or GELU approximated by tanh."""
