"""GGUF block formats that CPU kernels multiply directly."""

from __future__ import annotations

BLOCKS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}
"""Values and bytes per block, by format."""
