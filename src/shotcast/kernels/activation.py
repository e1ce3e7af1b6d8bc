"""Activation functions for gating."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
"""SiLU, or the tanh approximation of GELU."""
