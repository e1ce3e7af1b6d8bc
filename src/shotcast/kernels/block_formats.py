"""The formats of GGUF files whose blocks CPUs multiply with."""

from __future__ import annotations

BLOCKS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}
"""The values and the bytes of a block, by format."""
